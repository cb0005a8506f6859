"""instructor against `specdec up --http`: the modes that demand JSON or a call, parts of a stream, and a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.gateway_system import MODEL, System
from tests.support.optional_clients import REASON
from tests.support.output_forms import ENOUGH_TOKENS, Ticket, closing_bias
from tests.support.tool_system import NO_THINKING

instructor = pytest.importorskip("instructor", reason=REASON)

OPTIONS: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "import os"}], "max_tokens": ENOUGH_TOKENS, "seed": 3,
    "max_retries": 0,
}  # fmt: skip


class Anything(BaseModel, extra="allow"):
    """A JSON object. The mode JSON demands no more; the prompt alone asks for the fields of a model."""


@pytest.fixture(scope="module")
def plain(demo: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=demo.base_url, api_key="unused", timeout=240, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def with_schema(plain: openai.OpenAI) -> Any:
    return instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)


def test_a_schema_gives_the_pydantic_model(with_schema: Any) -> None:
    assert isinstance(with_schema.chat.completions.create(response_model=Ticket, **OPTIONS), Ticket)


def test_the_parts_of_a_stream_grow_to_the_whole(with_schema: Any) -> None:
    parts = list(with_schema.chat.completions.create_partial(response_model=Ticket, **OPTIONS))
    whole = with_schema.chat.completions.create(response_model=Ticket, **OPTIONS)
    assert len(parts) > 1
    assert parts[-1].model_dump() == whole.model_dump()


def test_the_mode_json_gives_an_object(demo: System, plain: openai.OpenAI) -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON)
    found = client.chat.completions.create(response_model=Anything, logit_bias=closing_bias(demo.http), **OPTIONS)
    assert isinstance(found, Anything)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT"])
def test_the_modes_of_tools_give_the_pydantic_model(tool_url: str, mode: str) -> None:
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="unused", timeout=300, max_retries=0) as unpatched:
        client = instructor.from_openai(unpatched, mode=instructor.Mode[mode])
        body = {"chat_template_kwargs": NO_THINKING}
        assert isinstance(client.chat.completions.create(response_model=Ticket, extra_body=body, **OPTIONS), Ticket)


def test_two_forms_at_once_are_refused_in_words(with_schema: Any) -> None:
    with pytest.raises(Exception, match=r"response_format\.json_schema\.schema cannot be combined with guided_regex"):
        with_schema.chat.completions.create(response_model=Ticket, extra_body={"guided_regex": "a"}, **OPTIONS)
