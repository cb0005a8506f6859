"""Part `vllm` of the suite `engines`: one vLLM server, asked directly and through targets of the backend `vllm`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import median_difference
from bench.harness.rows import Row
from bench.suites.engines.turns import Run, measure_turns, num_equal_texts, start_all, stop_all
from bench.suites.peers.figures import Batch, batch_rows, ratio_row
from bench.systems.http_servers import VllmServer
from bench.systems.models import DEMO
from bench.systems.process import PeerServer
from bench.systems.real_models import SMOLLM2
from bench.systems.served import VLLM, peer_program
from bench.systems.served_pairs import prompts_of
from bench.systems.specdec_server import SpecdecServer
from specdec.checkpoints.locate import locate_checkpoint

_DIRECT, _ALONE, _DRAFTED = "vllm_alone", "specdec_vllm_alone", "specdec_vllm_drafted"
_NUM_TOKENS = 64
_FLAGS = ("--enable-scale-out", "--enable-prompt-tokens-details")


def front_rows(make_row: Callable[..., Row], run: Run, peers: Path, quick: bool) -> list[Row]:
    """Return what a round costs above vLLM's pass, for the demo target and SmolLM2 in float32.

    Raises:
        ServerFailure: a server did not start, or `make peers` has not prepared vLLM in the folder `peers`.
        FileNotFoundError: SmolLM2 is not installed.
    """
    python = peer_program(VLLM, peers)
    rows = _model_rows(
        partial(make_row, case="demo pair through vllm, one stream"),
        run,
        python,
        DEMO / "target",
        DEMO / "draft",
        quick,
    )
    smollm2 = locate_checkpoint(SMOLLM2.path())
    return rows + _model_rows(
        partial(make_row, case="SmolLM2 through vllm, one stream"), run, python, smollm2, None, quick
    )


def _model_rows(
    make_row: Callable[..., Row], run: Run, python: Path, target: Path, draft: Path | None, quick: bool
) -> list[Row]:
    vllm = VllmServer(_DIRECT, python, target, "float32", flags=_FLAGS)
    flags = ("--backend", "vllm", "--backend-url", vllm.url)
    servers: list[PeerServer] = [vllm, SpecdecServer(_ALONE, target, None, "float32", flags)]
    if draft is not None:
        servers.append(SpecdecServer(_DRAFTED, target, draft, "float32", flags))
    start_all(run, servers)
    try:
        batches = measure_turns(run, servers, prompts_of(target), _NUM_TOKENS, quick)
    finally:
        stop_all(run, servers)
    rows = [above_pass_row(make_row, batches[_ALONE], batches[_DIRECT])]
    for server in servers[1:]:
        num_equal, num_texts = num_equal_texts(batches, server.name, _DIRECT)
        rows += [
            ratio_row(make_row, batches, server.name, _DIRECT),
            make_row(
                system=server.name, metric="texts_equal", value=num_equal, unit=f"of {num_texts}", ratio_to=_DIRECT
            ),
        ]
    if draft is not None:
        rows.append(ratio_row(make_row, batches, _DRAFTED, _ALONE))
    return rows + batch_rows(make_row, batches)


def above_pass_row(make_row: Callable[..., Row], ours: Sequence[Batch], direct: Sequence[Batch]) -> Row:
    """Return the time of a round without drafts above one token of vLLM asked directly."""
    above = median_difference(*([_tpot_ms(batch) for batch in batches] for batches in (ours, direct)))
    return make_row(
        system=_ALONE, metric="round_above_pass_ms", value=above.median, unit="ms", ratio_to=_DIRECT, low=above.low,
        high=above.high, num_pairs=above.num_pairs,
    )  # fmt: skip


def _tpot_ms(batch: Batch) -> float:
    return float(np.mean([answer.tpot_s for answer in batch.answers])) * 1e3
