"""Read a checkpoint's generation_config.json: the sampling parameters that it recommends, and its end tokens.

As in vLLM, six sampling keys are read and every other key, `do_sample` included, is ignored. A sampling value that no
request could use is left out with a warning, because the recommendation is advice and the model can be served without
it. Called by the coordinator at start (sampling) and by everything that describes a model to it (end tokens).
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.locate import locate_checkpoint
from specdec.contract.errors import InvalidRequest
from specdec.contract.number_range import NumberRange
from specdec.contract.types import FILTER_RANGES, RECOMMENDED_FILTERS

_log = logging.getLogger(__name__)

_FILE = "generation_config.json"

#: Limits of numbers, as of the fields of the public interface.
_MAX_COUNT, _MAX_NUMBER = 2**32 - 1, 3e38

#: Range of each key that is read. Source: vLLM, `ModelConfig.get_diff_sampling_param`.
_RANGES: Mapping[str, NumberRange] = {
    **{key: FILTER_RANGES[key] for key in RECOMMENDED_FILTERS},
    "max_new_tokens": NumberRange(0, least=1),
}


def recommended_sampling(model: str | Path) -> dict[str, float | int]:
    """Return the sampling parameters that a model recommends, by name; {} if it has no generation_config.json.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id, as for `load_tokenizer`.

    Raises:
        InvalidRequest: the checkpoint cannot be located.
    """
    directory = locate_checkpoint(model, small_files_only=True)
    config = _read(directory)
    recommended: dict[str, float | int] = {}
    for key in _RANGES:
        value = config.get(key)
        if value is None or (key == "top_k" and value == -1):  # -1 turns top-k off in vLLM
            continue
        if (usable := _usable(key, value)) is not None:
            recommended[key] = usable
        else:
            _log.warning("ignoring a value of generation_config.json: path=%s %s=%.64r", directory / _FILE, key, value)
    return recommended


def end_token_ids(directory: Path, vocabulary_size: int, default: object) -> tuple[int, ...]:
    """Return the ids of the tokens that end an output, each once.

    As in `generate()`, an id that the vocabulary does not have ends nothing: checkpoints that were cut from larger ones
    keep such ids. Ids outside the vocabulary are left out with a warning, because requests and replies must not name
    them.

    Args:
        directory: the checkpoint's.
        vocabulary_size: number of token ids.
        default: `eos_token_id` of the model's configuration, which holds if generation_config.json has none.

    Raises:
        InvalidRequest: the end token is not a number, such as a token's text.
    """
    named = _read(directory).get("eos_token_id")
    file, value = (_FILE, named) if named is not None else ("config.json", default)
    ids: dict[int, None] = {}
    for token_id in value if isinstance(value, list | tuple) else (value,):
        if token_id is None:
            continue
        if not isinstance(token_id, int | float) or isinstance(token_id, bool) or token_id % 1:
            raise InvalidRequest(
                f"{directory / file}: eos_token_id must be a token id or a list of ids, got {str(token_id)[:64]!r}; "
                "write the id of the end token",
                field="model",
            )
        if 0 <= token_id < vocabulary_size:
            ids[int(token_id)] = None
        else:
            _log.warning("ignoring an end token that the vocabulary of %d tokens does not have: path=%s id=%d",
                         vocabulary_size, directory / file, token_id)  # fmt: skip
    return tuple(ids)


def _read(directory: Path) -> dict[str, Any]:
    """Return a checkpoint's generation_config.json; {} if it has none or an unreadable one."""
    path = directory / _FILE
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
    return config


def _usable(key: str, value: Any) -> float | int | None:
    """Return a value as requests carry it, in 32 bits; None if no request could use it."""
    range_ = _RANGES[key]
    most = _MAX_COUNT if isinstance(range_.default, int) else _MAX_NUMBER
    if not isinstance(value, int | float) or isinstance(value, bool) or value > most or not range_.holds(value):
        return None
    if isinstance(range_.default, int):
        return int(value) if value % 1 == 0 else None
    (carried,) = struct.unpack("f", struct.pack("f", value))
    return value if range_.holds(carried) and (carried or not value) else None
