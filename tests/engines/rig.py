"""Parts that the tests of other engines share: prompts, a system in front of an engine, and the test of a law."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.real_models import PackagedModel
from specdec import Client
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import Budgets
from tests.support.chi_square import chi_square_p_value
from tests.support.up_rig import start_up

PROMPTS = (
    "Once upon a time", "def add(a, b):", "In 1969 the first", "import os\nimport", "The quick brown fox",
    "class Node:", "for i in range(10):", "To be or not", "A list of colours: red,", "Return the sum of",
    "if x is None:", "The end of", "try:\n    value =", "It was the best of", "Raises:\n    ValueError:",
    "1, 2, 3, 4,", "with open(path) as f:", "Hello, my name", '"""Return the', "while True:",
)  # fmt: skip
NUM_TOKENS = 64

_PATIENT = Budgets(connect_s=60.0, target_s=300.0, resume_s=300.0)


class system:  # noqa: N801 - used as a function
    """Run `specdec up` with a target in front of an engine, and give its client."""

    def __init__(self, target: Path, draft: Path, backend: str, url: str = "", budgets: Budgets | None = None) -> None:
        """
        Args:
            target: checkpoint directory or GGUF file of the target.
            draft: likewise, of a draft that our own engine runs.
            backend: as `--backend` takes it.
            url: address of the engine's server; "" for an engine in the target's process.
            budgets: of the client; None waits for minutes.
        """
        flags = ["--target", str(target), "--draft", str(draft), "--backend", backend]
        self._up, endpoint = start_up(*flags, *(["--backend-url", url] if url else []))
        self._client = Client(endpoint, budgets=budgets or _PATIENT)

    def __enter__(self) -> Client:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._up.send_signal(signal.SIGINT)
        self._up.communicate()


def installed(model: PackagedModel) -> Path:
    """Return a model's file; skip the test where its packages are not installed."""
    try:
        return model.path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def token_ids_of(checkpoint: Path, text: str) -> list[int]:
    return list(map(int, load_tokenizer(checkpoint)(text)["input_ids"]))


def generate(client: Client, prompt: list[int], **options: Any) -> list[int]:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return list(client.generate(prompt_token_ids=prompt, **sampling).token_ids)


def p_value(counts: Counter[tuple[int, ...]], laws: dict[tuple[int, ...], float]) -> float:
    """Return the chi-square test's p over the frequent outcomes and one pool of all others."""
    num_outputs = sum(counts.values())
    frequent = [outcome for outcome, law in laws.items() if law * num_outputs >= 8]
    observed = [counts[outcome] for outcome in frequent]
    expected = [laws[outcome] * num_outputs for outcome in frequent]
    return chi_square_p_value(
        [*observed, num_outputs - sum(observed)], [*expected, max(num_outputs - sum(expected), 1e-9)]
    )
