"""Read the header of a GGUF file: its metadata and the shapes of its tensors. Reads no weights.

Needs no package, because a header of 256k tokens is walked in 0.1 s. `specdec.checkpoints.weight_files` checks by it
that a file is complete, and `specdec.checkpoints.model_size` sizes a model that is not converted.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from specdec.checkpoints.counts import MOST, MOST_LAYERS, is_count, require_count
from specdec.contract.errors import InvalidRequest, Unsupported

#: Format of a number in GGUF's metadata, by type number. Type 8 is a string, type 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Longest string and array of numbers that are kept; a vocabulary is longer.
_MOST_KEPT = 1024
#: Number of weights and of bytes in a block, by ggml's type number. A tensor of any other type counts as one byte.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
}  # fmt: skip
_MOST_DIMENSIONS = 8
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class DamagedHeader(Exception):
    """A file contradicts its header; the message says how."""


@dataclass(slots=True)
class GgufHeader:
    """Metadata of one file, and the sizes that follow from its tensors."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """Numbers, strings and short arrays of numbers by their keys."""
    num_weights: int = 0
    """Number of weights in the tensors of this file."""
    least_bytes: int = 0
    """Least size of the file in bytes; 0 for an unknown version of the format."""

    def of_model(self, key: str) -> Any:
        """Return the value of a key of the file's architecture; None without it."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")


def read_gguf_header(path: Path) -> GgufHeader:
    """Return the header of a file.

    Raises:
        DamagedHeader, OSError, ValueError: it is cut off or unreadable.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        try:
            return _read(held)
        except (struct.error, OverflowError):  # a length points past the end of the file
            raise DamagedHeader("it ends within its header") from None


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the sizes of a GGUF file's model under the names that config.json has, and `num_weights` and `num_parts`.

    Of a file in parts, all parts are read.

    Raises:
        InvalidRequest: a part is missing, a header is unreadable or states an impossible size, or the file holds no
            language model or no weights.
        Unsupported: the model is an encoder, or the version of the format is unknown.
    """
    model, headers = str(path), [_checked_header(part) for part in _parts_of(path)]
    first, kind = headers[0], headers[0].metadata.get("general.architecture", "none")
    if not first.least_bytes:
        raise Unsupported(f"model {model!r} is in a version of the GGUF format that is neither 2 nor 3")
    if first.of_model("block_count") is None or first.of_model("embedding_length") is None:
        raise InvalidRequest(
            f"model {model!r} holds no language model: its header has no {kind}.block_count and "
            f"{kind}.embedding_length",
            field="model",
        )
    if first.of_model("attention.causal") is False:
        raise Unsupported(f"model {model!r} is an encoder and not a decoder-only language model")
    for header in headers:
        _require_num_parts(model, header, len(headers))

    def count(key: str, *, least: int = 1, most: int = MOST) -> int:
        return require_count(model, f"{kind}.{key}", first.of_model(key), least=least, most=most)

    num_layers, heads = count("block_count", most=MOST_LAYERS), count("attention.head_count")
    num_mtp_layers = count("nextn_predict_layers", least=0, most=num_layers - 1)
    config = {
        "num_hidden_layers": num_layers - num_mtp_layers,
        "hidden_size": count("embedding_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv") or heads,
        "head_dim": count("attention.key_length") or None,
        "kv_lora_rank": count("attention.kv_lora_rank", least=0) or None,
        "num_nextn_predict_layers": num_mtp_layers,
        "num_parts": len(headers),
        "num_weights": sum(header.num_weights for header in headers),
    }
    if not config["num_weights"]:
        raise InvalidRequest(f"model {model!r} holds no weights: its header lists no tensor", field="model")
    return config


def _require_num_parts(model: str, header: GgufHeader, num_parts: int) -> None:
    """Check that a header states the number of files that the model has by its name; that of a joined file states 0."""
    stated = header.metadata.get("split.count", num_parts)
    if not (is_count(stated, num_parts, num_parts) or (num_parts == 1 and is_count(stated, 0, 1))):
        raise InvalidRequest(
            f"model {model!r} has split.count {stated!r:.80}, and by its name {num_parts} parts: name every part as in "
            "model-00001-of-00002.gguf, or join them with llama-gguf-split --merge",
            field="model",
        )


