"""Check the promise of `--deterministic`: a row has the same bits alone and in any batch, or the model is not served.

A token's logits are then the same from a draft step, a verification and a prompt chunk, so greedy text depends neither
on other sessions nor on the number of draft tokens. Native kernels keep the promise on a CPU, and the kernels of steps
in CUDA graphs on a GPU (`engine.linear.row_products`, `engine.cuda_graphs.paged_attention`). This module refuses
settings that cannot keep it and tests a worker that should. Called by `engine.load_pipeline`.
"""

from __future__ import annotations

import torch

from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.options import AUTO, CUDA_GRAPHS, NATIVE, CompileOptions

#: Setting that asks for batch invariance.
FIELD = "deterministic"

# Tokens of the tested sequence, rows of it that are compared, and tokens of the sequence beside it: together they make
# steps with more rows than any kernel computes at once.
_TOKENS, _COMPARED_ROWS, _TOKENS_BESIDE = 40, 5, 90
# Logit rows of the sequence beside it.
_LOGITS_BESIDE = 20
# A pool or a context that holds fewer tokens of either sequence cannot be tested.
_FEWEST_TOKENS = _COMPARED_ROWS + 4


def require_keepable(options: CompileOptions, device: torch.device, *, is_native: bool, uses_cuda_graphs: bool) -> None:
    """Check that steps will run by kernels that keep the promise.

    Args:
        options: requested options.
        device: device of the model.
        is_native: whether native kernels run the model.
        uses_cuda_graphs: whether its steps run in CUDA graphs.

    Raises:
        Unsupported: they will not, or another backend was requested.
    """
    if is_native or uses_cuda_graphs:
        return
    kernels, backend = ("native kernels", NATIVE) if device.type == "cpu" else ("CUDA graphs", CUDA_GRAPHS)
    if options.backend not in (AUTO, backend):
        problem = f"needs {kernels}, not --compile-backend {options.backend}"
    else:
        problem = f"needs {kernels}, which do not run this model here in this dtype"
    raise Unsupported(f"--{FIELD} on {device.type} {problem}", field=FIELD)


def require_batch_invariance(worker: Worker) -> None:
    """Run the end of one sequence alone and beside another one, in steps of very different sizes; fills the cache.

    Raises:
        Unsupported: some logit differs.
    """
    trial = _Trial(worker)
    if not trial.has_room:
        return
    alone = trial.run_alone()
    for rows in trial.run_in_batches():
        is_same = (rows == alone) | (rows.isnan() & alone.isnan())
        if not is_same.all():
            difference = float((rows - alone).abs().nan_to_num(nan=torch.inf).max())
            raise Unsupported(
                f"--{FIELD} is not possible with this model on this device: logits of a row alone and in a batch "
                f"differ by {difference:.2g}",
                field=FIELD,
            )


class _Trial:
    """Two sequences of random tokens in separate blocks."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        shape = worker.shape
        own_blocks = min(-(-_TOKENS // BLOCK_TOKENS), shape.num_kv_blocks // 2 or 1)
        self._tables = tuple(range(own_blocks)), tuple(range(own_blocks, shape.num_kv_blocks))
        longest = shape.max_context_tokens
        lengths = (
            min(_TOKENS, longest, own_blocks * BLOCK_TOKENS),
            min(_TOKENS_BESIDE, longest, len(self._tables[1]) * BLOCK_TOKENS),
        )
        generator = torch.Generator().manual_seed(0)
        self._tokens = tuple(torch.randint(shape.vocabulary_size, (n,), generator=generator).tolist() for n in lengths)
        self._last = lengths[0] - _COMPARED_ROWS
        self.has_room = min(lengths) >= _FEWEST_TOKENS

    def run_alone(self) -> torch.Tensor:
        """Return the logits [rows, V] of the last tokens, each run in a step of its own."""
        self._run((0, 0, self._last))
        end = len(self._tokens[0])
        return torch.cat([self._run((0, position, position + 1)) for position in range(self._last, end)])

    def run_in_batches(self) -> list[torch.Tensor]:
        """Return the same rows from one chunk with all tokens, and from verifications beside the other sequence."""
        end, beside = len(self._tokens[0]), len(self._tokens[1])
        found = [self._run((0, 0, end))]
        cut = beside * 2 // 3
        self._run((0, 0, 3))
        self._run((1, 0, cut), (0, 3, self._last))
        found.append(self._run((0, self._last, end), (1, cut, beside)))
        found.append(self._run((1, cut, beside), (0, self._last, end)))
        found.append(self._run((1, beside - 1, beside), (0, self._last, end)))
        return found

    def _run(self, *pieces: tuple[int, int, int]) -> torch.Tensor:
        """Run a step of pieces (sequence, from, to); return the logits of the first sequence's last rows."""
        slices = tuple(
            SequenceSlice(
                tuple(self._tokens[index][start:end]), start, self._tables[index][: -(-end // BLOCK_TOKENS)],
                min(end - start, _LOGITS_BESIDE if index else _COMPARED_ROWS),
            )
            for index, start, end in pieces
        )  # fmt: skip
        logits = self._worker.execute(StepPlan(slices)).split([piece.num_logit_rows for piece in slices])
        rows: torch.Tensor = logits[[index for index, *_ in pieces].index(0)]
        return rows.cpu()
