"""Bodies as other people's clients write them, on every route: encodings, nulls, numbers and unknown fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from gateway.bodies import MAX_DEPTH
from tests.support.coordinator_rig import Rig
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.table_services import write_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share services

TEMPLATE = (
    "{% for message in messages %}{{ message.content or message.tool_calls[0].function.name }} {% endfor %}"
    "{{ 'w9' if extra is none else '' }}"
)
HELLO = [{"role": "user", "content": "w5 w6"}]
#: The least that each route accepts.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "w5 w6", "max_tokens": 2},
    "/v1/responses": {"input": "w5 w6", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [5, 6]},
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
MAX_BYTES = 1 << 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[RunningGateway]:
    async with Rig(write_checkpoint=partial(write_tokenizer, chat_template=TEMPLATE)) as rig:
        coordinator = await rig.coordinator()
        async with running_gateway(coordinator.server.address, max_body_bytes=MAX_BYTES) as running:
            yield running


@pytest.fixture(params=[*BODIES])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def send(running: RunningGateway, path: str, content: bytes, encoding: str = "") -> tuple[int, str]:
    """Return the status of a body, and the text of the answer or of its error."""
    headers = {"content-type": "application/json"} | ({"content-encoding": encoding} if encoding else {})
    answer = await running.http.post(path, content=content, headers=headers)
    if answer.status_code == 415:
        assert answer.headers["accept-encoding"] == "gzip"
    return answer.status_code, answer.json()["error"]["message"] if answer.is_error else answer.text


async def post(running: RunningGateway, path: str, **fields: Any) -> tuple[int, str]:
    return await send(running, path, json.dumps(BODIES[path] | fields).encode())


async def test_a_gzip_body_is_read_as_the_body_in_it(running: RunningGateway, path: str) -> None:
    plain = json.dumps(BODIES[path]).encode()
    packed = gzip.compress(plain)
    assert (await send(running, path, packed, "gzip"))[0] == 200
    assert (await send(running, path, packed, "X-GZIP, identity"))[0] == 200
    assert (await send(running, path, gzip.compress(plain[:9]) + gzip.compress(plain[9:]), "gzip"))[0] == 200
    assert (await send(running, path, plain, "identity"))[0] == 200


async def test_an_unknown_encoding_is_a_415_that_names_it(running: RunningGateway, path: str) -> None:
    plain = json.dumps(BODIES[path]).encode()
    for encoding in ("br", "zstd", "deflate", "compress", "gzip, gzip", "gzip, br", "x" * 5000):
        status, words = await send(running, path, zlib.compress(plain), encoding)
        assert (status, words[:17]) == (415, "content-encoding:")
        assert encoding[:64] in words
        assert len(words) < 200


async def test_a_broken_gzip_body_is_refused_and_a_large_one_is_never_unpacked(
    running: RunningGateway, path: str
) -> None:
    packed = gzip.compress(json.dumps(BODIES[path]).encode())
    wrong_sum = packed[:-8] + b"\0\0\0\0" + packed[-4:]
    for broken in (packed[:-9], b"{}", packed + b"more", wrong_sum, gzip.compress(b"") * 1000):
        status, words = await send(running, path, broken, "gzip")
        assert (status, words[:17]) == (400, "content-encoding:"), words
    fits, exceeds = (json.dumps(BODIES[path]).encode().ljust(MAX_BYTES + more) for more in (0, 1))
    assert (await send(running, path, gzip.compress(fits), "gzip"))[0] == 200
    for bomb in (gzip.compress(exceeds), gzip.compress(b" " * (48 << 20)), gzip.compress(b" " * MAX_BYTES) * 2):
        status, words = await send(running, path, bomb, "gzip")
        assert status == 413
        assert str(MAX_BYTES) in words


def nested(depth: int) -> bytes:
    return b'{"x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "latin": (b'{"prompt": "caf\xe9"}', "not valid UTF-8 at byte 15"),
    "byte": (b"\xff", "not valid UTF-8 at byte 0"),
    "surrogate": (b'{"prompt": "\xed\xa0\x80"}', "not valid UTF-8 at byte 12"),
    "digits": (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits: at most 4300"),
    "negative": (b'{"x": [-' + b"1" * 4301 + b"]}", "too many digits: at most 4300"),
    "deep": (nested(100_000), f"nested too deeply: at most {MAX_DEPTH} levels"),
    "one too deep": (nested(MAX_DEPTH + 1), f"nested too deeply: at most {MAX_DEPTH} levels"),
    "objects": (b'{"x":' * 5000 + b"1" + b"}" * 5000, f"nested too deeply: at most {MAX_DEPTH} levels"),
    "comma": (b'{"prompt": "x",}', "not valid JSON"),
    "cut": (b'{"prompt": "x"', "not valid JSON"),
    "list": (b"[]", "the request body: must be a valid dictionary"),
    "empty": (b"", "the request body must be a JSON object, got none"),
}


async def test_an_unreadable_body_is_a_400_that_says_why(running: RunningGateway, path: str) -> None:
    for name, (content, words) in UNREADABLE.items():
        status, told = await send(running, path, content if len(content) <= MAX_BYTES else content[: MAX_BYTES // 2])
        assert status == 400, name
        assert words in told, name
        assert len(told) < 200, name


async def test_the_deepest_body_that_is_read_is_answered(running: RunningGateway, path: str) -> None:
    depth = MAX_DEPTH - 1
    fields: tuple[dict[str, Any], ...] = ({"unknown": json.loads(b"[" * depth + b"]" * depth)},)
    if "chat" in path or path == "/tokenize":
        arguments = json.loads(b"[" * (depth - 1) + b"]" * (depth - 1))
        fields = (*fields, {"chat_template_kwargs": {"x": arguments}})
    for each in fields:
        assert (await post(running, path, **each))[0] in (200, 400)
    assert (await post(running, path, unknown=fields[0]["unknown"]))[0] == 200


async def test_null_is_an_absent_field_in_every_object_of_a_request(running: RunningGateway, path: str) -> None:
    nulls: dict[str, Any] = {"model": None, "unknown": None, "user": None, "grammar": None}
    if path in GENERATING:
        nulls |= {
            "stream": False, "n": None, "temperature": None, "seed": None, "stop": None, "logit_bias": {"5": None},
            "stream_options": {"include_usage": None, "continuous_usage_stats": None, "include_metrics": None},
            "speculation": {"mode": None, "gamma": None, "draft_pool": None, "task": None}, "tools": None,
            "response_format": {"type": None, "json_schema": None}, "session_id": None, "request_id": None,
        }  # fmt: skip
    if path == "/v1/responses":
        nulls |= {
            "metadata": {"a": None}, "text": {"format": {"type": None}, "verbosity": None}, "include": None,
            "reasoning": {"effort": None, "summary": None}, "truncation": None, "conversation": None, "store": None,
            "input": [{"type": None, "role": "user", "content": [{"type": "input_text", "text": "w5", "x": None}]}],
        }  # fmt: skip
    if "messages" in path:
        nulls |= {"thinking": {"type": None}, "output_config": {"format": {"type": None}}, "system": None}
        nulls |= {"tool_choice": {"type": None}}
    if path == "/v1/chat/completions":
        calls = [{"id": None, "type": "function", "function": {"name": "w7", "arguments": "{}", "strict": None}}]
        nulls["messages"] = [
            {"role": "user", "content": "w5", "name": None, "tool_calls": None},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "user", "content": [{"type": "text", "text": "w5", "cache_control": None}], "tool_call_id": None},
        ]
    status, words = await post(running, path, **nulls)
    assert status == 200, words
    if path in GENERATING:
        assert (await post(running, path, **nulls | {"stream": True}))[0] == 200


async def test_null_in_a_required_field_is_a_missing_field(running: RunningGateway, path: str) -> None:
    name = next(iter(BODIES[path]))
    status, words = await post(running, path, **{name: None})
    assert status == 400
    assert words in (f"{name}: is required", "give exactly one of prompt and messages")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
async def test_a_part_whose_text_is_no_text_is_refused_by_its_place(running: RunningGateway, path: str) -> None:
    for text in (None, 5, ["x"]):
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        status, words = await post(running, path, messages=[message])
        assert (status, words) == (400, "messages[0].content[0].text: must be text")


async def test_null_among_the_variables_of_a_template_is_a_value(running: RunningGateway) -> None:
    counts = []
    for extra in ({"extra": None}, {}, None):
        _, text = await post(running, "/tokenize", chat_template_kwargs=extra)
        counts.append(json.loads(text)["count"])
    assert counts[0] == counts[1] + 1 == counts[2] + 1


@pytest.mark.parametrize("path", GENERATING)
async def test_2_0_is_an_integer_and_2_5_is_none(running: RunningGateway, path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields: dict[str, Any] = {
        limit: 2.0, "n": 1.0, "top_k": -1.0, "seed": 5.0, "min_tokens": 1e0, "priority": -2.0, "stop_token_ids": [9.0],
        "speculation": {"gamma": 2.0},
    }  # fmt: skip
    status, text = await post(running, path, **fields)
    assert status == 200, text
    assert '"completion_tokens":2' in text or '"output_tokens":2' in text
    for name, value in fields.items():
        wrong = {"gamma": 2.5} if isinstance(value, dict) else [9.5] if isinstance(value, list) else value + 0.5
        status, words = await post(running, path, **{name: wrong})
        assert (status, words.split()[-3:]) == (400, ["a", "valid", "integer"]), (name, words)
    for value in ("2", "2.0", True, [2]):
        assert (await post(running, path, **{limit: value}))[0] == 400


async def test_token_ids_may_be_written_as_2_0(running: RunningGateway) -> None:
    answers = [await post(running, "/detokenize", tokens=tokens) for tokens in ([5, 6], [5.0, 6], [5, 6.0])]
    assert answers[0][0] == 200
    assert len(set(answers)) == 1
    for prompt in ([5.0, 6.0], [[5.0, 6.0], [7]]):
        assert (await post(running, "/v1/completions", prompt=prompt))[0] == 200
    for prompt in ([5.5], [[5, 6.5]], [1e30], ["5", 6.0]):
        assert (await post(running, "/v1/completions", prompt=prompt))[0] == 400


CONSTRAINTS = (
    "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema",
    "structured_outputs", "structural_tag", "regex", "stop_regex", "ebnf", "choice", "logits_processors",
    "custom_logit_processor", "format", "schema", "json_object", "response_schema", "responseSchema",
    "output_format", "suppress_tokens", "banned_strings", "force_words_ids", "guided_anything_new",
    "pattern", "regular_expression", "lark", "cfg", "gbnf", "bnf", "llguidance", "guidance", "guidedJson",
    "force_json", "response_model", "enum", "vocab_mask", "Guided-Regex",
)  # fmt: skip


_OF_COMPLETIONS = (
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    "use response_format or structured_outputs",
)
#: Fields of the routes that demand a form of the output, and what another one is told.
OWN_FORMS: dict[str, tuple[tuple[str, ...], str]] = {
    "/v1/chat/completions": _OF_COMPLETIONS,
    "/v1/completions": _OF_COMPLETIONS,
    "/v1/responses": ((), "use text.format"),
    "/v1/messages": ((), "use output_config.format"),
}


async def test_an_unknown_field_that_would_constrain_the_output_is_refused_by_name(
    running: RunningGateway, path: str
) -> None:
    """Its kind of value does not depend on the route."""
    values: tuple[Any, ...] = ({"type": "object"}, "x", ["x"], {})  # an empty schema demands JSON
    carriers = ("extra_body", "vllm_xargs", "generationConfig", *(() if path == "/v1/responses" else ("text",)))
    own, reason = OWN_FORMS.get(path, ((), "this route generates no text"))
    for name in {*CONSTRAINTS} - {*own}:
        for value in values if path == "/v1/chat/completions" else values[::3]:
            nested = [(f"{carrier}.{name}", {carrier: {name: value}}) for carrier in carriers]
            for told, fields in ((name, {name: value}), *nested):
                refused = (400, f"{told} is not supported: {reason}")
                assert await post(running, path, **fields) == refused
    for empty in (None, {"type": None}):
        assert (await post(running, path, **dict.fromkeys({*CONSTRAINTS} - {*own}, empty)))[0] == 200


@pytest.mark.parametrize("path", GENERATING)
async def test_an_unknown_field_that_would_change_the_text_is_refused_by_name(
    running: RunningGateway, path: str
) -> None:
    values = {
        "stop_strings": ["x"], "max_new_tokens": 5, "maxTokens": 5, "num_predict": 0, "random_seed": 0,
        "typical_p": 0.5, "no_repeat_ngram_size": 3, "top_a": 0.1, "mirostat": 2, "repeat_penalty": 1.1,
        "xtc_probability": 0.5, "do_sample": False, "topK": 0,
    } | ({} if path == "/v1/messages" else {"stop_sequences": ["x"]})  # fmt: skip
    nested = {"options": {"seed": 5}, "generationConfig": {"temperature": 0}, "extra_body": {"max_new_tokens": 5}}
    for name, value in (values | nested).items():
        told = f"{name}.{next(iter(value))}" if isinstance(value, dict) else name
        status, words = await post(running, path, **{name: value})
        assert (status, words.partition(":")[0]) == (400, f"{told} is not supported")
    off = {"typical_p": 1, "no_repeat_ngram_size": 0, "top_a": 0.0, "do_sample": True, "length_penalty": 1.0}
    assert (await post(running, path, **off, stop_strings=None, max_new_tokens=None))[0] == 200


SCHEMA = {"type": "object"}
#: Forms that each route can demand, and the field that the refusal of this vocabulary, of words, must name.
FORMS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "completions": [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
    "/v1/responses": [
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "text.format.schema"),
    ],
    "/v1/messages": [
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "output_config.format.schema"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", GENERATING)
async def test_a_form_that_the_model_cannot_follow_is_refused_by_the_field_that_demands_it(
    running: RunningGateway, path: str
) -> None:
    for fields, field in FORMS["completions" if "completions" in path else path]:
        for stream in (False, True):
            answer = await running.http.post(path, json=BODIES[path] | fields | {"stream": stream})
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["message"].startswith(field), error
            assert error.get("param", field) == field
    for text in ({"response_format": {"type": "text"}}, {"text": {"format": {"type": "text"}}}):
        if next(iter(text)) in str(FORMS["completions" if "completions" in path else path]):
            assert (await post(running, path, **text))[0] == 200


async def test_other_unknown_fields_are_ignored(running: RunningGateway, path: str) -> None:
    harmless = {
        "user": "u", "parallel_tool_calls": True, "service_tier": "auto", "safety_identifier": "x", "verbosity": "low",
        "prompt_cache_key": "k", "prediction": {"type": "content", "content": "x"}, "options": {"num_ctx": 5},
        "extra_body": {"anything": 1}, "cache_salt": "x", "reasoning_effort": "low",
    }  # fmt: skip
    assert (await post(running, path, **harmless))[0] == 200