def _parts_of(path: Path) -> list[Path]:
    """Return the files of a model in parts, the first part first; the file itself if it is whole."""
    found = _PART.fullmatch(path.name)
    if found is None or not path.is_file():
        return [path]
    stem, _, count = found.groups()
    parts = [path.with_name(f"{stem}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise InvalidRequest(f"model {str(path)!r} has {int(count)} parts, and {part.name} is missing",
                                 field="model")  # fmt: skip
    return parts


def _checked_header(path: Path) -> GgufHeader:
    try:
        return read_gguf_header(path)
    except (DamagedHeader, OSError, ValueError) as error:
        raise InvalidRequest(f"model {str(path)!r} is damaged: {error}", field="model") from error


def _read(held: mmap.mmap) -> GgufHeader:
    header = GgufHeader()
    version, num_tensors, num_entries = struct.unpack_from("<IQQ", held, 4)
    if version not in (2, 3):
        return header
    at = 24
    for _ in range(num_entries):
        key, at = _string(held, at)
        (kind,) = struct.unpack_from("<I", held, at)
        value, at = _value(held, at + 4, kind)
        header.metadata[key] = value
    alignment = header.metadata.get("general.alignment", 32)
    if not is_count(alignment, 1, MOST):
        raise DamagedHeader(
            f"its general.alignment is {alignment!r:.80}, which must be a whole number from 1 to {MOST}"
        )
    ends = [0]
    for _ in range(num_tensors):
        _, at = _string(held, at)
        num_weights, end, at = _tensor(held, at)
        header.num_weights += num_weights
        ends.append(end)
    header.least_bytes = -(-at // alignment) * alignment + max(ends)
    return header


def _string(held: mmap.mmap, at: int) -> tuple[str, int]:
    """Return the beginning of a string and the offset of its end."""
    (length,) = struct.unpack_from("<Q", held, at)
    kept = held[at + 8 : at + 8 + min(length, _MOST_KEPT)]
    return kept.decode("utf-8", errors="replace"), at + 8 + length


def _value(held: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    """Return a value, None for one that is not kept, and the offset of its end."""
    if kind in _SCALARS:
        number = struct.Struct(f"<{_SCALARS[kind]}")
        return number.unpack_from(held, at)[0], at + number.size
    if kind == _STRING:
        return _string(held, at)
    if kind != _ARRAY:
        raise DamagedHeader("its header is unreadable")
    of, count = struct.unpack_from("<IQ", held, at)
    at += 12
    if of in _SCALARS:
        end = at + count * struct.calcsize(f"<{_SCALARS[of]}")
        return struct.unpack_from(f"<{count}{_SCALARS[of]}", held, at) if count <= _MOST_KEPT else None, end
    if of != _STRING:
        raise DamagedHeader("its header is unreadable")
    length_at = struct.Struct("<Q").unpack_from
    for _ in range(count):  # 256k tokens take 0.1 s
        at += 8 + length_at(held, at)[0]
    return None, int(at)


def _tensor(held: mmap.mmap, at: int) -> tuple[int, int, int]:
    """Return the number of a tensor's weights, their end relative to the start of all weights, and its entry's end."""
    (num_dimensions,) = struct.unpack_from("<I", held, at)
    if num_dimensions > _MOST_DIMENSIONS:
        raise DamagedHeader("its header is unreadable")
    *sizes, kind, offset = struct.unpack_from(f"<{num_dimensions}QIQ", held, at + 4)
    num_weights = prod(sizes)
    weights_in_block, block_bytes = _BLOCKS.get(kind, (max(1, num_weights), 1))
    return num_weights, offset + -(-num_weights // weights_in_block) * block_bytes, at + 4 + 8 * num_dimensions + 12
