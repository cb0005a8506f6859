"""The files of a trained head: its tensors and its configuration, each taken by name and shape or refused in one line.

Not here: what the tensors mean (`medusa`, `eagle3`). A pickle is read by PyTorch's restricted reader alone, which
builds tensors and plain containers and refuses whatever else it names before anything of it runs. Called when a target
loads its local drafts.
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
from specdec.engine.heads.base import TargetParts
from specdec.errors import InvalidRequest, SpecdecError

FIELD = "local_draft"

_PICKLES = (".pt", ".bin", ".pth")
_HASHED_BYTES = 1 << 16


def refusal(message: str) -> InvalidRequest:
    """The one line in which a head is refused."""
    return InvalidRequest(message, field=FIELD)


class HeadFile:
    """What one head's file or directory holds. A tensor leaves it by `take`, which checks its shape."""

    def __init__(self, path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.path = path
        self.config = config
        """Of `config.json` beside the tensors; {} where there is none."""
        self.tensors = tensors

    @classmethod
    def read(cls, path: str) -> HeadFile:
        """Reads a file of tensors, or a directory or a hub id with them.

        Raises:
            InvalidRequest: nothing is there, or it is not weights.
        """
        place = Path(path).expanduser()
        if not place.is_file():
            try:
                place = locate_checkpoint(path)
            except SpecdecError as error:
                raise refusal(f"there are no heads at {path!r}: {error.message}") from error
        folder = place.parent if place.is_file() else place
        files = [place] if place.is_file() else _files_of(place)
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= _read_tensors(file)
        return cls(files[0] if len(files) == 1 else folder, _read_config(folder / "config.json"), tensors)

    def rename(self, rename: Callable[[str], str]) -> None:
        """Gives every tensor the name that `rename` makes of its own."""
        self.tensors = {rename(name): tensor for name, tensor in self.tensors.items()}

    def take(self, name: str, *shape: int | None) -> torch.Tensor:
        """The tensor of this name, as it is stored.

        Args:
            name: after `rename`.
            shape: what it must be; None: any size.

        Raises:
            InvalidRequest: there is none, or one of another shape; the line names file, tensor and shapes.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise refusal(f"{self.path} lacks the tensor {name}")
        if len(tensor.shape) != len(shape) or any(
            wanted not in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        ):
            wanted_shape = [size if size is not None else "any" for size in shape]
            raise refusal(
                f"{self.path}: the tensor {name} is {list(tensor.shape)}, and this target and configuration need "
                f"{str(wanted_shape).replace(chr(39), '')}"
            )
        return tensor

    def weight(self, target: TargetParts, name: str, *shape: int | None) -> torch.Tensor:
        """The same, as a weight to multiply with: finite, on the target's device and in its dtype.

        Raises:
            InvalidRequest: as `take`, or it is not of finite numbers.
        """
        tensor = self.take(name, *shape)
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise refusal(f"{self.path}: the tensor {name} is not of finite numbers")
        return tensor.to(device=target.device, dtype=target.dtype)

    def fingerprint(self) -> str:
        """Of names, shapes and samples of the numbers: 32 hex digits. Another training gives another."""
        digest = hashlib.blake2b(json.dumps(self.config, sort_keys=True, default=str).encode(), digest_size=16)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}:{list(tensor.shape)}:{tensor.dtype}".encode())
            flat = tensor.flatten()
            sampled = flat[:: max(1, flat.numel() // _HASHED_BYTES)].detach().contiguous()
            digest.update(sampled.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    """Where a directory keeps its tensors. Safetensors are preferred: many directories hold the same weights twice."""
    for pattern in ("*.safetensors", *(f"*{suffix}" for suffix in _PICKLES)):
        if files := sorted(path for path in folder.glob(pattern) if path.is_file()):
            return files
    raise refusal(f"{folder} holds no head: neither *.safetensors nor *.pt, *.bin or *.pth")


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix not in (".safetensors", *_PICKLES):
        raise refusal(f"{file} is neither *.safetensors nor *.pt, *.bin or *.pth")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise refusal(f"{file} is a pickle of something else than weights, and is not opened") from error
    except Exception as error:  # a damaged file makes its readers raise whatever they happen to
        raise refusal(f"{file} cannot be read as weights ({type(error).__name__})") from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise refusal(f"{file} holds something else than named tensors")
    for name, tensor in content.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or not _is_stored_whole(tensor):
            raise refusal(f"{file}: the tensor {name[:64]!r} is sparse, quantised or larger than what is stored of it")
    return content


def _is_stored_whole(tensor: torch.Tensor) -> bool:
    """Whether each number has a place of its own: a pickle of a few bytes may claim any shape."""
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
