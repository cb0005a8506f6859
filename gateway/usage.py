"""Usage and speculation counters of finished outputs, as objects of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.client import Completion, GenerationStats

#: Finish reasons of the API, by those of the SDK.
_FINISH_REASONS = {"stop": "stop", "stop_string": "stop", "length": "length", "tool_calls": "tool_calls"}


def finish_reason_of(completion: Completion) -> str | None:
    """Return why an output ended. A call that was demanded by its tool's name ends with `stop`, as in OpenAI's API."""
    return "stop" if completion.is_named_call else _FINISH_REASONS.get(completion.finish_reason)


def usage_object(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object, without the details of the output."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def usage_of(completions: Sequence[Completion], outputs_per_prompt: int) -> dict[str, Any]:
    """Return the usage of a request: the tokens of each prompt once, and those of every output."""
    leaders = completions[::outputs_per_prompt]
    usage = usage_object(
        sum(leader.usage.num_prompt_tokens for leader in leaders),
        sum(completion.usage.num_output_tokens for completion in completions),
        sum(leader.usage.num_cached_prompt_tokens for leader in leaders),
    )
    num_reasoning_tokens = sum(completion.usage.num_reasoning_tokens for completion in completions)
    return usage | {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}


def metrics_object(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the metrics of a request: vLLM's of its speculative decoding, and our statistics, summed over outputs.

    As in vLLM, a request with several outputs has null for the former.
    """
    stats = [completion.stats for completion in completions]
    return {"speculative_decoding": _acceptance(stats[0]) if len(stats) == 1 else None, "specdec": _summed(stats)}


def _acceptance(stats: GenerationStats) -> dict[str, Any]:
    """Return vLLM's `speculative_decoding`, which clients such as aiperf read.

    vLLM counts steps by the number of tokens that they accepted. A draft is accepted from its begin on, so the number
    of such steps is the difference between the counts of two neighbouring positions.
    """
    num_drafts, num_accepted = num_drafts_of(stats), stats.num_accepted_tokens
    reached = [num_drafts, *stats.accepted_per_position]
    return {
        "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else 1.0,
        "draft_acceptance_rate": num_accepted / stats.num_draft_tokens if stats.num_draft_tokens else 0.0,
        "acceptance_histogram": [count - longer for count, longer in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": num_drafts,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": len(stats.accepted_per_position),
    }


def _summed(stats: Sequence[GenerationStats]) -> dict[str, Any]:
    """Return the statistics of outputs as those of one, with the latest of their first and last tokens."""
    return {
        "num_rounds": sum(each.num_rounds for each in stats),
        "num_draft_tokens": sum(each.num_draft_tokens for each in stats),
        "num_accepted_tokens": sum(each.num_accepted_tokens for each in stats),
        "accepted_per_position": accepted_per_position(stats),
        "num_target_only_steps": sum(each.num_target_only_steps for each in stats),
        "ttft_s": max((each.ttft_s for each in stats), default=0.0),
        "e2el_s": max((each.e2el_s for each in stats), default=0.0),
        "draft_s": sum(each.draft_s for each in stats),
        "verify_s": sum(each.verify_s for each in stats),
        "wire_bytes": sum(each.wire_bytes for each in stats),
    }


def warnings_of(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the field with what a lenient schema demands and the outputs may not follow; none without warnings."""
    warnings = dict.fromkeys(warning for completion in completions for warning in completion.constraint_warnings)
    return {"specdec": {"constraint_warnings": [*warnings]}} if warnings else {}


def num_drafts_of(stats: GenerationStats) -> int:
    """Return the number of rounds that had a draft."""
    return stats.num_rounds - stats.num_target_only_steps


def accepted_per_position(stats: Sequence[GenerationStats]) -> list[int]:
    """Return how many draft tokens were accepted at each position of the drafts."""
    length = max((len(each.accepted_per_position) for each in stats), default=0)
    return [
        sum(each.accepted_per_position[place] for each in stats if place < len(each.accepted_per_position))
        for place in range(length)
    ]
