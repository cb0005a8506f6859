"""Suite `structured`: what constraints cost, and what the tokens that they force gain.

On SmolLM2-135M, which `make real` installs, or else on the demo target:

- the processor time of the masks of one stream over the time of its steps;
- a tool call in the format Hermes, whose JSON has no free white space: tokens a second with the forced tokens as
  drafts, and with those that the target finds in a run, over free text of the target alone;
- fifteen streams beside one with a slow constraint: their time between tokens, over the time without it;
- acceptance of the demo pair's draft, which masks q.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.pairs import MIN_PAIRS, median_ratio, take_turns
from bench.harness.rows import Origin, Row
from bench.harness.scrape import total
from bench.systems.models import DEMO
from bench.systems.real_models import SMOLLM2
from bench.systems.up import UpSystem
from specdec.cli.top import metrics_addresses_of
from specdec.client import AsyncClient, Completion, Constraint

SUITE = "structured"
NUM_QUICK_PAIRS = 2
MOST_MASK_SHARE, LEAST_FORCED_GAIN, MOST_GAP_RATIO = 0.02, 1.25, 1.1
NUM_OTHERS, OTHER_TOKENS = 15, 48
#: Requests until a draft masks its tokens, at most, a second apart.
MOST_TRIES = 60
#: About the length of the tool call.
NUM_CALL_TOKENS = 80
PROMPT = "The weather in Paris today, as JSON: "

_ARGUMENTS = {
    "type": "object",
    "properties": {
        "location_city_name": {"type": "string", "maxLength": 12},
        "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        "number_of_forecast_days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["location_city_name", "temperature_unit", "number_of_forecast_days"],
    "additionalProperties": False,
}
_NAME = "get_current_weather_forecast"
#: A conversation whose answer is a call of one tool. Only the values are free.
TOOL_CALL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris in the next 3 days, in celsius?"}],
    "tools": [{"type": "function", "function": {"name": _NAME, "parameters": _ARGUMENTS}}],
    "tool_choice": {"type": "function", "function": {"name": _NAME}},
}
#: The format of calls, which the models' templates do not show.
TOOL_FORMAT = {"SPECDEC_COORDINATOR__TOOL_PARSER": "hermes"}
#: The same call as JSON of a schema, with white space between its parts.
CALL_AS_JSON = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"name": {"const": _NAME}, "arguments": _ARGUMENTS},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
)
#: Texts of some length between forced names.
_TEXT = {"type": "string", "maxLength": 40}
TEXTS = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"function_name": _TEXT, "first_argument": _TEXT, "return_value": _TEXT},
        "required": ["function_name", "first_argument", "return_value"],
        "additionalProperties": False,
    }
)
#: Its masks take a hundred times as long as those of JSON.
SLOW = Constraint.regex("(.*a){24}.*")
MakeRow = Callable[..., Row]


def run(arguments: argparse.Namespace) -> list[Row]:
    """Measure and return the rows; print nothing but progress."""
    row = partial(Row, suite=SUITE, origin=Origin(), quick=arguments.quick)
    num_pairs = NUM_QUICK_PAIRS if arguments.quick else MIN_PAIRS
    model = _model()
    with UpSystem(["--target", str(model), "--device", "cpu"], TOOL_FORMAT) as system:
        rows = [*_forced_rows(system, partial(row, case=f"{model.stem}, one tool call"), num_pairs)]
        rows += _mask_rows(system, partial(row, case=f"{model.stem}, one stream"), num_pairs)
        rows += _slow_rows(system, partial(row, case=f"{model.stem}, {NUM_OTHERS} streams"), num_pairs)
    with UpSystem(["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--device", "cpu"]) as system:
        rows += _acceptance_rows(system, partial(row, case="demo pair, one object"), num_pairs)
    return rows


def _model() -> Path:
    try:
        return SMOLLM2.path()
    except FileNotFoundError:
        return DEMO / "target"


def _object(system: UpSystem, constraint: Constraint = CALL_AS_JSON, **options: object) -> Completion:
    return system.client.generate(PROMPT, constraint=constraint, max_new_tokens=160, **options)


def _forced_rows(system: UpSystem, row: MakeRow, num_pairs: int) -> list[Row]:
    """Return the speed of a tool call over that of free text, whose tokens take a pass each; greedy."""

    def rate(options: dict[str, Any], _: int) -> float:
        began_s = time.perf_counter()
        completion = system.client.generate(temperature=0.0, gamma=0, max_new_tokens=NUM_CALL_TOKENS, **options)
        return len(completion.token_ids) / (time.perf_counter() - began_s)

    free: dict[str, Any] = {"messages": TOOL_CALL["messages"], "ignore_eos": True, "mode": "off"}
    systems = {
        "free text": partial(rate, free),
        "specdec_forced": partial(rate, TOOL_CALL | {"mode": "coupled"}),
        "specdec_run": partial(rate, TOOL_CALL | {"mode": "off"}),
    }
    rates = take_turns("tool call", systems, range(num_pairs), [-1])
    rows = [
        row(system=name, metric="tokens_per_s", value=float(np.median(each)), unit="tokens/s")
        for name, each in rates.items()
    ]
    for name in ("specdec_forced", "specdec_run"):
        ratio = median_ratio(rates[name], rates["free text"])
        rows.append(
            row(
                system=name, metric="tokens_per_s_ratio", unit="x", ratio_to="free text", required=LEAST_FORCED_GAIN,
                **ratio.fields,
            )
        )  # fmt: skip
    return rows


def _mask_rows(system: UpSystem, row: MakeRow, num_pairs: int) -> list[Row]:
    """Return the time of the masks over that of the steps."""

    def sums(name: str) -> float:
        addresses = metrics_addresses_of(system.endpoint)
        return sum(total(address, f"specdec:{name}_seconds_sum", role="target") for address in addresses)

    before = sums("constraint_mask"), sums("step")
    for seed in range(num_pairs):
        _object(system, temperature=1.0, mode="off", seed=seed)
    masks_s, steps_s = sums("constraint_mask") - before[0], sums("step") - before[1]
    return [
        row(
            system="target", metric="mask_time_share", value=masks_s / steps_s, unit="x", ratio_to="steps",
            at_most=MOST_MASK_SHARE,
        )
    ]  # fmt: skip


def _slow_rows(system: UpSystem, row: MakeRow, num_pairs: int) -> list[Row]:
    """Return the time between tokens of streams beside one with a slow constraint, over the time without it."""

    def gap_s(others: Constraint | None, index: int) -> float:
        return asyncio.run(_gap_s(system.endpoint, others, index))

    systems = {"beside JSON": partial(gap_s, CALL_AS_JSON), "beside a slow constraint": partial(gap_s, SLOW)}
    gaps_s = take_turns("slow constraint", systems, range(num_pairs), [-1])
    ratio = median_ratio(gaps_s["beside a slow constraint"], gaps_s["beside JSON"])
    return [
        row(
            system="beside a slow constraint", metric="tpot_ratio", unit="x", ratio_to="beside JSON",
            at_most=MOST_GAP_RATIO, **ratio.fields,
        )
    ]  # fmt: skip


async def _gap_s(endpoint: str, other: Constraint, index: int) -> float:
    """Return the mean time between tokens of the streams without a constraint."""
    async with AsyncClient(endpoint) as client:

        async def stream(number: int) -> float:
            times_s: list[float] = []
            prompt = f"{index} {number} {PROMPT}"
            options = {"temperature": 0.0, "ignore_eos": True, "mode": "off", "max_new_tokens": OTHER_TOKENS}
            async with client.generate(prompt, stream=True, **options) as chunks:
                async for _ in chunks:
                    times_s.append(time.perf_counter())
            return (times_s[-1] - times_s[0]) / (OTHER_TOKENS - 1)

        constrained = asyncio.ensure_future(
            client.generate(PROMPT, constraint=other, max_new_tokens=4 * OTHER_TOKENS, mode="off")
        )
        gaps_s: Sequence[float] = await asyncio.gather(*map(stream, range(NUM_OTHERS)))
        constrained.cancel()
        await asyncio.gather(constrained, return_exceptions=True)
        return float(np.mean(gaps_s))


def _acceptance_rows(system: UpSystem, row: MakeRow, num_runs: int) -> list[Row]:
    """Return the accepted share of the draft model's tokens, forced ones left out."""

    def counts(seed: int) -> tuple[int, int]:
        completion = _object(system, TEXTS, temperature=1.0, mode="rejection", seed=seed, gamma=4, provenance=True)
        num_forced = sum(detail.draft_pool == "grammar" for detail in completion.details)
        stats = completion.stats
        return stats.num_draft_tokens - num_forced, stats.num_accepted_tokens - num_forced

    # The draft is late, and then left out, until it has loaded its tokens for the first constraint.
    for _ in range(MOST_TRIES):
        if counts(0)[0]:
            break
        time.sleep(1.0)
    drafted, accepted = np.sum([counts(seed) for seed in range(num_runs)], axis=0)
    return [row(system="masked draft", metric="acceptance", value=float(accepted / drafted), unit="accepted share")]
