"""Conversations as chat templates read them: content as text or parts, arguments of tool calls, roles, missing texts.

Real coordinators over gRPC, and a gateway before one. The oracle is transformers' `apply_chat_template` with the form
that the template reads.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec.client import AsyncClient
from specdec.contract.errors import InvalidRequest
from specdec.v1 import coordinator_pb2 as pb
from tests.support.coordinator_rig import Coordinator, Rig
from tests.support.gateway_rig import RunningGateway, running_gateway
from tests.support.table_services import write_tokenizer as write_words

_EACH = "{% for m in messages %}[{{ m.role }}]"
_END = "{% endfor %}[assistant]"
#: Templates that read parts, in the ways of real ones.
READS_PARTS = {
    "selectattr": "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
    "loop": "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] | trim }}{% endif %}{% endfor %}",
    "map": "{{ m.content | map(attribute='text') | join('+') }}",
    "macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
    "concatenation": "{% for p in m.content %}{{ '<' + p['text'] + '>' }}{% endfor %}",
}
READS_TEXT = {
    "print": "{{ m.content }}",
    "concatenation": "{{ '<' + m.content + '>' }}",
    "trim": "{{ m.content | trim }}",
    "json": "{{ m.content | tojson }}",
}
READS_BOTH = (
    "{% if m.content is string %}={{ m.content }}{% else %}{% for p in m.content %}-{{ p.text }}{% endfor %}{% endif %}"
)
CALLS = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
CALL_END = ">{% endfor %}"


def write_tokenizer(directory: Path, template: str) -> None:
    """A token for each byte, so that every prompt can be read back."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: token_id for token_id, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(directory)


@asynccontextmanager
async def serving(message: str) -> AsyncIterator[tuple[Coordinator, AsyncClient, Any]]:
    """Give a coordinator, its client, and transformers' tokenizer, whose template renders each message so."""
    template = _EACH + message + _END
    async with Rig(drafts=0, write_checkpoint=partial(write_tokenizer, template=template)) as rig:
        coordinator = await rig.coordinator()
        async with AsyncClient(coordinator.server.address) as client:
            yield coordinator, client, PreTrainedTokenizerFast.from_pretrained(rig.directory)


async def prompt_of(client: AsyncClient, messages: Any) -> str:
    return await client.detokenize(await client.tokenize(messages=messages))


def rendered(tokenizer: Any, messages: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def parts(*texts: str) -> list[Any]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("name", READS_PARTS)
async def test_a_template_that_reads_parts_gets_parts(name: str) -> None:
    async with serving(READS_PARTS[name]) as (_, client, tokenizer):
        texts = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "i"}]
        as_parts = [message | {"content": parts(message["content"])} for message in texts]
        assert await prompt_of(client, texts) == rendered(tokenizer, as_parts)
        several = [texts[0], {"role": "user", "content": parts("one", "two\n", "three")}]
        assert await prompt_of(client, several) == rendered(tokenizer, [as_parts[0], several[1]])


@pytest.mark.parametrize("name", READS_TEXT)
async def test_a_template_that_reads_text_gets_text(name: str) -> None:
    async with serving(READS_TEXT[name]) as (_, client, tokenizer):
        texts = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a\nb"}]
        assert await prompt_of(client, texts) == rendered(tokenizer, texts)
        in_parts = [texts[0], {"role": "user", "content": parts("a", "b")}]
        assert await prompt_of(client, in_parts) == rendered(tokenizer, texts)


async def test_a_template_that_reads_both_gets_what_the_client_sent() -> None:
    async with serving(READS_BOTH) as (_, client, tokenizer):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts("a", "b")}]
        assert (
            await prompt_of(client, messages)
            == rendered(tokenizer, messages)
            == "[system]=be brief[user]-a-b[assistant]"
        )


async def test_a_template_that_reads_the_first_part_gets_all_texts_in_it() -> None:
    async with serving("{{ m.content[0].text }}") as (_, client, _):
        assert await prompt_of(client, [{"role": "user", "content": parts("a", "b")}]) == "[user]a\nb[assistant]"


@pytest.mark.parametrize(
    ("template", "index", "role"),
    [
        ("{% if m.role != 'tool' %}{{ m.content }}{% endif %}", 2, "tool"),
        ("{% if m.role == 'user' %}{{ m.content }}{% endif %}", 0, "system"),
        ("{% if loop.last %}{{ m.content }}{% endif %}", 0, "system"),
    ],
)
async def test_a_message_that_the_template_ignores_is_refused_by_its_place(
    template: str, index: int, role: str
) -> None:
    messages = [
        # The text occurs in the prompt anyway, as the name of a role.
        {"role": "system", "content": "user"},
        {"role": "user", "content": "abc"},
        {"role": "tool", "content": "9"},
        {"role": "user", "content": "d"},
    ]
    async with serving(template) as (_, client, _):
        for call in (client.tokenize(messages=messages), client.generate(messages)):
            with pytest.raises(InvalidRequest, match=f"would be missing from the prompt.*'{role}'") as refused:
                await call
            assert refused.value.field == f"messages[{index}]"


