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


def chat_prompts() -> list[str]:
    """The 20 questions that chat models are asked."""
    return (_DIRECTORY / "chat/questions.txt").read_text("utf-8").splitlines()


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
        given = range(self._num_given, self._num_given + size)
        self._num_given += size
        prompts = (self._prompts[number % len(self._prompts)] for number in given)
        return [[first, 301 + number % 1_500, *rest] for number, (first, _, *rest) in zip(given, prompts, strict=True)]
