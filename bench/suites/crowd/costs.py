"""Measure what a crowd of streams costs. Part of the suite `crowd`, which calls this; every target is simulated.

- `batch_rows`: processor time a token of coordinator, target and Redis, and the 99th percentile over the median of the
  gaps between the chunks of a stream.
- `ttft`: time to the first token of a stream that begins beside 31 running ones.
- `vain`: tokens that the target computes after a stop string.
- `clients`: 64 and 200 clients at once without deadlines and drafts on the 70B model, whose KV holds all of them: how
  many are refused, and tokens a second over the ideal of that many streams.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import median_ratio, take_turns
from bench.harness.rows import Row
from bench.harness.scrape import total
from bench.harness.streams import StreamProcess, StreamRequest
from bench.harness.workload import OwnPrompts
from bench.suites.faults.overload_client import Batch as Load
from bench.suites.faults.overload_client import LoadProcess
from bench.systems.simulated import ideal_crowd_tokens_per_s
from bench.systems.text_streams import TextStream
from bench.systems.up import UpSystem
from specdec.cli.top import metrics_addresses_of
from specdec.engine.simulated.simulated_pair import simulated_pair

PAIR_8B, PAIR_70B = "simulated:8b-0.6b", "simulated:70b-1b"
#: Words in the command lines of the programs whose processor time is told.
PROGRAMS = ("coordinator", "target_service", "redis-server")
_NUM_RUNNING, _RUNNING_TOKENS, _ARRIVAL_S = 31, 192, 0.5
_ALONE = {"temperature": 0.0, "ignore_eos": True, "mode": "off"}
#: Words after which a text is stopped, and time in which the target stops too.
_STOP_AFTER, _SETTLE_S = 40, 0.5
_CLIENTS, _CLIENT_TOKENS = (64, 200), 128
MakeRow = Callable[..., Row]


def simulated_prompts() -> OwnPrompts:
    """Return prompts so short that reading them costs nothing."""
    return OwnPrompts([[1, 0]])


@dataclass(frozen=True)
class Batch:
    """One batch of streams on one system."""

    rate: float
    """Tokens a second until its last stream ended."""
    streams: Sequence[TextStream] = ()
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """Processor seconds of each of `PROGRAMS`."""

    @property
    def num_tokens(self) -> int:
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two chunks of a stream while all streams run."""
        begin_s, end_s = max(each.ttft_s for each in self.streams), min(each.end_s for each in self.streams)
        return [
            later - earlier
            for each in self.streams
            for earlier, later in zip(each.chunk_s, each.chunk_s[1:], strict=False)
            if begin_s <= earlier and later <= end_s
        ]


def batch_rows(row: MakeRow, batches: Sequence[Batch], most_cpu_us: float | None, most_gap: float | None) -> list[Row]:
    """Return the costs of a system's batches.

    Args:
        row: makes a row of the case and system.
        batches: at least one.
        most_cpu_us: limit of the processor time of all programs together.
        most_gap: limit of the largest gap over the median one; None: gaps are not told.
    """
    num_tokens = sum(batch.num_tokens for batch in batches)
    cpu_us = {name: sum(batch.cpu_s[name] for batch in batches) * 1e6 / num_tokens for name in PROGRAMS}
    rows = [row(metric=f"{name}_cpu_us", value=used_us, unit="us/token") for name, used_us in cpu_us.items()]
    rows.append(row(metric="all_cpu_us", value=sum(cpu_us.values()), unit="us/token", at_most=most_cpu_us))
    if most_gap is not None:
        gaps_s = [np.quantile(batch.gaps_s, (0.99, 0.5)) for batch in batches]
        gap = median_ratio(*zip(*gaps_s, strict=True))
        rows.append(row(metric="gap_p99", unit="x", ratio_to="median gap", at_most=most_gap, **gap.fields))
    return rows


