"""The three services and Hugging Face's generation, as processes on one device: one greedy stream, and 1 to 64.

One stream alternates between speculation at the suites' gamma, gamma chosen by the system, target-only, and the peer,
assisted with the same gamma and plain. Many streams begin together, with gamma chosen by the system and target-only.
Called by the `gpu` suite.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.harness.pairs import rate_rows, ratio_row, take_turns
from bench.harness.rows import Row
from bench.harness.streams import StreamProcess, StreamRequest, tokens_per_s
from bench.harness.workload import GAMMA, NUM_NEW_TOKENS, OwnPrompts, prompt_token_ids
from bench.systems.ours import RunningSystem, SystemRun, acceptance, emitted_per_round, mean_round_s
from bench.systems.random_pair import RandomPair
from bench.systems.transformers import PeerProcess, PeerRun

ONE_STREAM, STREAMS = "one_stream", "streams"
OURS, AUTO, TARGET_ONLY = "specdec", "specdec, gamma auto", "specdec_target_only"
ASSISTED, PLAIN = "hf_assisted", "hf_plain"
#: What the pair was made for must still hold in the streams that count.
LEAST_ALPHA, MOST_ALPHA = 0.75, 0.85
PROMPT_TOKENS = 48
NOTE = "Draft and target share one device, so the overlap shown understates what two devices give."

#: Size of both KV caches in tokens, enough for 64 streams many times over. By default each service takes what is free.
_KV_TOKENS = 1 << 16
_DTYPE = "bfloat16"
#: Of the processor: the models run on the device.
_PEER_THREADS = 1


Runs = dict[str, list[SystemRun | PeerRun]]


@dataclass(frozen=True)
class Effort:
    """Amount of measurement."""

    num_prompts: int
    num_new_tokens: int
    concurrencies: tuple[int, ...]
    num_batches: int


FULL = Effort(20, NUM_NEW_TOKENS, (1, 2, 4, 8, 16, 32, 64), 5)
QUICK = Effort(3, 32, (1, 4), 2)


def stack_rows(
    pair: RandomPair, device: str, shape: str, row: Callable[..., Row], figures: Sequence[str], *, quick: bool
) -> list[Row]:
    """Start the services and measure `ONE_STREAM`, `STREAMS` or both.

    Args:
        pair: the models.
        device: device of all processes.
        shape: name of the pair in the rows.
        row: makes a row of this suite.
        figures: measurements; unknown ones are ignored.
        quick: fewer prompts, shorter texts, fewer streams.
    """
    effort = QUICK if quick else FULL
    directories = pair.target.directory, pair.draft.directory
    kv_cache_bytes = _KV_TOKENS * pair.target.kv_bytes_per_token, _KV_TOKENS * pair.draft.kv_bytes_per_token
    rows = []
    with RunningSystem(*directories, dtype=_DTYPE, device=device, kv_cache_bytes=kv_cache_bytes) as ours:
        if ONE_STREAM in figures:
            with PeerProcess(*directories, _PEER_THREADS, device, _DTYPE) as peer:
                runs = _one_stream(ours, peer, prompt_token_ids(directories[0])[: effort.num_prompts], effort)
            case = f"{shape}, 1 stream, greedy, gamma {GAMMA}"
            rows += _one_stream_rows(runs, pair, partial(row, case=case, note=NOTE))
        if STREAMS in figures:
            prompts = OwnPrompts(prompt_token_ids(directories[0], PROMPT_TOKENS))
            with StreamProcess(ours.endpoint) as clients:
                case = f"{shape}, many streams, greedy"
                rows += _streams_rows(clients, prompts, effort, partial(row, case=case, note=NOTE))
    return rows


def _one_stream(ours: RunningSystem, peer: PeerProcess, prompts: list[list[int]], effort: Effort) -> Runs:
    """Run every system on every prompt, in turn."""
    own = {OURS: {"gamma": GAMMA}, AUTO: {}, TARGET_ONLY: {"mode": "off"}}

    def run_ours(prompt: list[int], name: str) -> SystemRun:
        # A distinct second token keeps a system from finding another system's KV in the cache.
        prompt = [prompt[0], 300 + list(own).index(name), *prompt[2:]]
        return ours.run(prompt, effort.num_new_tokens, temperature=0.0, **own[name])

    def run_peer(prompt: list[int], method: str) -> PeerRun:
        return peer.run(method, prompt, effort.num_new_tokens, GAMMA)

    systems = {name: partial(run_ours, name=name) for name in own}
    systems |= {name: partial(run_peer, method=name.removeprefix("hf_")) for name in (ASSISTED, PLAIN)}
    warmup = [prompt[::-1] for prompt in prompts[:2]]
    return take_turns("gpu: one stream", systems, prompts, warmup)


def _one_stream_rows(runs: Runs, models: RandomPair, row: Callable[..., Row]) -> list[Row]:
    rates = {name: [len(run.token_ids) / run.e2el_s for run in done] for name, done in runs.items()}
    agreed = {(OURS, TARGET_ONLY): 1.8, (OURS, ASSISTED): 5.0}
    also = [(OURS, PLAIN), (AUTO, TARGET_ONLY), (TARGET_ONLY, PLAIN), (ASSISTED, PLAIN)]
    rows = [ratio_row(row, rates, *pair, required=agreed.get(pair)) for pair in [*agreed, *also]]
    ours = [run for run in runs[OURS] if isinstance(run, SystemRun)]
    alpha = partial(row, system=OURS, metric="alpha", unit="accepted/tested")
    rows.append(alpha(value=acceptance(ours), required=LEAST_ALPHA, at_most=MOST_ALPHA))
    rows.append(row(system=OURS, metric="tau", value=emitted_per_round(ours), unit="tokens/round"))
    rows.append(row(system="pair", metric="eps", value=models.eps, unit="of an untrained layer"))
    rows.append(row(system="pair", metric="dialled_alpha", value=models.agreement, unit="equal/named"))
    for name, done in runs.items():
        ttft_s = float(np.median([run.ttft_s for run in done]))
        rows.append(row(system=name, metric="ttft_ms", value=ttft_s * 1e3, unit="ms"))
    rows += rate_rows(row, rates)
    parts = ("draft, its link and service", "verify, its link and service", "accept, commit, emit")
    for part, seconds in zip(parts, mean_round_s(ours), strict=True):
        rows.append(row(system=part, metric="round_split_ms", value=seconds * 1e3, unit="ms"))
    return rows


def _streams_rows(clients: StreamProcess, prompts: OwnPrompts, effort: Effort, row: Callable[..., Row]) -> list[Row]:
    """Return the tokens per second of whole batches, the median of a few, by number of streams."""
    fixed = {"max_new_tokens": effort.num_new_tokens, "temperature": 0.0, "ignore_eos": True}

    def run_batch(index: int, concurrency: int, options: dict[str, object]) -> float:
        batch = prompts.batch(concurrency)
        return tokens_per_s(clients.run([StreamRequest(prompt, fixed | options) for prompt in batch]))

    rows = []
    for concurrency in effort.concurrencies:
        of_all = partial(run_batch, concurrency=concurrency)
        systems = {AUTO: partial(of_all, options={}), TARGET_ONLY: partial(of_all, options={"mode": "off"})}
        rates = take_turns(f"gpu: {concurrency} streams", systems, range(effort.num_batches), [-1])
        rows += rate_rows(partial(row, x=concurrency, x_name="streams"), rates)
    return rows
