"""Sampling and speculation fields of requests, and the `GenerateOptions` that they become.

`SamplingFields` is part of the requests of every route that generates. A field that is absent takes the value that the
model recommends (`generation_config.json`), else the API's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field

from gateway.schemas.common import (
    WHOLE,
    Body,
    Flag,
    Int,
    Items,
    Number,
    Speculation,
    StreamOptions,
    StrictInt,
    Text,
    TokenIds,
    refuse,
    whole_number,
    without_nulls,
)
from specdec.client import Constraint, GenerateOptions
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import FILTER_RANGES, LEAST_SEED, NUM_SEEDS, RECOMMENDED_FILTERS

#: Most choices of one prompt.
MAX_N = 8
#: Most entries of `logit_bias`.
MAX_BIASES = 4096

_DELIVERY = "text is what the tokens before the end decode to, without special tokens"
#: Fields that are options of the same name.
_OPTIONS = (*FILTER_RANGES, "ignore_eos", "stop_token_ids", "stop", "priority")


def _require_few(biases: Any) -> Any:
    """Refuse a large object before its values are read, each of which could be an error of its own."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"must have at most {MAX_BIASES} token ids, got {len(biases)}")
    return without_nulls(biases)


def _filter(name: str) -> Any:
    """Return the field of a filter, with the meaning that it has in every interface."""
    meaning = FILTER_RANGES[name].meaning
    return Field(default=None, description=f"{meaning[0].upper()}{meaning[1:]}.")


class SamplingFields(Body):
    """Sampling fields of OpenAI's API, vLLM's usual extensions, and ours."""

    generates: ClassVar[bool] = True

    model: Text | None = None
    """Name of the model; absent: the one that is served."""
    stream: Flag | None = False
    """Send the output as server-sent events."""
    stream_options: StreamOptions | None = None
    """Contents of a stream beside its text."""
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N), WHOLE] | None = 1
    """Number of outputs for each prompt."""
    temperature: Number | None = _filter("temperature")
    top_p: Number | None = _filter("top_p")
    top_k: Annotated[StrictInt, Field(ge=-1), WHOLE] | None = None
    """Number of top tokens that are kept (0 or -1: all)."""
    min_p: Number | None = _filter("min_p")
    repetition_penalty: Number | None = _filter("repetition_penalty")
    presence_penalty: Number | None = _filter("presence_penalty")
    frequency_penalty: Number | None = _filter("frequency_penalty")
    logit_bias: Annotated[dict[str, Number], BeforeValidator(_require_few)] | None = None
    """Amount that is added to the logit of each token id."""
    seed: Annotated[StrictInt, Field(ge=LEAST_SEED, lt=NUM_SEEDS), WHOLE] | None = None
    """Seed of the draws. The same request and seed give the same text, whatever drafts and load are: without
    speculation.mode the request is served in the mode coupled. In the modes rejection and block, the drafts must have
    the same lengths as well. Output number i draws with seed + i."""
    stop: Text | Items[Text] | None = None
    """Text, or texts, before which the output ends."""
    stop_token_ids: TokenIds | None = None
    """Token ids that end the output."""
    ignore_eos: Flag | None = None
    """Continue after the model's own end of text."""
    min_tokens: Int | None = None
    """Least number of output tokens."""
    priority: Annotated[StrictInt, Field(ge=-(1 << 31), lt=1 << 31), WHOLE] | None = None
    """Place in the queue among the requests of the same tenant: lower values go first."""
    speculation: Speculation | None = None
    """Choice of drafts and of their verification."""
    session_id: Text | None = None
    """Session to continue, or the name of a new one. Absent: a new session."""
    request_id: Text | None = None
    """Idempotency key within the session."""
    return_provenance: Flag | None = None
    """Tell for every token which part of the system it came from, under `specdec` in every chunk or choice."""
    return_metrics: Flag | None = None
    """Add the counters of speculative decoding, under `metrics`."""

    functions: list[Any] | None = None
    """Not supported; use tools."""
    function_call: Any = None
    """Not supported; use tool_choice."""
    best_of: Int | None = None
    """Only 1 is supported."""
    use_beam_search: Flag | None = None
    """Not supported."""
    prompt_logprobs: Int | None = None
    """Not supported."""
    bad_words: list[Any] | None = None
    """Not supported."""
    allowed_token_ids: list[Any] | None = None
    """Not supported."""
    truncate_prompt_tokens: Int | None = None
    """Not supported."""
    include_stop_str_in_output: Flag | None = None
    """Only false is supported."""
    skip_special_tokens: Flag | None = None
    """Only true is supported."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs for each prompt."""
        return self.n or 1

    def constraint(self) -> Constraint | None:
        """Return the form that the output must have; None for any. Raises InvalidRequest."""
        return None

    @property
    def wants_metrics(self) -> bool:
        return bool(self.return_metrics or (self.stream_options and self.stream_options.include_metrics))

    def require_supported(self) -> None:
        """Raises InvalidRequest for a field that the server knows and does not support."""
        for name, value, reason in (
            ("functions", self.functions, "use tools, which replace it"),
            ("function_call", self.function_call not in (None, "none"), "use tool_choice, which replaces it"),
            ("best_of", self.best_of not in (None, 1), "outputs are sampled, not searched; use n"),
            ("use_beam_search", self.use_beam_search, "outputs are sampled, not searched"),
            ("prompt_logprobs", self.prompt_logprobs is not None, "logprobs are those of output tokens"),
            ("bad_words", self.bad_words, "use logit_bias"),
            ("allowed_token_ids", self.allowed_token_ids, "use logit_bias"),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens is not None, "shorten the prompt"),
            ("include_stop_str_in_output", self.include_stop_str_in_output, _DELIVERY),
            ("skip_special_tokens", self.skip_special_tokens is False, _DELIVERY),
        ):
            if value:
                raise refuse(name, reason)

    def options(self, recommended: Mapping[str, float | int]) -> GenerateOptions:
        """Return the options of one output, without its input, length, seed and session.

        Args:
            recommended: sampling parameters that the model recommends.

        Raises:
            InvalidRequest: a key of `logit_bias` is not a token id, or the output's form cannot be demanded.
        """
        given: dict[str, Any] = {name: value for name, value in recommended.items() if name in RECOMMENDED_FILTERS}
        given |= {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        if self.min_tokens is not None:
            given["min_new_tokens"] = self.min_tokens
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if self.logit_bias:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        if (constraint := self.constraint()) is not None:
            given["constraint"] = constraint
        given["provenance"] = bool(self.return_provenance)
        if self.speculation is not None:
            given |= self.speculation.model_dump(exclude_none=True)
        return cast(GenerateOptions, given)


def _token_id(key: str) -> int:
    token_id = whole_number(key, 1 << 32)
    if token_id is None:
        raise InvalidRequest(f"logit_bias: keys must be token ids, got {key[:64]!r}", field="logit_bias")
    return token_id
