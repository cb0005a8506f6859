"""specdec's draft pool inside SGLang: the speculative algorithm SPECDEC.

    sglang serve --model-path MODEL --speculative-algorithm SPECDEC --speculative-num-draft-tokens 5

with the environment variables of `settings.DraftSettings`. SGLang calls `register` in each of its processes, because
specdec's package names it as a plugin of SGLang. SGLang keeps its API, grammars, sampler and KV; the draft model runs
in a draft service of its own, and SGLang goes on without drafts while that service does not answer.

The algorithm is SGLang's own NGRAM with another source of tokens: SGLang verifies what its n-gram worker drafts, and
`DraftPoolDrafts` gives it a chain of tokens from the draft pool instead of a tree from a corpus.

The module was written from the sources of SGLang 0.5.23. It has not run with a real SGLang: tests speak its contract
with a stand-in. SGLang is imported when it calls, so that the module can be imported without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.contract.errors import Unsupported
from specdec.contract.types import TokenIds
from specdec.integrations.settings import open_draft_pool, read_settings

#: Name of the algorithm, as --speculative-algorithm takes it.
ALGORITHM = "SPECDEC"

#: Default of --speculative-num-draft-tokens: the row's last token and four draft tokens.
_NUM_VERIFIED_TOKENS = 5

#: Default of --max-running-requests, as for NGRAM: verification is paid for every row, also where no draft came.
_MAX_RUNNING_REQUESTS = 48

#: Settings of SGLang that cannot work with the draft pool, and what to change.
_REFUSALS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda args: args.tp_size > 1,
        "specdec's draft pool runs on one rank: start SGLang with --tensor-parallel-size 1",
    ),
    (
        lambda args: args.pp_size > 1,
        "specdec's draft pool runs on one rank: start SGLang with --pipeline-parallel-size 1",
    ),
    (
        lambda args: args.disaggregation_mode != "null",
        "specdec's draft pool needs prefill and decode in one server: start SGLang without --disaggregation-mode",
    ),
    (
        lambda args: args.device != "cuda" or _sglang("utils").is_hip(),
        "SGLang takes the likeliest of the verified tokens except on NVIDIA GPUs: start SGLang with --device cuda",
    ),
    (
        lambda args: args.speculative_use_rejection_sampling,
        "draft tokens come without probabilities: start SGLang without --speculative-use-rejection-sampling",
    ),
    (
        lambda args: args.speculative_draft_model_path is not None,
        "the draft model runs in the draft service: start SGLang without --speculative-draft-model-path",
    ),
    (
        lambda args: args.speculative_ngram_external_corpus_path is not None,
        "draft tokens come from the draft service: start SGLang without --speculative-ngram-external-corpus-path",
    ),
    (
        lambda args: args.speculative_num_draft_tokens is not None and args.speculative_num_draft_tokens < 2,
        "the last token of a row is one of the verified tokens: --speculative-num-draft-tokens must be at least 2",
    ),
)

_log = logging.getLogger(__name__)


def register() -> None:
    """Make the algorithm known to SGLang. Idempotent."""
    spec_info = _sglang("speculative.spec_info")
    try:
        spec_info.SpeculativeAlgorithm.from_string(ALGORITHM)
    except ValueError:  # not known yet
        rules = _mixed("DraftPoolAlgorithm", DraftPoolRules, spec_info.CustomSpecAlgo)
        registered = spec_info.SpeculativeAlgorithm.register(
            ALGORITHM, supports_overlap=True, validate_server_args=refuse_unsuited, spec_class=rules
        )
        registered(_worker_class)


def refuse_unsuited(server_args: Any) -> None:
    """Check the settings of a server before it starts.

    Args:
        server_args: SGLang's `ServerArgs`, or its view of them.

    Raises:
        InvalidSetting: an environment variable is missing or wrong; the message names it.
        Unsupported: a setting of SGLang cannot work with the draft pool; the message names its flag.
    """
    for is_wrong, message in _REFUSALS:
        if is_wrong(server_args):
            raise Unsupported(message)
    read_settings()


class DraftPoolRules:
    """Answers SGLang's questions about the algorithm where the base class `CustomSpecAlgo` would answer otherwise."""

    def is_ngram(self) -> bool:
        """Return True: SGLang keeps KV, CUDA graphs and the relay of accepted tokens as for its n-gram worker."""
        return True

    def has_draft_kv(self) -> bool:
        """Return False: the draft model has its KV in the draft service."""
        return False

    def need_topk(self) -> bool:
        """Return False: no draft model runs in SGLang."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return False: no draft model runs in SGLang."""
        return False

    def create_future_map(self, *arguments: Any, **options: Any) -> Any:
        """Return the relay of accepted tokens from one step to the next, which is NGRAM's."""
        return _sglang("speculative.spec_info").SpeculativeAlgorithm.NGRAM.create_future_map(*arguments, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Set what NGRAM would set for a tree that is one chain."""
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS
        if server_args.speculative_num_draft_tokens is None:
            server_args.speculative_num_draft_tokens = _NUM_VERIFIED_TOKENS
        server_args.enable_mixed_chunk = False
        server_args.speculative_ngram_max_bfs_breadth = 1
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens


class DraftPoolDrafts:
    """The part of the worker that differs from SGLang's `NGRAMWorker`, which it is mixed into."""

    # Set by NGRAMWorker.
    draft_token_num: int
    enable_overlap: bool

    def __init__(self, **arguments: Any) -> None:
        """
        Args:
            arguments: those of `NGRAMWorker`, SGLang's `ServerArgs` as `server_args` among them.

        Raises:
            InvalidRequest: the tokenizer cannot be loaded.
            InvalidSetting: an environment variable is wrong, or a draft replica has another vocabulary.
            Unavailable: a draft replica cannot be reached.
        """
        settings = read_settings()
        super().__init__(**arguments)
        resolved = _sglang("arg_groups.overrides").resolving_view(arguments["server_args"])
        self._pool = open_draft_pool(settings, resolved.tokenizer_path or resolved.model_path)
        _log.info("drafts come from %s", ", ".join(settings.endpoints))

    def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that SGLang verifies, as `draft_chains` does. Called by `NGRAMWorker` before each step.

        Args:
            batch: SGLang's `ScheduleBatch`, in decode mode.
        """
        rows = self._rows(batch)
        drafts = self._pool.propose(dict(enumerate(rows)), self.draft_token_num - 1)
        return draft_chains([int(tokens[-1]) for tokens in rows], drafts, self.draft_token_num)

    def _update_ngram_corpus(self, batch: Any) -> None:
        """Do nothing: the corpus stays empty."""

    def _rows(self, batch: Any) -> list[TokenIds]:
        """Return the uint32 tokens of each request so far, those of the newest step included."""
        width, num_rows = self.draft_token_num, len(batch.reqs)
        newest = np.empty((num_rows, width), dtype=np.int64)
        num_newest = [0] * num_rows
        # With overlapped scheduling `output_ids` is one step behind, unless a grammar makes SGLang wait for the step.
        if self.enable_overlap and not batch.grammar_needs_sync():
            newest[:] = batch.spec_info.accept_tokens.cpu().numpy().reshape(num_rows, width)
            num_newest = batch.spec_info.accept_lens.tolist()
        return [
            # Of a request with images, these are the ids before SGLang puts hashes of images in their place.
            np.concatenate(
                [np.asarray(request.origin_input_ids_unpadded), request.output_ids, newest[row, :count]]
            ).astype(np.uint32)
            for row, (request, count) in enumerate(zip(batch.reqs, num_newest, strict=True))
        ]


def draft_chains(
    last_token_ids: Sequence[int], drafts: Mapping[int, Sequence[int]], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what SGLang verifies: a chain of `width` tokens for each row.

    A chain begins with the row's last token, and its draft tokens follow. SGLang verifies rows of equal width, so zeros
    fill a shorter chain. They are verified like draft tokens: one is accepted only where the model itself chooses
    token 0, so a row without drafts gets what it would get without speculation. They continue the chain, because
    several equal tokens at one place would be tried one after the other, and sampling would take them too often.

    Args:
        last_token_ids: last token of each row.
        drafts: draft tokens by row; rows may lack.
        width: number of tokens to verify in each row.

    Returns:
        int64 [rows * width]: tokens; int64 [rows * width * width]: 1 where a token, by row, attends to another.
    """
    token_ids = np.zeros((len(last_token_ids), width), dtype=np.int64)
    token_ids[:, 0] = last_token_ids
    for row, draft in drafts.items():
        draft = draft[: width - 1]
        token_ids[row, 1 : 1 + len(draft)] = draft
    return token_ids.ravel(), np.tile(np.tri(width, dtype=np.int64).ravel(), len(last_token_ids))


def _worker_class(_: Any) -> type:
    """Return the class of SGLang's worker with the draft pool. SGLang gives its `ServerArgs`."""
    return _mixed("DraftPoolWorker", DraftPoolDrafts, _sglang("speculative.ngram_worker").NGRAMWorker)


def _mixed(name: str, ours: type, theirs: type) -> type:
    """Return a class with our methods before SGLang's, which is known only once SGLang is imported."""
    return type(name, (ours, theirs), {"__module__": __name__})


def _sglang(module: str) -> Any:
    return importlib.import_module(f"sglang.srt.{module}")
