"""Part `pool` of the suite `engines`: drafts of specdec inside vLLM, beside vLLM's own draft model."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import MIN_PAIRS
from bench.harness.report import progress
from bench.harness.rows import Row
from bench.harness.scrape import total
from bench.suites.engines.turns import measure_turns, num_equal_texts, start_all, stop_all
from bench.suites.peers.figures import batch_rows, ratio_row
from bench.systems.http_servers import VllmServer, free_port
from bench.systems.models import DEMO
from bench.systems.process import Answer, Run, ServerProcess
from bench.systems.served import VLLM, own_draft_model, peer_program, prompts_of
from specdec.rpc.channels import dial

_POOL, _OWN = "vllm_with_pool", "vllm_with_draft_model"
_DEADLINE_MS = 50
_NUM_TOKENS = 128
_MARGIN_MS = 5.0
#: Time in which a draft service that goes on is used again.
_RETURN_S = 3.0
_ROOT = Path(__file__).resolve().parents[3]
_PROPOSER = {"method": "custom_class", "model": "specdec.integrations.vllm.DraftPoolProposer"}


class _DraftService(ServerProcess):
    """`python -m draft_service` with the demo draft."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "draft_service", "--model", str(DEMO / "draft"), "--listen", self.address]
        super().__init__("draft service", [*command, "--redis-url", "memory://"])

    async def _wait_until_ready(self) -> None:
        async with dial(self.address) as channel:
            await channel.channel_ready()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


def pool_rows(make_row: Callable[..., Row], run: Run, peers: Path, quick: bool) -> list[Row]:
    """Return acceptance, tokens a second and the pause of a stopped draft service.

    Raises:
        ServerFailure: a server did not start, or `make peers` has not prepared vLLM in the folder `peers`.
    """
    python = peer_program(VLLM, peers)
    draft = _DraftService()
    run(draft.start())
    environ = {
        "PYTHONPATH": str(_ROOT), "SPECDEC_DRAFT_ENDPOINT": draft.address,
        "SPECDEC_DRAFT_DEADLINE_MS": str(_DEADLINE_MS),
    }  # fmt: skip
    target, own = DEMO / "target", own_draft_model(DEMO / "draft")
    servers = [
        VllmServer(_POOL, python, target, "float32", speculation=_PROPOSER, environ=environ),
        VllmServer(_OWN, python, target, "float32", speculation=own),
    ]
    make_row = partial(make_row, case="demo pair inside vllm, one stream")
    try:
        start_all(run, servers)
        try:
            batches = measure_turns(run, servers, prompts_of(target), _NUM_TOKENS, quick)
            acceptances = {server.name: _acceptance(server) for server in servers}
            pauses_ms = _pauses_ms(run, servers[0], draft, 1 if quick else MIN_PAIRS)
        finally:
            stop_all(run, servers)
    finally:
        run(draft.stop())
    num_equal, num_texts = num_equal_texts(batches, _POOL, _OWN)
    return [
        *(make_row(system=name, metric="acceptance", value=share, unit="") for name, share in acceptances.items()),
        make_row(
            system=_POOL, metric="acceptance_ratio", value=acceptances[_POOL] / acceptances[_OWN], unit="x",
            ratio_to=_OWN, required=0.95,
        ),
        ratio_row(make_row, batches, _POOL, _OWN),
        make_row(system=_POOL, metric="texts_equal", value=num_equal, unit=f"of {num_texts}", ratio_to=_OWN),
        make_row(
            system=_POOL, metric="pause_ms_max", value=max(pauses_ms), unit="ms", at_most=_DEADLINE_MS + _MARGIN_MS,
            note=f"The pause is a draft service's stop in mid-stream, over a step without drafts; deadline "
            f"{_DEADLINE_MS} ms, {len(pauses_ms)} stops.",
        ),
        make_row(system=_POOL, metric="pause_ms_p50", value=float(np.median(pauses_ms)), unit="ms"),
        *batch_rows(make_row, batches),
    ]  # fmt: skip


def _acceptance(server: VllmServer) -> float:
    """Return the share of draft tokens that vLLM has accepted so far."""
    accepted, drafted = (
        total(server.url.removeprefix("http://"), f"vllm:spec_decode_num_{kind}_tokens_total")
        for kind in ("accepted", "draft")
    )
    return accepted / drafted


def _pauses_ms(run: Run, server: VllmServer, draft: _DraftService, num_stops: int) -> list[float]:
    """Return the longest step of each stream in which the draft service is stopped, over its usual later step."""
    prompts = prompts_of(DEMO / "target")
    pauses_ms = []
    with progress("draft service stopped in mid-stream", num_stops) as advance:
        for prompt in [*prompts[:num_stops], *prompts[:num_stops]]:
            if len(pauses_ms) == num_stops:
                break
            (before,) = run(server.answer([prompt], _NUM_TOKENS))
            delay_s = before.chunk_s[-1] / 3
            (answer,) = run(_answer_with_stop(server, draft, prompt, delay_s))
            if answer.chunk_s[-1] > 2 * delay_s:  # a stream that is much faster than the one before ends too early
                pauses_ms.append(longest_pause_ms(answer.chunk_s))
                advance()
    return pauses_ms


async def _answer_with_stop(
    server: VllmServer, draft: _DraftService, prompt: list[int], delay_s: float
) -> list[Answer]:
    """Stop the draft service `delay_s` after the beginning of a stream, and let it go on after the stream's end."""
    answering = asyncio.ensure_future(server.answer([prompt], _NUM_TOKENS))
    await asyncio.sleep(delay_s)
    draft.signal(signal.SIGSTOP)
    try:
        return await answering
    finally:
        draft.signal(signal.SIGCONT)
        await asyncio.sleep(_RETURN_S)


def longest_pause_ms(chunk_s: Sequence[float]) -> float:
    """Return by how much the longest step of a stream exceeds the median of the steps after it."""
    steps_ms = np.diff(chunk_s) * 1e3
    longest = int(np.argmax(steps_ms))
    return float(steps_ms[longest] - np.median(steps_ms[longest + 1 :]))
