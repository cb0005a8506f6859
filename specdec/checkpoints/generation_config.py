"""Read the sampling parameters that a model recommends, from its generation_config.json.

As in vLLM, six keys are read and every other key, `do_sample` included, is ignored. A value that no request could use
is left out with a warning, because the recommendation is advice and the model can be served without it. Called by the
coordinator at start.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.locate import locate_checkpoint

_log = logging.getLogger(__name__)

_FILE = "generation_config.json"

#: Limits of numbers, as of the fields of the public interface.
_MAX_COUNT, _MAX_NUMBER = 2**32 - 1, 3e38

#: Condition on the value of each key that is read. Source: vLLM, `ModelConfig.get_diff_sampling_param`.
_CONDITIONS: Mapping[str, tuple[type, Callable[[Any], bool]]] = {
    "repetition_penalty": (float, lambda value: 0 < value <= _MAX_NUMBER),
    "temperature": (float, lambda value: 0 <= value <= _MAX_NUMBER),
    "top_k": (int, lambda value: 0 <= value <= _MAX_COUNT),
    "top_p": (float, lambda value: 0 < value <= 1),
    "min_p": (float, lambda value: 0 <= value < 1),
    "max_new_tokens": (int, lambda value: 1 <= value <= _MAX_COUNT),
}


def recommended_sampling(model: str | Path) -> dict[str, float | int]:
    """Return the sampling parameters that a model recommends, by name; {} if it has no generation_config.json.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id, as for `load_tokenizer`.

    Raises:
        InvalidRequest: the checkpoint cannot be located.
    """
    path = locate_checkpoint(model, small_files_only=True) / _FILE
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("ignoring an unreadable generation_config.json: path=%s error=%s", path, error)
        return {}
    if not isinstance(config, dict):
        _log.warning("ignoring a generation_config.json that is not a JSON object: path=%s", path)
        return {}
    recommended: dict[str, float | int] = {}
    for key in _CONDITIONS:
        value = config.get(key)
        if value is None or (key == "top_k" and value == -1):  # -1 turns top-k off in vLLM
            continue
        if _is_usable(key, value):
            recommended[key] = value
        else:
            _log.warning("ignoring a value of generation_config.json: path=%s %s=%.64r", path, key, value)
    return recommended


def _is_usable(key: str, value: Any) -> bool:
    kind, condition = _CONDITIONS[key]
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return is_number and condition(value)
