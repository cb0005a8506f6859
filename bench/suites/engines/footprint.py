"""Part `footprint` of the suite `engines`: memory, idle processor time and start of `specdec up` with real models."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.harness.report import waiting
from bench.harness.rows import Row
from bench.suites.engines.turns import Run, start_all, stop_all
from bench.systems.process import PeerServer
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from bench.systems.served_pairs import prompts_of
from bench.systems.specdec_server import SpecdecServer
from specdec.checkpoints.locate import locate_checkpoint

_IDLE_S, _QUICK_IDLE_S = 60.0, 5.0
#: Longer than a coordinator takes to be idle.
_SETTLE_S = 45.0


def footprint_rows(make_row: Callable[..., Row], run: Run, peers: Path, quick: bool) -> list[Row]:
    """Return memory after a stream, processor time of an idle system, and the time of a second start.

    Raises:
        ServerFailure: a system did not start.
        FileNotFoundError: a model is not installed.
    """
    smollm2, target, draft = SMOLLM2.path(), QWEN_TARGET.path(), QWEN_DRAFT.path()
    cases = [
        ("SmolLM2 bfloat16, target only", SpecdecServer("specdec", smollm2, None, "auto"), smollm2, 700.0, None),
        ("Qwen2.5-Coder 1.5B with 0.5B, int8", SpecdecServer("specdec", target, draft, "int8"), target, 3072.0, 15.0),
    ]
    rows = []
    for case, server, model, memory_mib, start_s in cases:
        rows += _system_rows(
            partial(make_row, case=case, system="specdec"), run, server, model, memory_mib, start_s, quick
        )
    return rows


def _system_rows(
    make_row: Callable[..., Row],
    run: Run,
    server: PeerServer,
    model: Path,
    memory_mib: float,
    start_s: float | None,
    quick: bool,
) -> list[Row]:
    prompt = prompts_of(locate_checkpoint(model))[0]
    start_all(run, [server])  # the first start converts the model
    stop_all(run, [server])
    start_all(run, [server])
    try:
        run(server.answer([prompt], 32))
        time.sleep(_SETTLE_S)
        idle_s = _QUICK_IDLE_S if quick else _IDLE_S
        with waiting(f"idle for {idle_s:g} s"):
            before_s = server.cpu_s()
            time.sleep(idle_s)
            idle_share = (server.cpu_s() - before_s) / idle_s
        pss_mib = server.pss_bytes() / 2**20
    finally:
        stop_all(run, [server])
    return [
        make_row(metric="memory_mib", value=pss_mib, unit="MiB (PSS)", at_most=memory_mib),
        make_row(metric="idle_cpu", value=idle_share * 100, unit="% of a core", at_most=0.5),
        make_row(metric="second_start_s", value=server.start_s, unit="s", at_most=start_s),
    ]
