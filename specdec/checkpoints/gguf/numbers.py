"""Read the numbers of a GGUF file's model, and refuse those that nothing has used.

Called by `specdec.checkpoints.gguf.architectures` and `specdec.checkpoints.gguf.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from specdec.checkpoints.counts import MOST, require_count
from specdec.checkpoints.gguf.file import GgufFile
from specdec.contract.errors import InvalidRequest, Unsupported

#: Values that change nothing in a model that does not have the number.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # 1: softmax, which all types here use
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "n_deepstack_layers": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0, 1),
    "tensor_data_layout": ("Meta AI original pth",),
}


class ModelNumbers:
    """Numbers under the keys of a file's architecture. Keys are named without that prefix here."""

    def __init__(self, file: GgufFile, model_type: str) -> None:
        self._model, self._architecture, self._model_type = str(file.path), file.architecture, model_type
        prefix = f"{self._architecture}."
        self._left = {
            key.removeprefix(prefix): _shortest(value) for key, value in file.metadata.items() if key.startswith(prefix)
        }

    def __contains__(self, key: str) -> bool:
        """Return whether the file states a number that nothing has used."""
        return key in self._left

    def take(self, key: str, default: Any = None) -> Any:
        """Return a value and count it as used."""
        return self._left.pop(key, default)

    def put(self, key: str, value: Any) -> None:
        """State a value in the place of the file's."""
        self._left[key] = value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number.

        Raises:
            InvalidRequest: the key is absent without a default, or its value is not a finite number.
        """
        value = self.take(key, default)
        if value is None:
            self._lacks(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InvalidRequest(
                f"model {self._model!r} has {self._architecture}.{key} {value!r:.80}, which must be a finite number: "
                "it is damaged or was written wrongly, so convert or download it again",
                field="model",
            )
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return a size.

        Raises:
            InvalidRequest: the key is absent without a default, or its value is not a size.
            Unsupported: the value is a list of sizes that differ from layer to layer.
        """
        value = self.take(key, default)
        if value is None:
            self._lacks(key)
        if isinstance(value, list) and value:
            if any(number != value[0] for number in value):
                self.refuse(key, value, "one for each layer")
            value = value[0]
        return require_count(self._model, f"{self._architecture}.{key}", value, least=least, most=most)

    def require(self, key: str, value: object) -> None:
        """Refuse another value than the one that the model has anyway. Raises Unsupported."""
        stated = self.take(key, value)
        if stated != value:
            self.refuse(key, stated)

    def require_none_left(self) -> None:
        """Refuse a number that nothing has used, unless its value changes nothing. Raises Unsupported."""
        for key, value in self._left.items():
            if value not in _NEUTRAL.get(key, ()):
                self.refuse(key, value)

    def refuse(self, key: str, value: object, reason: str = "") -> NoReturn:
        """Raise Unsupported with the key, its value and a reason, which is the type of the model by default."""
        reason = reason or f"for a model of type {self._model_type}"
        kind = "RoPE scaling" if key.startswith("rope.scal") else "number"
        raise Unsupported(
            f"model {self._model!r} uses an unsupported {kind}: {self._architecture}.{key} = {str(value)[:64]}, "
            f"{reason}; serve it with --backend llama-cpp",
            field="model",
        )

    def _lacks(self, key: str) -> NoReturn:
        raise InvalidRequest(
            f"model {self._model!r} lacks the key {self._architecture}.{key}, which every file of its architecture "
            "has: convert or download it again",
            field="model",
        )


def _shortest(value: Any) -> Any:
    """Return the shortest decimal number with the 32 bits of a float, which is the one that was stored."""
    if isinstance(value, list):
        return [_shortest(number) for number in value]
    if not isinstance(value, float) or not math.isfinite(value) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))
