"""The id-to-token map of a model: finding it, loading it, and the fingerprint by which services compare theirs.

Not here: encoding and decoding (`coordinator.tokenizer`). Loads `PreTrainedTokenizerFast`, never `AutoTokenizer`,
which would pull torch into the coordinator. Called by the engine's model adapter and by the coordinator's tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILE = "tokenizer.json"

#: Seconds to wait for the model hub before a name that is not cached is given up.
HUB_TIMEOUT_S = 10.0


def vocabulary_fingerprint(token_to_id: Mapping[str, int]) -> str:
    """Hashes the map so that two services can tell whether a token id means the same text to both.

    Args:
        token_to_id: every token, added and special ones included; the order does not matter.

    Returns:
        32 lower-case hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for token_id, token in sorted((token_id, token) for token, token_id in token_to_id.items()):
        text = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def vocabulary_size(token_to_id: Mapping[str, int]) -> int:
    """Rows of the id-to-token map: the highest id plus one, so that every id below it may index a logit row."""
    return max(token_to_id.values(), default=-1) + 1


def load_vocabulary(model: str | Path) -> dict[str, int]:
    """Loads a model's token-to-id map, added tokens included.

    Raises:
        InvalidRequest: `model` is neither a directory with a tokenizer nor a model the hub or its cache has.
    """
    return load_tokenizer(model).get_vocab()  # type: ignore[no-any-return]


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerFast:
    """Loads a model's fast tokenizer from a directory, the hub's cache or the hub.

    Raises:
        InvalidRequest: one sentence that names `model` and what is missing.
    """
    name = str(model)
    if not name.strip():
        raise InvalidRequest("the model's name is empty")
    if Path(name).is_dir():
        if not (Path(name) / TOKENIZER_FILE).is_file():
            raise InvalidRequest(f"model directory {name!r} has no {TOKENIZER_FILE}")
        return _from_pretrained(name, local_files_only=True)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidRequest(f"model path {name!r} is not a directory")
    return _from_hub(name)


def _from_hub(name: str) -> PreTrainedTokenizerFast:
    # The cache comes first and one probe comes before the rest: transformers asks for each of ten files with retries
    # of its own, which turns a misspelt name on a machine without network into minutes of silence.
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, TOKENIZER_FILE), str):
            return _from_pretrained(name, local_files_only=True)
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except HFValidationError as error:
        raise InvalidRequest(f"{name!r} is neither a model directory nor a model hub id") from error
    except InvalidRequest:
        raise
    except Exception as error:  # the hub client lets its HTTP library's own errors through
        raise InvalidRequest(
            f"model {name!r} is not a directory, not in the hub's cache and not on the hub ({type(error).__name__})"
        ) from error
    return _from_pretrained(name, local_files_only=False)


def _from_pretrained(name: str, *, local_files_only: bool) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(name, local_files_only=local_files_only)
    except Exception as error:  # the tokenizers library raises bare Exception for a file it cannot read
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidRequest(f"the tokenizer of model {name!r} cannot be loaded: {reason}") from error
