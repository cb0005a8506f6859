"""Parts `vllm` and `llama-cpp` of the suite `engines`: specdec through another engine, and that engine by itself.

`vllm`: one vLLM server, asked directly and through targets of the backend `vllm`. `llama-cpp`: a real pair through
llama.cpp in the target, next to llama.cpp's server.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.pairs import median_difference
from bench.harness.rows import Row
from bench.suites.engines.turns import measure_turns, num_equal_texts, start_all, stop_all
from bench.suites.peers.figures import Batch, batch_rows, first_difference, ratio_row, server_rows
from bench.systems.http_servers import LlamaServer, VllmServer
from bench.systems.models import DEMO
from bench.systems.process import PeerServer, Run
from bench.systems.real_models import QWEN_DRAFT, QWEN_TARGET, SMOLLM2
from bench.systems.served import LLAMA, VLLM, peer_program, prompts_of, write_checkpoint
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
    of_demo, of_smollm2 = (
        partial(make_row, case=f"{name} through vllm, one stream") for name in ("demo pair", "SmolLM2")
    )
    rows = _model_rows(of_demo, run, python, DEMO / "target", DEMO / "draft", quick)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as folder:
        checkpoint = Path(folder) / "float32"
        write_checkpoint(SMOLLM2.path(), checkpoint, "float32")
        return rows + _model_rows(of_smollm2, run, python, checkpoint, None, quick)


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
    return make_row(system=_ALONE, metric="round_above_pass_ms", unit="ms", ratio_to=_DIRECT, **above.fields)


def _tpot_ms(batch: Batch) -> float:
    return float(np.mean([answer.tpot_s for answer in batch.answers])) * 1e3


_BACKEND, _INT8 = "specdec_llama.cpp_drafted", "specdec_int8_drafted"
_LLAMA_DRAFTED, _LLAMA_ALONE = "llama.cpp_drafted", "llama.cpp_alone"


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
        LlamaServer(_LLAMA_DRAFTED, program, target, draft, "f16"),
        LlamaServer(_LLAMA_ALONE, program, target, None, "f16"),
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
        make_row(system=system, metric="texts_equal", value=num_equal, unit=f"of {num_texts}", ratio_to=_LLAMA_ALONE)
        for system in (_BACKEND, _LLAMA_DRAFTED)
        for num_equal, num_texts in [num_equal_texts(batches, system, _LLAMA_ALONE)]
    ]
    return [
        ratio_row(make_row, batches, _BACKEND, _LLAMA_DRAFTED, required=1.0),
        ratio_row(make_row, batches, _BACKEND, _LLAMA_ALONE, required=1.2),
        ratio_row(make_row, batches, _BACKEND, _INT8),
        *equal_texts,
        make_row(
            system=_BACKEND,
            metric="logit_gap_max",
            value=_largest_gap(target, batches[_BACKEND], batches[_LLAMA_ALONE]),
            unit="logits",
            ratio_to=_LLAMA_ALONE,
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
