"""The id-to-token map of a checkpoint and its fingerprint, by which two replicas know they speak the same tokens.

Not a tokenizer: it encodes nothing. It never goes through `AutoTokenizer`, which imports torch. Called by the engine's
worker, by the coordinator's tokenizer and by `specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.checkpoints.locate import locate_checkpoint
from specdec.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def vocabulary_fingerprint(token_to_id: Mapping[str, int]) -> str:
    """Hash of a vocabulary: 32 hex digits, equal exactly when the maps are equal, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for token_id, token in sorted((token_id, token) for token, token_id in token_to_id.items()):
        encoded = token.encode("utf-8", errors="surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def vocabulary_size(token_to_id: Mapping[str, int]) -> int:
    """Rows of the id-to-token map: its largest id plus one (ids may have holes)."""
    return max(token_to_id.values()) + 1


def load_vocabulary(model: str | Path) -> dict[str, int]:
    """Reads a checkpoint's token-to-id map, added tokens included.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.

    Raises:
        InvalidRequest: as `load_tokenizer`.
    """
    return load_tokenizer(model).get_vocab()


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerFast:
    """Reads a checkpoint's fast tokenizer, without torch.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.

    Raises:
        InvalidRequest: there is no such checkpoint, or it holds no readable `tokenizer.json`, or that one is empty.
    """
    directory = locate_checkpoint(model, small_files_only=True)
    if not (directory / "tokenizer.json").is_file():
        raise InvalidRequest(f"model {str(model)!r} has no tokenizer.json", field="model")
    # Imported late: it takes about a second, which importing this module must not.
    from transformers import PreTrainedTokenizerFast

    try:
        # Not tokenizers.Tokenizer: tokenizer_config.json may add special tokens that tokenizer.json lacks.
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        vocabulary = tokenizer.get_vocab()
    # The Rust parser raises bare Exception, and its panics are not even that.
    except BaseException as error:
        if not is_tokenizer_fault(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequest(f"model {str(model)!r} has an unreadable tokenizer: {reason}", field="model") from error
    if not vocabulary:
        raise InvalidRequest(f"model {str(model)!r} has an empty vocabulary", field="model")
    return tokenizer


def is_tokenizer_fault(error: BaseException) -> bool:
    """Whether an exception is the tokenizer's own, rather than the end of the process or of the task."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
