"""Two tokenizers of checkpoints as the pair that a draft replica makes of them."""

from __future__ import annotations

from pathlib import Path

from specdec.checkpoints.cross_vocabulary.pair import TokenizerPair, make_pair
from specdec.checkpoints.vocabulary import load_tokenizer


def load_pair(draft: str | Path, target: str | Path) -> TokenizerPair:
    """Read both tokenizers, each from a checkpoint directory that may hold tokenizer files alone."""
    return make_pair((str(draft), load_tokenizer(draft)), (str(target), load_tokenizer(target)))
