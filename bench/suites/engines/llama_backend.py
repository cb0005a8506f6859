"""Part `llama-cpp` of the suite `engines`: a real pair through llama.cpp in the target, beside llama.cpp's server."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.rows import Row
from bench.suites.engines.turns import Run, measure_turns, num_equal_texts, start_all, stop_all
from bench.suites.peers.figures import Batch, batch_rows, ratio_row, server_rows
from bench.suites.peers.texts import first_difference
from bench.systems.http_servers import LlamaServer
from bench.systems.process import PeerServer
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET
from bench.systems.served import LLAMA, peer_program
from bench.systems.served_pairs import prompts_of
from bench.systems.specdec_server import SpecdecServer
from specdec.checkpoints.locate import locate_checkpoint

_BACKEND, _INT8 = "specdec_llama.cpp_drafted", "specdec_int8_drafted"
_DRAFTED, _ALONE = "llama.cpp_drafted", "llama.cpp_alone"
_NUM_TOKENS = 64


def llama_rows(make_row: Callable[..., Row], run: Run, peers: Path, quick: bool) -> list[Row]:
    """Return tokens a second of the Qwen pair, its memory and its texts beside llama.cpp's.

    Raises:
        ServerFailure: a server did not start, or `make peers` has not prepared llama.cpp in the folder `peers`.
        FileNotFoundError: the Qwen pair is not installed.
    """
    program = peer_program(LLAMA, peers)
    target, draft = QWEN_TARGET.path(), QWEN_DRAFT.path()
    servers: list[PeerServer] = [
        SpecdecServer(_BACKEND, target, draft, "int8", ("--backend", "llama-cpp")),
        SpecdecServer(_INT8, target, draft, "int8"),
        LlamaServer(_DRAFTED, program, target, draft, "f16"),
        LlamaServer(_ALONE, program, target, None, "f16"),
    ]
    make_row = partial(make_row, case="Qwen2.5-Coder 1.5B with 0.5B, one stream")
    start_all(run, servers)
    try:
        batches = measure_turns(run, servers, prompts_of(locate_checkpoint(target)), _NUM_TOKENS, quick)
        memory = [
            row for server in servers for row in server_rows(make_row, server.name, server.start_s, server.pss_bytes())
        ]
    finally:
        stop_all(run, servers)
    equal_texts = [
        make_row(system=system, metric="texts_equal", value=num_equal, unit=f"of {num_texts}", ratio_to=_ALONE)
        for system in (_BACKEND, _DRAFTED)
        for num_equal, num_texts in [num_equal_texts(batches, system, _ALONE)]
    ]
    return [
        ratio_row(make_row, batches, _BACKEND, _DRAFTED, required=1.0),
        ratio_row(make_row, batches, _BACKEND, _ALONE, required=1.2),
        ratio_row(make_row, batches, _BACKEND, _INT8),
        *equal_texts,
        make_row(
            system=_BACKEND,
            metric="logit_gap_max",
            value=_largest_gap(target, batches[_BACKEND], batches[_ALONE]),
            unit="logits",
            ratio_to=_ALONE,
            note="The gap is between llama.cpp's own logits of the two tokens at which unequal texts first differ.",
        ),
        *batch_rows(make_row, batches),
        *memory,
    ]


def _largest_gap(model: Path, batches: Sequence[Batch], other: Sequence[Batch]) -> float:
    """Return the largest gap between the logits of the two tokens at which texts first differ; 0.0 if all are equal.

    The logits are llama.cpp's own. Two builds of it round differently, so either token may win a near tie.
    """
    import llama_cpp

    llama = llama_cpp.Llama(str(model), n_ctx=2048, n_threads=2, n_threads_batch=2, flash_attn=True, verbose=False)
    gaps = [0.0]
    for batch, other_batch in zip(batches, other, strict=True):
        for prompt, answer, other_answer in zip(batch.prompts, batch.answers, other_batch.answers, strict=True):
            place = first_difference(answer.token_ids, other_answer.token_ids)
            if place is None:
                continue
            llama.reset()
            llama.eval([*prompt, *answer.token_ids[:place]])
            logits = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), shape=(llama.n_vocab(),))
            gaps.append(abs(float(logits[answer.token_ids[place]] - logits[other_answer.token_ids[place]])))
    return max(gaps)
