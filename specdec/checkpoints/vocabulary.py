"""Load a checkpoint's vocabulary and compute its fingerprint.

Replicas with equal fingerprints have the same vocabulary. The tokenizer is loaded without `AutoTokenizer`, which would
import torch. Called by the engine's worker, by the coordinator's tokenizer and by `specdec.checkpoints.preflight`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.checkpoints.locate import locate_checkpoint
from specdec.contract.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Settings of steps of a tokenizer that treat the beginning of a text differently, and their values within a text.
_WITHIN_A_TEXT = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
    "Strip": {"strip_left": False},
}


def vocabulary_fingerprint(token_to_id: Mapping[str, int]) -> str:
    """Return a hash of a vocabulary: 32 hex digits. Equal maps have equal hashes in any order of insertion."""
    digest = hashlib.blake2b(digest_size=16)
    for token_id, token in sorted((token_id, token) for token, token_id in token_to_id.items()):
        encoded = token.encode("utf-8", errors="surrogatepass")
        digest.update(token_id.to_bytes(4, "little") + len(encoded).to_bytes(4, "little") + encoded)
    return digest.hexdigest()


def vocabulary_size(token_to_id: Mapping[str, int]) -> int:
    """Return the largest token id plus one; some ids below it may be unused."""
    return max(token_to_id.values()) + 1


def load_vocabulary(model: str | Path) -> dict[str, int]:
    """Return a checkpoint's token-to-id map, including added tokens.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.

    Raises:
        InvalidRequest: see `load_tokenizer`.
    """
    return load_tokenizer(model).get_vocab()


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerFast:
    """Return a checkpoint's fast tokenizer without importing torch.

    Args:
        model: a checkpoint directory, a GGUF file or a hub id.

    Raises:
        InvalidRequest: the checkpoint does not exist, its `tokenizer.json` is missing or unreadable, or its vocabulary
            is empty.
    """
    directory = locate_checkpoint(model, small_files_only=True)
    if not (directory / "tokenizer.json").is_file():
        raise InvalidRequest(f"model {str(model)!r} has no tokenizer.json", field="model")
    # Imported here because it takes about a second, and importing this module must be fast.
    from transformers import PreTrainedTokenizerFast

    try:
        # Unlike tokenizers.Tokenizer, this class adds the special tokens that only tokenizer_config.json has.
        tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        num_tokens = len(tokenizer)
    # The Rust parser raises bare Exception, and its panics derive from BaseException only.
    except BaseException as error:
        if not is_tokenizer_fault(error):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidRequest(f"model {str(model)!r} has an unreadable tokenizer: {reason}", field="model") from error
    if not num_tokens:
        raise InvalidRequest(f"model {str(model)!r} has an empty vocabulary", field="model")
    if not tokenizer.chat_template:
        tokenizer.chat_template = _template_of_processor(str(model), directory)
    return tokenizer


def _template_of_processor(model: str, directory: Path) -> str | None:
    """Return the chat template of the file that models that read images had for it; None if there is none."""
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    try:
        template = json.loads(path.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        template = None
    if not isinstance(template, str):
        raise InvalidRequest(
            f"model {model!r} has an unreadable {path.name}: it must be a JSON object whose chat_template is a text",
            field="model",
        )
    return template


def continuing_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer for a text that continues another: it neither adds nor strips a space before the text."""
    backend = tokenizer.backend_tokenizer
    parts = {"normalizer": backend.normalizer, "pre_tokenizer": backend.pre_tokenizer}
    states = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
    within = {name: _within_a_text(state) for name, state in states.items()}
    if within == states:
        return tokenizer
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    changed = Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | within))
    return PreTrainedTokenizerFast(tokenizer_object=changed, split_special_tokens=tokenizer.split_special_tokens)


def _within_a_text(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer without its treatment of a text's beginning; None if nothing is left."""
    if part is None or part["type"] == "Prepend":
        return None
    inner = {
        name: [kept for each in part[name] if (kept := _within_a_text(each)) is not None]
        for name in ("normalizers", "pretokenizers")
        if name in part
    }
    return part | inner | _WITHIN_A_TEXT.get(part["type"], {})


def is_tokenizer_fault(error: BaseException) -> bool:
    """Return whether the tokenizer raised the exception, which is False for cancellation and KeyboardInterrupt."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"