def ttft_rows(system: UpSystem, row: MakeRow, num_runs: int) -> list[Row]:
    """Return the time to the first token of a stream that begins beside others."""
    prompts = OwnPrompts([list(range(32))])

    def ttft_s(_: int) -> float:
        *running, arriving = prompts.batch(_NUM_RUNNING + 1)
        requests = [StreamRequest(prompt, _ALONE | {"max_new_tokens": _RUNNING_TOKENS}) for prompt in running]
        requests.append(StreamRequest(arriving, _ALONE | {"max_new_tokens": 8}, _ARRIVAL_S))
        return client.run(requests)[-1].ttft_s

    with StreamProcess(system.endpoint) as client:
        measured = take_turns("first token", {"": ttft_s}, range(num_runs), [-1])[""]
    case, value = f"simulated 8B, beside {_NUM_RUNNING} running streams, no draft", 1e3 * float(np.median(measured))
    return [row(case=case, system="arriving stream", metric="ttft_ms_p50", value=value, unit="ms")]


def vain_rows(system: UpSystem, row: MakeRow, num_runs: int) -> list[Row]:
    """Return the tokens that the target computes in vain after a stop string."""
    asked = _ALONE | {"max_new_tokens": 3 * _STOP_AFTER, "seed": 7}
    prompts = simulated_prompts()

    def in_vain(_: int) -> float:
        (prompt,) = prompts.batch(1)
        words = system.client.generate(prompt_token_ids=prompt, **asked).text.split(" ")
        before = _num_computed(system)
        stop = " ".join(words[_STOP_AFTER - 3 : _STOP_AFTER])
        usage = system.client.generate(prompt_token_ids=prompt, stop=[stop], **asked).usage
        # The last token that was wanted was drawn, not computed.
        return _num_computed(system) - before - (usage.num_prompt_tokens + usage.num_output_tokens - 1)

    mean = float(np.mean(take_turns("stop string", {"": in_vain}, range(num_runs))[""]))
    case = "simulated 8B, one stream, no draft, stopped by a string"
    return [row(case=case, system="target", metric="tokens_in_vain", value=mean, unit="tokens", at_most=8.0)]


def _num_computed(system: UpSystem) -> float:
    """Return the tokens in all steps of the target so far, once it is idle."""
    time.sleep(_SETTLE_S)
    name = "specdec:iteration_tokens_total_sum"
    return sum(total(address, name, role="target") for address in metrics_addresses_of(system.endpoint))


def client_rows(system: UpSystem, row: MakeRow, num_runs: int) -> list[Row]:
    """Return how many clients of a batch are refused, and their tokens a second over the ideal."""
    rows = []
    with LoadProcess(system.endpoint) as load:
        for num_clients in _CLIENTS:
            # So high a rate that all begin at once, and each once.
            batch = partial(Load, num_clients * 1e-6, rate=1e6, num_tokens=_CLIENT_TOKENS, prompt_tokens=2)
            systems = {"": lambda index, batch=batch: load.run(batch(first_prompt=1_000 * index))}
            done = take_turns(f"{num_clients} clients", systems, range(num_runs), [num_runs])[""]
            num_refused = max(sum(bool(outcome.error) for outcome in outcomes) for outcomes in done)
            rates = [sum(each.num_tokens for each in one) / max(each.ended_s for each in one) for one in done]
            ratio = median_ratio(rates, [ideal_crowd_tokens_per_s(simulated_pair(PAIR_70B), num_clients)] * num_runs)
            named = partial(row, case=f"simulated 70B, {num_clients} clients at once", system="specdec_alone")
            rows += [
                named(metric="refused", value=float(num_refused), unit="requests", at_most=0.0),
                named(metric="tokens_per_s_ratio", unit="x", ratio_to="ideal_alone", required=0.9, **ratio.fields),
            ]
    return rows


#: Rows with systems of their own, by the names of `--rows`: the target, what is measured, and how often at most.
FIGURES: dict[str, tuple[str, Callable[[UpSystem, MakeRow, int], list[Row]], int]] = {
    "ttft": (PAIR_8B, ttft_rows, 9),
    "vain": (PAIR_8B, vain_rows, 9),
    "clients": (PAIR_70B, client_rows, 3),
}


def rows_of(figure: str, tokenizer: Path, row: MakeRow, num_runs: int) -> list[Row]:
    """Return the rows of one of `FIGURES`, from at most this many runs."""
    model, measure, most_runs = FIGURES[figure]
    with UpSystem(["--target", model, "--tokenizer", str(tokenizer)]) as system:
        return measure(system, row, min(num_runs, most_runs))
