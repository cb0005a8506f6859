"""Bodies that are made to cost much or to break something are refused at their first mistake, by the field's name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from gateway.http_errors import read_validation_error
from gateway.routes.tokens import DetokenizeRequest, TokenizeRequest
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.responses import ResponseRequest
from specdec.contract.errors import InvalidRequest

HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * 10_000}),
        (CompletionRequest, {"prompt": [[-1]] * 10_000}),
        (CompletionRequest, {"prompt": [[-1] * 10_000]}),
        (CompletionRequest, {"prompt": [["x"]] * 10_000}),
        (CompletionRequest, {"prompt": "x", "stop": [1] * 10_000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["1"] * 10_000}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {str(number): "x" for number in range(10_000)}}),
        (CompletionRequest, {"prompt": "x", "guided_choice": [1] * 10_000}),
        (CompletionRequest, {"prompt": "x", "structured_outputs": {str(number): 1 for number in range(10_000)}}),
        (CompletionRequest, {"prompt": "x", "response_format": {"type": {str(n): 1 for n in range(10_000)}}}),
        (ChatRequest, {"messages": [{}] * 10_000}),
        (ChatRequest, {"messages": [HELLO] * 10_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ChatRequest, {"messages": [HELLO | {"tool_calls": [1] * 10_000}]}),
        (TokenizeRequest, {"messages": [{}] * 10_000}),
        (DetokenizeRequest, {"tokens": [-1] * 10_000}),
    ],
)
def test_a_list_of_thousands_of_mistakes_costs_a_few_errors(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= 4  # one for each alternative of a field


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "input: List should have at least 1 item"),
        ([HELLO] * 10_000, "input: List should have at most 4096 items"),
        ([HELLO, {"role": "user", "content": [{}, 5]}], "input[1].content[1]: must be a valid dictionary"),
        ([HELLO, 5], "input[1]: must be a valid dictionary"),
        (5, "input: must be a valid string"),
    ],
    ids=["empty", "long", "part", "item", "number"],
)
def test_the_alternative_that_a_value_comes_closest_to_says_what_is_wrong(given: Any, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ResponseRequest.model_validate({"input": given})
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    assert words in read_validation_error(errors, "application/json").message


@pytest.mark.parametrize("key", ["1" * 5000, "4294967296", "-1", "1.0", "", "\u0663", "\ud800"])
def test_a_key_of_logit_bias_that_is_no_token_id_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias: keys must be token ids") as refused:
        CompletionRequest.model_validate({"prompt": "x", "logit_bias": {key: 1}}).options({})
    assert refused.value.field == "logit_bias"


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("number", [0, -1, 1 << 32, 10**400])
def test_a_limit_of_no_tokens_or_of_too_many_is_refused(kind: type[BaseModel], number: int) -> None:
    body: dict[str, Any] = {"messages": [HELLO], "prompt": "x", "max_tokens": number}
    with pytest.raises(ValidationError, match=re.compile("^max_tokens$", re.MULTILINE)):
        kind.model_validate(body)
