"""Requests of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from gateway.schemas.common import WHOLE, Flag, Items, Positive, StrictInt, Text, TokenIds, refuse
from gateway.schemas.constraints import CompletionFields
from specdec.client import GenerateOptions
from specdec.contract.errors import InvalidRequest

MAX_LOGPROBS = 20
#: Most outputs of one request, those of all its prompts together.
MAX_OUTPUTS = 128
#: Most output tokens unless the request says otherwise, as in OpenAI's API.
DEFAULT_MAX_TOKENS = 16

_CHAT_ALONE = "the chat template tells the model of tools; use /v1/chat/completions"

Prompt = str | Sequence[int]
"""A text, or token ids."""


class CompletionRequest(CompletionFields):
    """Texts or token ids, and how to continue each."""

    prompt: Text | TokenIds | Items[Text] | Items[TokenIds]
    """A text, texts, the token ids of one prompt, or those of several."""
    max_tokens: Positive | None = None
    """Most output tokens. Default: 16."""
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    """Number of top tokens whose log-probability is returned, besides each output token's."""
    echo: Flag | None = None
    """Return the prompt before the output; not with logprobs."""
    suffix: Text | None = None
    """Not supported."""
    tools: list[Any] | None = None
    """Not supported; /v1/chat/completions has tools."""
    tool_choice: Any = None
    """Only "none" is supported."""

    @property
    def max_new_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[Prompt]:
        """Return the prompts, one or several.

        Raises:
            InvalidRequest: there is none, or the outputs are too many.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt: must not be empty", field="prompt")
        prompts: list[Prompt] = [prompt] if isinstance(prompt[0], int) else list(prompt)
        if len(prompts) * self.num_outputs > MAX_OUTPUTS:
            raise InvalidRequest(
                f"prompt: {len(prompts)} prompts with n={self.num_outputs} are more than {MAX_OUTPUTS} outputs",
                field="prompt",
            )
        return prompts

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that is not supported, or fields that do not go together."""
        super().require_supported()
        for name, value, reason in (
            ("suffix", self.suffix, "text is continued at its end"),
            ("tools", self.tools, _CHAT_ALONE),
            ("tool_choice", self.tool_choice not in (None, "none"), _CHAT_ALONE),
        ):
            if value:
                raise refuse(name, reason)
        if self.echo and self.logprobs is not None:
            raise refuse("echo", "with logprobs it would need those of the prompt")

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        given = super().options(recommended)
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return given
