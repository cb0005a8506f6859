"""LangChain's ChatOpenAI against `specdec up --http`: calls, streams, batches, chains, conversations and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateway_system import MODEL, PROMPT, System, chat
from tests.support.optional_clients import REASON
from tests.support.output_forms import ENOUGH_TOKENS, LENIENT_SCHEMA, Ticket, Verdict, closing_bias
from tests.support.tool_system import NO_THINKING

langchain_openai = pytest.importorskip("langchain_openai", reason=REASON)

import openai  # noqa: E402  (the one that LangChain uses)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.output_parsers import StrOutputParser  # noqa: E402
from langchain_core.prompts import ChatPromptTemplate  # noqa: E402


def chat_model(system: System, **options: Any) -> Any:
    """12 greedy tokens of the system's model."""
    return langchain_openai.ChatOpenAI(
        **{"base_url": system.base_url, "api_key": "unused", "model": MODEL, "max_tokens": 12, "temperature": 0,
           "max_retries": 0, "timeout": 240, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(system: System) -> Any:
    return chat_model(system)


def test_a_call_has_the_sdk_s_text_usage_and_end(model: Any, greedy: str) -> None:
    answer = model.invoke(PROMPT)
    assert answer.text == greedy
    usage = answer.usage_metadata
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (4, 12, 16)
    assert (answer.response_metadata["finish_reason"], answer.response_metadata["model_name"]) == ("length", MODEL)


def test_a_stream_has_the_same_text_and_its_usage_on_request(system: System, greedy: str) -> None:
    chunks = list(chat_model(system, stream_usage=True).stream(PROMPT))
    assert "".join(chunk.text for chunk in chunks) == greedy
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert (usage["input_tokens"], usage["output_tokens"]) == (4, 12)


def test_a_batch_has_an_answer_for_each_input(model: Any, greedy: str) -> None:
    alone = model.invoke("w9").text
    assert [answer.text for answer in model.batch([PROMPT, "w9"] * 4)] == [greedy, alone] * 4


def test_asynchronous_calls_and_streams_give_the_same_text(model: Any, greedy: str) -> None:
    async def texts() -> list[str]:
        streamed = [chunk.text async for chunk in model.astream(PROMPT)]
        return [(await model.ainvoke(PROMPT)).text, "".join(streamed)]

    assert asyncio.run(texts()) == [greedy, greedy]


def test_a_chain_of_template_model_and_parser_streams_text(model: Any, greedy: str) -> None:
    template = ChatPromptTemplate.from_messages([("system", "w5"), ("human", "{second} w99 w42")])
    chain = template | model | StrOutputParser()
    assert chain.invoke({"second": "w17"}) == greedy
    assert "".join(chain.stream({"second": "w17"})) == greedy


def test_messages_of_every_role_are_rendered(model: Any, greedy: str) -> None:
    call = {"name": "f", "args": {}, "id": "c", "type": "tool_call"}
    history = [
        SystemMessage("w5"),
        HumanMessage("w17"),
        AIMessage("w99", tool_calls=[call]),
        ToolMessage("w42", tool_call_id="c"),
    ]
    assert model.invoke(history).text == greedy


def test_a_conversation_goes_on_from_its_messages_or_from_a_stored_response(
    system: System, model: Any, greedy: str
) -> None:
    turns = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": greedy}]
    with openai.OpenAI(base_url=system.base_url, api_key="unused") as client:
        expected = chat(client, messages=[*turns, {"role": "user", "content": "w3"}]).choices[0].message.content
    assert model.invoke([HumanMessage(PROMPT), model.invoke(PROMPT), HumanMessage("w3")]).text == expected
    stored = chat_model(system, use_responses_api=True)
    first = stored.invoke(PROMPT)
    assert first.text == greedy
    assert "".join(chunk.text for chunk in stored.stream(PROMPT)) == greedy
    assert stored.invoke("w3", previous_response_id=first.response_metadata["id"]).text == expected


def test_stops_seeds_logprobs_and_our_fields_reach_the_server(system: System, greedy: str) -> None:
    last = "w" + greedy.split("w")[-1]
    model = chat_model(system, stop_sequences=[last], extra_body={"speculation": {"gamma": 3}})
    assert model.invoke(PROMPT).text == greedy[: greedy.index(last)]
    sampled = chat_model(system, temperature=1.0, seed=7, extra_body={"speculation": {"mode": "coupled"}})
    assert sampled.invoke(PROMPT).text == sampled.invoke(PROMPT).text
    content = chat_model(system, logprobs=True, top_logprobs=2).invoke(PROMPT).response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == greedy


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"priority": 0.5}}, openai.BadRequestError, "priority"),
        ({"model": "gpt-4"}, openai.NotFoundError, "gpt-4"),
        ({"base_url": "http://127.0.0.1:1/v1"}, openai.APIConnectionError, "Connection error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_have_the_openai_client_s_classes(
    system: System, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        chat_model(system, **options).invoke(PROMPT)
    with pytest.raises(kind, match=words):
        list(chat_model(system, **options).stream(PROMPT))


@pytest.fixture(scope="module")
def demo_model(demo: System) -> Any:
    """Sampled tokens of the demo pair, whose tokenizer is of bytes."""
    return chat_model(demo, max_tokens=ENOUGH_TOKENS, temperature=1.0, seed=3)


@pytest.mark.parametrize("strict", [None, True])
def test_structured_output_by_a_schema_is_the_pydantic_model(demo_model: Any, strict: bool | None) -> None:
    structured = demo_model.with_structured_output(Ticket, method="json_schema", strict=strict)
    whole = structured.invoke("import os")
    assert isinstance(whole, Ticket)
    assert list(structured.stream("import os"))[-1] == whole
    raw = demo_model.with_structured_output(Ticket, method="json_schema", include_raw=True).invoke("import os")
    assert (raw["parsing_error"], type(raw["parsed"])) == (None, Ticket)


def test_structured_output_by_a_schema_of_json_and_over_responses_is_a_dictionary(demo: System) -> None:
    schema = {**Verdict.model_json_schema(), "title": "verdict", "description": "A verdict."}
    for options in ({}, {"use_responses_api": True}):
        model = chat_model(demo, max_tokens=ENOUGH_TOKENS, temperature=1.0, **options)
        found = model.with_structured_output(schema, method="json_schema").invoke("import os")
        assert Verdict.model_validate(found)


def test_structured_output_in_the_json_mode_is_an_object(demo: System, demo_model: Any) -> None:
    biased = demo_model.bind(logit_bias=closing_bias(demo.http))
    raw = biased.bind(response_format={"type": "json_object"}).invoke("import os")
    assert isinstance(json.loads(raw.text), dict)


def test_a_schema_that_is_not_strict_is_followed_and_a_strict_one_refused_in_words(demo_model: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": LENIENT_SCHEMA, "strict": True}}
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        demo_model.bind(response_format=form).invoke("import os")
    form["json_schema"]["strict"] = False  # type: ignore[index]
    assert json.loads(demo_model.bind(response_format=form).invoke("import os").text)["answer"] in ("yes", "no", None)


@pytest.fixture(scope="module")
def tool_model(tool_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{tool_url}/v1", api_key="unused", model=MODEL, max_tokens=200, temperature=0, max_retries=0,
        timeout=300, extra_body={"chat_template_kwargs": NO_THINKING},
    )  # fmt: skip


def test_a_bound_tool_is_called_whole_and_streamed_and_its_result_is_read(tool_model: Any) -> None:
    bound = tool_model.bind_tools([Ticket], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke("import os")
    (call,) = answer.tool_calls
    assert Ticket.model_validate(call["args"])
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    whole = None
    for chunk in bound.stream("import os"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]
    history = [HumanMessage("import os"), answer, ToolMessage("done", tool_call_id=call["id"])]
    last = tool_model.bind_tools([Ticket], tool_choice="none").bind(max_tokens=2).invoke(history)
    assert not last.tool_calls


def test_structured_output_by_a_call_gives_the_pydantic_model(tool_model: Any) -> None:
    asked = tool_model.with_structured_output(Ticket, method="function_calling")
    assert isinstance(asked.invoke("import os"), Ticket)


def test_tools_structured_output_and_embeddings_are_refused_in_words(system: System, model: Any) -> None:
    schema = {"title": "answer", "type": "object", "properties": {"x": {"type": "string"}}}
    with pytest.raises(openai.BadRequestError, match="tools cannot be used"):
        model.bind_tools([schema | {"description": "a tool"}]).invoke(PROMPT)
    with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema: a tokenizer of the type"):
        model.with_structured_output(schema, method="json_schema").invoke(PROMPT)
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=system.base_url, api_key="unused", model=MODEL, max_retries=0, check_embedding_ctx_length=False
    )
    with pytest.raises(openai.NotFoundError, match="generates text"):
        embeddings.embed_query(PROMPT)
