"""The promise of `--deterministic`: a row has the same bits alone and in company, or nothing is served.

Company is whatever else a step holds, other rows of the same sequence among it: a token's logits are then the same from
a draft step, a verification and a chunk of a prompt, so greedy text depends neither on who else is served nor on how
much was drafted. What keeps it is each device's own: the native kernels on a CPU, the kernels of captured steps on a
GPU (`engine.linear.row_products`, `engine.cuda_graphs.paged_attention`). Here is who can keep it at all, and a trial of
the worker that has it to keep. Called by `engine.loader`.
"""

from __future__ import annotations

import torch

from specdec.engine.base import SequenceSlice, StepPlan, Worker
from specdec.engine.options import AUTO, CUDA_GRAPHS, NATIVE, CompileOptions
from specdec.errors import Unsupported
from specdec.types import BLOCK_TOKENS

#: What asks for it.
FIELD = "deterministic"

# Tokens of the sequence that is looked at, of which the last ones' logits are, and of the one beside it: with that,
# steps have more rows than any product takes at once.
_TOKENS, _LOOKED_AT, _TOKENS_BESIDE = 40, 5, 90
# Rows of the head, of the one beside.
_LOGITS_BESIDE = 20
# Of either: a pool or a context that holds less holds no company.
_FEWEST_TOKENS = _LOOKED_AT + 4


def require_keepable(options: CompileOptions, device: torch.device, *, is_native: bool, uses_cuda_graphs: bool) -> None:
    """Whether steps will run by what keeps the promise.

    Args:
        options: what was asked for.
        device: of the model.
        is_native: whether the native kernels run it.
        uses_cuda_graphs: whether its steps are to be captured.

    Raises:
        Unsupported: they will not, or not as somebody asked for.
    """
    if is_native or uses_cuda_graphs:
        return
    keeper, backend = ("native kernels", NATIVE) if device.type == "cpu" else ("captured steps", CUDA_GRAPHS)
    if options.backend not in (AUTO, backend):
        problem = f"needs {keeper}, not --compile-backend {options.backend}"
    else:
        problem = f"needs {keeper}, which do not run this model here in this dtype"
    raise Unsupported(f"--{FIELD} on {device.type} {problem}", field=FIELD)


def require_batch_invariance(worker: Worker) -> None:
    """Runs the end of one sequence alone and in company, in steps of very different sizes; its cache is left filled.

    Raises:
        Unsupported: some logit is another one.
    """
    trial = _Trial(worker)
    if not trial.has_company:
        return
    alone = trial.run_alone()
    for rows in trial.run_in_company():
        is_same = (rows == alone) | (rows.isnan() & alone.isnan())
        if not is_same.all():
            difference = float((rows - alone).abs().nan_to_num(nan=torch.inf).max())
            raise Unsupported(
                f"--{FIELD} cannot be kept here: logits of a row alone and in company differ by {difference:.2g}",
                field=FIELD,
            )


class _Trial:
    """Two sequences of random tokens in blocks of their own."""

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
        self._last = lengths[0] - _LOOKED_AT
        self.has_company = min(lengths) >= _FEWEST_TOKENS

    def run_alone(self) -> torch.Tensor:
        """The logits that the others are to equal: [rows, V]."""
        self._run((0, 0, self._last))
        end = len(self._tokens[0])
        return torch.cat([self._run((0, position, position + 1)) for position in range(self._last, end)])

    def run_in_company(self) -> list[torch.Tensor]:
        """The same rows: in one chunk with all before them, in a verification, and both beside another sequence."""
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
        """(sequence, from, to) of each; the logits of the first sequence's last rows."""
        slices = tuple(
            SequenceSlice(
                tuple(self._tokens[index][start:end]), start, self._tables[index][: -(-end // BLOCK_TOKENS)],
                min(end - start, _LOGITS_BESIDE if index else _LOOKED_AT),
            )
            for index, start, end in pieces
        )  # fmt: skip
        logits = self._worker.execute(StepPlan(slices)).split([piece.num_logit_rows for piece in slices])
        rows: torch.Tensor = logits[[index for index, *_ in pieces].index(0)]
        return rows.cpu()
