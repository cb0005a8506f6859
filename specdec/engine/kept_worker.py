"""Workers of packed models that an earlier start kept, for starts without transformers and without packing again.

A model that native kernels run whole, without local drafts, is kept once it has passed the self-check, with the logits
that the checkpoint's own forward pass gave. A later start reads it and compares its worker with these logits again. The
file's name says what it depends on: the checkpoint's files, the kernels, and how weights are rounded and packed.
Called by `specdec.service.replica_main`; `engine.loader` keeps models.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from specdec.checkpoints.gguf.file import GgufFile
from specdec.checkpoints.gguf.weights import weights_of
from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.packed_names import packed_name
from specdec.contract.errors import Unsupported
from specdec.contract.types import BLOCK_TOKENS
from specdec.engine.base import KvLayout, ModelShape, Worker
from specdec.engine.kernels.library import load_library
from specdec.engine.model.batch_invariance import require_batch_invariance
from specdec.engine.model.kv_cache import KvCache, LayerShape, block_bytes, pool_sizes
from specdec.engine.model.self_check import Reference, require_same
from specdec.engine.native.file_layout import FileLayout, FromFile, LlamaNumbers
from specdec.engine.native.kept_layout import KeptLayout, Unreadable, keep, open_kept
from specdec.engine.native.native_runner import NativeRunner
from specdec.engine.native.packing import PackedModel
from specdec.engine.options import AUTO, NATIVE, LoadRequest
from specdec.settings.devices import likely_device

_log = logging.getLogger(__name__)

_KEPT_DTYPES = ("auto", "float32", "int8")
#: Time between two lines that tell how much of a model has been written.
_LINE_S = 5.0


def load_kept_worker(request: LoadRequest, *, with_weights: bool = False) -> Worker | None:
    """Load a model that was kept, or return None if it has to be loaded from its checkpoint.

    Args:
        request: what to load.
        with_weights: return None also if the weights would be packed from another file.

    Raises:
        InvalidRequest: the KV pool has no room for one block, or the model does not exist.
        Unsupported: the worker does not keep the promise of `--deterministic`.
    """
    if not _may_be_kept(request):
        return None
    directory = locate_checkpoint(request.model)
    try:
        library = load_library(request.compiling.directory)
        path = _path(request, directory, library)
        if path is None:
            return None
        kept = open_kept(path)
        if with_weights and not kept.has_weights:
            return None
    except (Unsupported, Unreadable):
        return None
    if request.num_threads is not None:
        torch.set_num_threads(request.num_threads)
    try:
        worker = _load(kept, request, library)
    except (Unreadable, Unsupported) as error:
        _log.warning("loading the checkpoint, because its packed weights cannot be used: %s: %s", path, error)
        return None
    if worker is not None and request.compiling.is_deterministic:
        require_batch_invariance(worker)
    return worker


def keep_worker(
    worker: NativeRunner,
    request: LoadRequest,
    directory: Path,
    library: ctypes.CDLL,
    reference: Reference,
    *,
    architecture: str,
    context: int,
    from_file: FromFile | None = None,
) -> None:
    """Keep the model of a worker that passed the self-check, if it can be kept; a full disk is only reported.

    Args:
        worker: a worker of `request`.
        request: what was loaded.
        directory: the checkpoint's.
        library: the worker's kernels.
        reference: what the worker was compared with.
        architecture: type of the model.
        context: most tokens that the model supports, whatever was requested.
        from_file: what is kept instead of the packed weights of a GGUF file, which are packed again at each start.
    """
    path = _path(request, directory, library) if _may_be_kept(request) else None
    if path is None:
        return
    shape = worker.shape
    facts = {
        "architecture": architecture,
        "context": context,
        "positions": shape.max_context_tokens,
        "layers": [(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in worker.layer_shapes],
        "sequences": reference.sequences,
        "spread": reference.spread,
        "noise": reference.noise,
        "vocabulary_size": shape.vocabulary_size,
        "eos_token_ids": shape.eos_token_ids,
        "model_fingerprint": shape.model_fingerprint,
        "vocabulary_fingerprint": shape.vocabulary_fingerprint,
        "dtype": shape.dtype,
    }
    arrays, packed = list(reference.logits), worker.packed if from_file is None else None
    if from_file is not None:
        facts["numbers"] = asdict(from_file.numbers)
        arrays += from_file.rotary
    began_s = time.monotonic()
    try:
        keep(path, packed, facts, [rows.numpy() for rows in arrays], _Progress().note)
    except OSError as error:
        _log.warning("packed weights are not kept, so later starts pack them again: %s: %s", path, error)
        return
    _log.info("kept packed weights in %.1f s: %s", time.monotonic() - began_s, path)


def _may_be_kept(request: LoadRequest) -> bool:
    options = request.compiling
    return (
        request.kept_in is not None
        and not request.local_drafts
        and request.dtype in _KEPT_DTYPES
        and options.backend in (AUTO, NATIVE)
        and options.capture is None
        and likely_device(request.device) == "cpu"
    )


def _path(request: LoadRequest, directory: Path, library: ctypes.CDLL) -> Path | None:
    """Return the file of a model; None if the kernels' own file is gone, which tells them from others."""
    try:
        kernels = Path(library._name).read_bytes()
    except OSError:
        return None
    assert request.kept_in is not None  # otherwise nothing is kept
    return request.kept_in / packed_name(directory, request.dtype, kernels)


