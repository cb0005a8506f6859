"""Check from small files alone that a draft and a target can be served as a pair, before anything is loaded.

Reads configurations and tokenizers and imports no torch. Called by `specdec up`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import naming_flag, require_servable
from specdec.checkpoints.vocabulary import load_tokenizer, vocabulary_fingerprint
from specdec.errors import Unsupported, VocabularyMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Files that say what kind of tokens a checkpoint speaks; where they are the same bytes, so is the vocabulary.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")


def require_servable_pair(models: Mapping[str, str]) -> str:
    """Looks at a target, and at a draft that is to speak the same tokens or to have some in common.

    Args:
        models: by the flags that they were given by, the target first; one alone is looked at, too.

    Returns:
        What a draft with another tokenizer has in common with its target, in words; "" for one with the same.

    Raises:
        InvalidRequest, Unsupported: as `require_servable`, or a tokenizer is unreadable.
        VocabularyMismatch: nothing is in common; the message holds both fingerprints.
    """
    for flag, model in models.items():
        require_servable(model, flag=flag)
    seen: dict[tuple[bytes, ...], PreTrainedTokenizerFast] = {}
    described: list[tuple[str, int]] = []
    for flag, model in models.items():
        with naming_flag(flag):
            files = _vocabulary_files(locate_checkpoint(model, small_files_only=True))
            if files not in seen:
                seen[files] = load_tokenizer(model)
            vocabulary = seen[files].get_vocab()
            described.append((vocabulary_fingerprint(vocabulary), len(vocabulary)))
    if len(set(described)) <= 1:
        return ""
    from specdec.cross_vocabulary.pair import make_pair  # late: it imports transformers, which takes a second

    target, draft = zip(models.values(), seen.values(), strict=True)
    try:
        return make_pair(draft, target).told
    except (Unsupported, VocabularyMismatch) as error:
        told = " and ".join(
            f"{flag} {model!r} has {size} tokens, fingerprint {fingerprint}"
            for (flag, model), (fingerprint, size) in zip(models.items(), described, strict=True)
        )
        raise VocabularyMismatch(
            f"a draft must have its target's vocabulary, or tokens in common with it: {told}; {error.message}"
        ) from error


def _vocabulary_files(directory: Path) -> tuple[bytes, ...]:
    paths = (directory / name for name in _VOCABULARY_FILES)
    return tuple(path.read_bytes() if path.is_file() else b"" for path in paths)
