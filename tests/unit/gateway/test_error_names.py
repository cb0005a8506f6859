"""An error over HTTP has the names of the request that it answers, not those of the calls behind it."""

from __future__ import annotations

import pytest

from gateway.http_errors import error_object
from specdec.contract.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "problem", "param", "message"),
    [
        ("sampling.temperature", " must be at least 0", "temperature", "temperature must be at least 0"),
        ("text", ": is not text", "prompt", "prompt: is not text"),
        ("token_ids", " must be below 512", "tokens", "tokens must be below 512"),
        ("prompt_token_ids.ids", ": Value out of range", "prompt", "prompt: Value out of range"),
        ("resume_from", " must be at most 3", "Last-Event-ID", "Last-Event-ID must be at most 3"),
        ("messages.template_arguments_json", " must not hold x", "chat_template_kwargs",
         "chat_template_kwargs must not hold x"),
        ("sampling.min_new_tokens", " must be at most max_new_tokens 5", "min_tokens",
         "min_tokens must be at most max_tokens 5"),
        ("", "the text is absent", None, "the text is absent"),
    ],
)  # fmt: skip
def test_field_and_message_have_the_request_s_names(field: str, problem: str, param: str | None, message: str) -> None:
    error = error_object(InvalidRequest(field + problem, field=field))["error"]
    assert (error["param"], error["message"]) == (param, message)