async def test_a_message_without_a_text_is_not_missed() -> None:
    async with serving("{% if m.content %}{{ m.content }}{% endif %}") as (_, client, _):
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": "a"}]
        assert await prompt_of(client, messages) == "[system][user]a[assistant]"


DROPS_BY_WORDS = {
    "in": "{% if 'hello' not in m.content %}{{ m.content }}{% endif %}",
    "equal": "{% if m.content != 'hello' %}{{ m.content }}{% endif %}",
    "start": "{% if not m.content.startswith('hel') %}<{{ m.content | trim }}>{% endif %}",
    "stripped": "{{ m.content | replace('hello', '') }}",
    "another": "{% if messages[0].content != 'hi' or m.content != 'hello' %}{{ m.content }}{% endif %}",
    "parts": "{% for p in m.content %}{% if 'hello' not in p.text %}{{ p.text | e }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", DROPS_BY_WORDS)
async def test_a_message_that_the_template_leaves_out_by_its_words_is_refused_by_its_place(name: str) -> None:
    async with serving(DROPS_BY_WORDS[name]) as (_, client, _):
        messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": "hello"}]
        with pytest.raises(InvalidRequest, match="would be missing from the prompt") as refused:
            await client.tokenize(messages=messages)
        assert refused.value.field == "messages[1]"


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}", "{{ m.content | trim }}", "{{ m.content | tojson }}",
        "{{ m.content | trim | e }}", "{{ m.content | upper }}", "{{ m.content.split('</think>')[-1] | trim }}",
        "{% if '<' in m.content %}<{{ m.content | e }}>{% else %}{{ m.content | trim | upper }}{% endif %}",
        "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}",
    ],
)  # fmt: skip
async def test_a_text_that_the_template_trims_or_escapes_is_not_missed(content: str) -> None:
    texts = ["user", " a ", "z", "[", "<b> & 'c'\n\"d\"", "Köln ß", "!", "🙂", "\n ", "", "q", "user user", "]"]
    messages: list[Any] = [{"role": "user", "content": text} for text in texts]
    messages += [{"role": "assistant", "content": text} for text in ("<think>a</think>b", "<think>a</think>\n")]
    async with serving(content) as (_, client, tokenizer):
        assert await prompt_of(client, messages) == rendered(tokenizer, messages)


@pytest.mark.parametrize("escape", ["e", "string | urlencode", "upper", "string | tojson | e"])
async def test_parts_that_the_template_would_print_are_joined_to_a_text(escape: str) -> None:
    async with serving(f"{{{{ m.content | {escape} }}}}") as (_, client, tokenizer):
        in_parts = [{"role": "user", "content": parts("one", "two")}]
        assert await prompt_of(client, in_parts) == rendered(tokenizer, [{"role": "user", "content": "one\ntwo"}])


async def test_the_template_s_own_refusal_is_told_rather_than_that_of_a_form() -> None:
    template = (
        "{% if m.role == 'tool' %}{{ raise_exception('unknown role tool') }}{% endif %}{{ '' + m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
    )
    async with serving(template) as (_, client, _):
        with pytest.raises(InvalidRequest, match="refuses messages: unknown role tool"):
            await client.tokenize(messages=history("{}"))


def history(arguments: Any, **message: Any) -> list[Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call], **message},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "9"},
    ]


OBJECT = {"city": "Köln", "days": [1, 2.5, None], "deep": {"b": True, "a": "x\ny"}}


@pytest.mark.parametrize(
    "arguments",
    [
        "{{ c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}",
        "{{ c.function.arguments.city }}",
        "{{ c.function | tojson }}",
    ],
)
async def test_a_template_gets_the_arguments_of_tool_calls_as_an_object(arguments: str) -> None:
    async with serving(CALLS + arguments + CALL_END) as (_, client, tokenizer):
        right = rendered(tokenizer, history(OBJECT))
        assert await prompt_of(client, history(json.dumps(OBJECT))) == right
        assert await prompt_of(client, history(OBJECT)) == right
        for nothing in ("", None, {}, "{}"):
            assert await prompt_of(client, history(nothing)) == rendered(tokenizer, history({}))


async def test_a_template_that_joins_arguments_to_text_gets_them_as_they_were_sent() -> None:
    async with serving(CALLS + "{{ '(' + c.function.arguments + ')' }}" + CALL_END) as (_, client, _):
        text = '{"b":1, "a": 2}'
        assert await prompt_of(client, history(text)) == f"[user]a[assistant]<weather ({text})>[tool]9[assistant]"


async def test_arguments_that_are_no_object_are_refused_by_name() -> None:
    wrong: list[Any] = ["city", '{"city": ', "[1]", "5", "null", '"text"', '{"x": NaN}', [1], 5, True, "[" * 100_000]
    async with serving(CALLS + CALL_END) as (_, client, _):
        for arguments in wrong:
            for call in (client.tokenize(messages=history(arguments)), client.generate(history(arguments))):
                with pytest.raises(InvalidRequest, match="must be a JSON object") as refused:
                    await call
                assert refused.value.field == "messages[1].tool_calls[0].function.arguments"


