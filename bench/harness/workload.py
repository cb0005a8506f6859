"""The prompts every suite measures on: starts of functions in standard-library files that training never saw.

`models/demo/corpus.py` chose them. Called by the suites.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

NUM_NEW_TOKENS = 128
GAMMA = 4
NUM_THREADS = 2

_DIRECTORY = Path(__file__).resolve().parents[1] / "prompts"


def prompt_texts() -> list[str]:
    """The 20 prompts in the order of their file names."""
    return [path.read_text("utf-8") for path in sorted(_DIRECTORY.glob("*.txt"))]


def prompt_token_ids(model_dir: Path, length: int | None = None) -> list[list[int]]:
    """The prompts as token ids, BOS included.

    Args:
        model_dir: checkpoint whose tokenizer is used.
        length: cut every prompt to its BOS and its last tokens, this many in all, where equal lengths are needed.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    prompts = [tokenizer(text)["input_ids"] for text in prompt_texts()]
    if length is None:
        return prompts
    return [ids[:1] + ids[1:][-(length - 1) :] for ids in prompts]


class OwnPrompts:
    """The prompts over and over, each time with a second token of its own: no two share KV blocks."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self._prompts = prompts
        self._num_given = 0

    def batch(self, size: int) -> list[list[int]]:
        """Return the next prompts."""
        return [self.next() for _ in range(size)]

    def next(self) -> list[int]:
        """Return the next prompt."""
        prompt = list(self._prompts[self._num_given % len(self._prompts)])
        self._num_given += 1
        prompt[1] = 300 + self._num_given % 1_500
        return prompt