def _load(kept: KeptLayout, request: LoadRequest, library: ctypes.CDLL) -> Worker | None:
    """Return the worker, or None if it would have other limits than the file allows.

    Raises:
        Unreadable: the file is damaged.
        Unsupported: the worker's logits are not those that were kept.
    """
    began_s = time.monotonic()
    facts = kept.facts
    layers = [LayerShape(*sizes) for sizes in facts["layers"]]
    context = min(facts["context"], request.max_context_tokens or facts["context"])
    one_block = block_bytes(layers, torch.float32)
    num_blocks, _ = pool_sizes(one_block, 0, context, request.kv_cache_bytes, request.num_kv_blocks)
    context = min(context, num_blocks * BLOCK_TOKENS)
    lengths = list(map(len, facts["sequences"]))
    blocks_of_check = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    if not max(lengths) <= context <= facts["positions"] or num_blocks < blocks_of_check:
        return None
    cache = KvCache(layers, num_blocks=num_blocks, dtype=torch.float32, device=torch.device("cpu"))
    caches = [layer.rows.data_ptr() for layer in cache.layers]
    if kept.has_weights:
        packed = kept.load(library, caches, request.note_loaded)
    else:
        packed = _from_file(kept, request, library, caches)
    layout = KvLayout("float32", tuple(block_bytes([layer], torch.float32) for layer in layers))
    shape = ModelShape(
        vocabulary_size=facts["vocabulary_size"],
        max_context_tokens=context,
        eos_token_ids=tuple(facts["eos_token_ids"]),
        model_fingerprint=facts["model_fingerprint"],
        vocabulary_fingerprint=facts["vocabulary_fingerprint"],
        num_kv_blocks=num_blocks,
        dtype=facts["dtype"],
        device="cpu",
        kv_layout=layout,
    )
    worker = NativeRunner(library, packed, cache, shape)
    _log.info("read packed weights in %.1f s", time.monotonic() - began_s)
    if request.self_check:
        began_s = time.monotonic()
        require_same(worker, _reference(kept), facts["architecture"])
        _log.info("self-check passed in %.1f s", time.monotonic() - began_s)
    return worker


def _from_file(kept: KeptLayout, request: LoadRequest, library: ctypes.CDLL, caches: Sequence[int]) -> PackedModel:
    """Pack the weights of a GGUF file. Raises Unreadable."""
    file = GgufFile(Path(request.model).expanduser())
    config = json.loads((locate_checkpoint(request.model) / "config.json").read_bytes())
    numbers, weights = LlamaNumbers(**kept.facts["numbers"]), weights_of(file, config)
    if (len(numbers.windows), numbers.hidden) != (config["num_hidden_layers"], config["hidden_size"]):
        raise Unreadable("it is of another model")
    cosines, sines = map(torch.from_numpy, kept.arrays()[-2:])
    layout = FileLayout(library, weights, FromFile(numbers, (cosines, sines)), caches)
    file.release()
    return layout.packed


def _reference(kept: KeptLayout) -> Reference:
    """Return what the checkpoint's own forward pass gave. Raises Unreadable."""
    facts = kept.facts
    return Reference(
        tuple(map(tuple, facts["sequences"])),
        tuple(map(torch.from_numpy, kept.arrays()[: len(facts["sequences"])])),
        facts["spread"],
        facts["noise"],
    )


class _Progress:
    """Log lines that tell how much of a file has been written."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()

    def note(self, share: float) -> None:
        """Tell that this share is written, 0..1, if a line is due."""
        if time.monotonic() > self._told_s + _LINE_S:
            self._told_s = time.monotonic()
            _log.info("keeping packed weights for later starts: %.0f %%", share * 100, extra={"progress": "keeping"})
