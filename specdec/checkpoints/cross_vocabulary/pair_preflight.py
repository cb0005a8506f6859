"""Check from small files alone that a draft and a target can be served as a pair, before anything is loaded.

Reads configurations and tokenizers and imports no torch. Called by `specdec up`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.checkpoints.locate import locate_checkpoint
from specdec.checkpoints.preflight import naming_flag, require_servable
from specdec.checkpoints.vocabulary import load_tokenizer, vocabulary_fingerprint
from specdec.contract.errors import Unsupported, VocabularyMismatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Files that define a checkpoint's vocabulary. If they are equal byte for byte, so are the vocabularies.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")


def require_servable_pair(models: Mapping[str, str], *, elsewhere: Collection[str] = ()) -> str:
    """Check that a target and a draft can be served, and that their vocabularies are equal or share tokens.

    Args:
        models: model names by the command-line flags that named them, the target first; one or none is allowed.
        elsewhere: flags of models that run in another engine; only their tokenizers are needed here.

    Returns:
        Text for messages on how many tokens the draft shares with the target; "" if the vocabularies are equal.

    Raises:
        InvalidRequest: see `require_servable`; or a tokenizer is missing, or unreadable and unlike the other.
        Unsupported: see `require_servable`.
        VocabularyMismatch: the vocabularies share no token. The message has both fingerprints.
    """
    for flag, model in models.items():
        if flag not in elsewhere:
            require_servable(model, flag=flag)
    files: dict[str, tuple[bytes, ...]] = {}
    for flag, model in models.items():
        with naming_flag(flag):
            files[flag] = _vocabulary_files(locate_checkpoint(model, small_files_only=True))
    kinds = set(files.values())
    if len(kinds) <= 1 and all(tokenizer for tokenizer, *_ in kinds):
        return ""  # the services read the tokenizer themselves, and loading it here takes seconds
    loaded: dict[tuple[bytes, ...], PreTrainedTokenizerFast] = {}
    described: list[tuple[str, int]] = []
    for flag, model in models.items():
        with naming_flag(flag):
            if files[flag] not in loaded:
                loaded[files[flag]] = load_tokenizer(model)
            vocabulary = loaded[files[flag]].get_vocab()
            described.append((vocabulary_fingerprint(vocabulary), len(vocabulary)))
    if len(set(described)) <= 1:
        return ""
    from specdec.checkpoints.cross_vocabulary.pair import (
        make_pair,  # imported here: it loads transformers, which takes 1 s
    )

    target, draft = zip(models.values(), loaded.values(), strict=True)
    try:
        return make_pair(draft, target).summary
    except (Unsupported, VocabularyMismatch) as error:
        vocabularies = " and ".join(
            f"{flag} {model!r} has {size} tokens, fingerprint {fingerprint}"
            for (flag, model), (fingerprint, size) in zip(models.items(), described, strict=True)
        )
        raise VocabularyMismatch(
            f"a draft must have its target's vocabulary, or tokens in common with it: {vocabularies}; {error.message}"
        ) from error


def _vocabulary_files(directory: Path) -> tuple[bytes, ...]:
    paths = (directory / name for name in _VOCABULARY_FILES)
    return tuple(path.read_bytes() if path.is_file() else b"" for path in paths)