async def test_a_tool_call_without_an_object_is_refused_by_name() -> None:
    async with serving(CALLS + CALL_END) as (_, client, _):
        messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": "weather"}]}]
        with pytest.raises(InvalidRequest, match="must be an object with name and arguments, got str") as refused:
            await client.tokenize(messages=messages)
        assert refused.value.field == "messages[0].tool_calls[0].function"


@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content | trim }}", "{{ '' + m.content }}"])
async def test_a_missing_text_is_not_printed_as_none(content: str) -> None:
    calls = "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}"
    async with serving(content + calls) as (_, client, _):
        assert await prompt_of(client, history("{}")) == "[user]a[assistant]<weather>[tool]9[assistant]"


async def test_a_template_that_asks_for_a_missing_text_sees_that_it_is_missing() -> None:
    template = "{% if m.content is none %}<{{ m.tool_calls[0].function.name }}>{% else %}{{ m.content }}{% endif %}"
    async with serving(template) as (_, client, _):
        assert await prompt_of(client, history("{}")) == "[user]a[assistant]<weather>[tool]9[assistant]"


async def test_content_parts_that_are_not_the_content_are_refused_by_name() -> None:
    async with serving("{{ m.content }}") as (coordinator, _, _):
        message = pb.ChatMessage(role="user", content="ab", content_parts=["a", "b"])
        request = pb.TokenizeRequest(messages=pb.ChatMessages(messages=[message]))
        with pytest.raises(Exception, match=r"messages\[0\]\.content_parts must join to content by line breaks"):
            await coordinator.stub.Tokenize(request)


KNOWS_DEVELOPER = "{% if m.role == 'developer' %}<instructions>{% endif %}{{ m.content }}"
REFUSES_DEVELOPER = (
    "{% if m.role not in ['system', 'user'] %}{{ raise_exception('unknown') }}{% endif %}{{ m.content }}"
)
IGNORES_DEVELOPER = "{% if m.role in ['system', 'user'] %}{{ m.content }}{% endif %}"
DEVELOPER: list[Any] = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize("template", ["{{ m.content }} as developers like it", REFUSES_DEVELOPER, IGNORES_DEVELOPER])
async def test_a_developer_is_the_system_to_a_template_that_does_not_know_the_role(template: str) -> None:
    async with serving(template) as (_, client, tokenizer):
        right = rendered(tokenizer, [DEVELOPER[0] | {"role": "system"}, DEVELOPER[1]])
        assert await prompt_of(client, DEVELOPER) == right


async def test_a_template_that_knows_developers_gets_them() -> None:
    async with serving(KNOWS_DEVELOPER) as (_, client, tokenizer):
        assert await prompt_of(client, DEVELOPER) == rendered(tokenizer, DEVELOPER)


# ---- over HTTP --------------------------------------------------------------------------------------------------


async def num_prompt_tokens(running: RunningGateway, path: str, **body: Any) -> int:
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return int(usage.get("input_tokens") or usage["prompt_tokens"])


async def test_every_route_of_conversations_gives_the_template_what_it_reads() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}w2 w3 {% endif %}"
        "{% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
    )
    developer = [{"role": "developer", "content": "w5 w6"}, {"role": "user", "content": parts("w7", "w8")}]
    async with Rig(drafts=0, write_checkpoint=partial(write_words, chat_template=template)) as rig:
        coordinator = await rig.coordinator()
        async with running_gateway(coordinator.server.address) as running:
            chat = "/v1/chat/completions"
            assert await num_prompt_tokens(running, chat, messages=developer, max_tokens=1) == 6
            options: dict[str, Any] = {"max_output_tokens": 1, "store": False}
            assert await num_prompt_tokens(running, "/v1/responses", input=developer, **options) == 6
            claude: dict[str, Any] = {"system": "w5 w6", "messages": developer[1:]}
            assert await num_prompt_tokens(running, "/v1/messages", **claude, max_tokens=1) == 6
            tokenized = (await running.http.post("/tokenize", json={"messages": developer})).json()
            assert tokenized["tokens"] == [2, 3, 5, 6, 7, 8]
            counted = (await running.http.post("/v1/messages/count_tokens", json=claude)).json()
            assert counted["input_tokens"] == 6


async def test_refusals_over_http_name_the_place_in_the_request() -> None:
    async with (
        serving(IGNORES_DEVELOPER) as (coordinator, _, _),
        running_gateway(coordinator.server.address) as running,
    ):
        messages = [{"role": "user", "content": "a"}, {"role": "function", "content": "b"}]
        for path, body, param in (
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}, "messages[1]"),
            ("/tokenize", {"messages": history("[]")}, "messages[1].tool_calls[0].function.arguments"),
        ):
            answer = await running.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(param)
