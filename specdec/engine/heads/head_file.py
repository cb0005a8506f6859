"""Read the files of a trained head: tensors, which are taken by name and checked shape, and configuration.

A pickle is read only by PyTorch's restricted reader, which builds tensors and plain containers and refuses everything
else before any of it runs. Called when a target loads its local drafts; `medusa` and `eagle3` take the tensors.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec.checkpoints.locate import locate_checkpoint
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.engine.heads.interface import TargetParts

FIELD = "local_draft"

_PICKLES = (".pt", ".bin", ".pth")
_HASHED_BYTES = 1 << 16


def refusal(message: str) -> InvalidRequest:
    """Return the error of a head that is refused; its message is one line."""
    return InvalidRequest(message, field=FIELD)


class HeadFile:
    """Content of one head's file or directory. Read tensors by `take`, which checks their shape."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.path = path
        self.config = config
        """Content of `config.json` beside the tensors; {} if there is none."""
        self.tensors = tensors

    @classmethod
    def read(cls, path: str) -> HeadFile:
        """Read a file of tensors, a directory or a hub id.

        Raises:
            InvalidRequest: nothing is there, or the files do not hold weights.
        """
        place = Path(path).expanduser()
        if not place.is_file():
            try:
                place = locate_checkpoint(path)
            except SpecdecError as error:
                raise refusal(f"no draft head found at {path!r}: {error.message}") from error
        folder = place.parent if place.is_file() else place
        files = [place] if place.is_file() else _files_of(place)
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= _read_tensors(file)
        return cls(files[0] if len(files) == 1 else folder, _read_config(folder / "config.json"), tensors)

    def rename(self, rename: Callable[[str], str]) -> None:
        """Rename every tensor."""
        self.tensors = {rename(name): tensor for name, tensor in self.tensors.items()}

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """Return a tensor as it is stored.

        Args:
            name: name after `rename`.
            shape: required sizes; None for any size.

        Raises:
            InvalidRequest: the tensor is missing or has another shape; the message names file, tensor and shapes.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise refusal(f"{self.path} lacks the tensor {name}")
        if len(tensor.shape) != len(shape) or any(
            wanted not in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        ):
            wanted_shape = [size if size is not None else "any" for size in shape]
            raise refusal(
                f"{self.path}: the tensor {name} has shape {list(tensor.shape)}, and this target and configuration "
                f"need {str(wanted_shape).replace(chr(39), '')}"
            )
        return tensor

    def weight(self, target: TargetParts, name: str, *shape: int | None) -> torch.Tensor:
        """Return a tensor as a weight: checked to be finite, on the target's device and in its dtype.

        Raises:
            InvalidRequest: as `take`, or a number is not finite.
        """
        tensor = self.take(name, *shape)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise refusal(f"{self.path}: the tensor {name} holds numbers that are not finite, or integers")
        return tensor.to(device=target.device, dtype=target.dtype)

    def fingerprint(self) -> str:
        """Return a hash of names, shapes and samples of the numbers: 32 hex digits, different for each training."""
        digest = hashlib.blake2b(json.dumps(self.config, sort_keys=True, default=str).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}:{list(tensor.shape)}:{tensor.dtype}".encode())
            flat = tensor.flatten()
            sampled = flat[:: max(1, flat.numel() // _HASHED_BYTES)].detach().contiguous()
            digest.update(sampled.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    """Return a directory's weight files. Safetensors are preferred: many directories hold the same weights twice."""
    for pattern in ("*.safetensors", *(f"*{suffix}" for suffix in _PICKLES)):
        if files := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return files
    raise refusal(f"{folder} has no weight files: neither *.safetensors nor *.pt, *.bin or *.pth")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix not in (".safetensors", *_PICKLES):
        raise refusal(f"{file} is neither *.safetensors nor *.pt, *.bin or *.pth")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(f"{file} is a pickle with other content than weights, and was not loaded") from error
    except Exception as error:  # a damaged file may make its reader raise any error
        raise refusal(f"{file} cannot be read as weights ({type(error).__name__})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise refusal(f"{file} does not hold named tensors")
    for name, tensor in content.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not _is_stored_whole(tensor):
            raise refusal(f"{file}: the tensor {name[:64]!r} is sparse, quantised or larger than its stored data")
    return content


def _is_stored_whole(tensor: torch.Tensor) -> bool:
    """Return whether every number is stored: a pickle of a few bytes may claim any shape."""
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise refusal(f"{file} cannot be read ({type(error).__name__})") from error
    if not isinstance(config, dict):
        raise refusal(f"{file} is not a JSON object")
    return config
