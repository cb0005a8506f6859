"""The error objects of OpenAI's and of Anthropic's API, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """Why a request failed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    """Sentence that tells the value, the limit and what to do."""
    type: str
    """Class of the error, such as invalid_request_error or rate_limit_error."""
    param: str | None
    """Field of the request at fault."""
    code: str | None
    """Reason of the error in lower case, such as session_busy, or context_length_exceeded."""


class ErrorAnswer(BaseModel):
    """The answer to a request that failed."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Why a request failed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """Class of the error, such as invalid_request_error or rate_limit_error."""
    message: str
    """Sentence that tells the value, the limit and what to do."""


class AnthropicErrorAnswer(BaseModel):
    """The answer of /v1/messages to a request that failed."""

    type: Literal["error"]
    error: AnthropicErrorDetail
