"""Parts that the tests of other engines share: prompts, a system in front of an engine, and llama.cpp alone."""

from __future__ import annotations

import json
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench.systems.real_models import PackagedModel
from specdec import Client
from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.client import Budgets
from tests.support.up_rig import start_up

PROMPTS = (
    "Once upon a time", "def add(a, b):", "In 1969 the first", "import os\nimport", "The quick brown fox",
    "class Node:", "for i in range(10):", "To be or not", "A list of colours: red,", "Return the sum of",
    "if x is None:", "The end of", "try:\n    value =", "It was the best of", "Raises:\n    ValueError:",
    "1, 2, 3, 4,", "with open(path) as f:", "Hello, my name", '"""Return the', "while True:",
)  # fmt: skip
NUM_TOKENS = 64

PATIENT = Budgets(connect_s=60.0, target_s=300.0, resume_s=300.0)


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
        self._up, self.endpoint = start_up(*flags, *(["--backend-url", url] if url else []))
        self._client = Client(self.endpoint, budgets=budgets or PATIENT)

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


def write_adapter(directory: Path, model: Path, seed: int) -> Path:
    """Write a LoRA with random weights for the attention of a Llama checkpoint, as PEFT does; return its directory."""
    config = json.loads((model / "config.json").read_text())
    hidden, rank, generator = config["hidden_size"], 8, np.random.default_rng(seed)
    widths = {"q_proj": config["num_attention_heads"], "v_proj": config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, num_heads in widths.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (rank, hidden), "lora_B": (num_heads * config["head_dim"], rank)}
            for part, shape in shapes.items():
                weights[f"{place}.{part}.weight"] = generator.normal(0.0, 0.05, shape).astype(np.float32)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model), "r": rank,
        "lora_alpha": 4 * rank, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(widths),
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    return directory


def token_ids_of(checkpoint: Path, text: str) -> list[int]:
    return list(map(int, load_tokenizer(checkpoint)(text)["input_ids"]))


def generate(client: Client, prompt: list[int], **options: Any) -> list[int]:
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return list(client.generate(prompt_token_ids=prompt, **sampling).token_ids)


class Llama:
    """llama.cpp without specdec, with the attention that it chooses by itself where it may.

    The logits of SmolLM2 then have the same bits for a token alone and in a batch. The package's default is another
    attention, with which they differ by up to 1.2, and by up to 0.8 between a token alone and a token in a batch.
    """

    def __init__(self, path: Path) -> None:
        llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install 'specdec[llama-cpp]'")
        self._model = llama_cpp.Llama(
            str(path), n_ctx=512, n_threads=2, n_threads_batch=2, flash_attn=True, verbose=False
        )

    def greedy_continuation(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = self._model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0)
        return [int(token_id) for token_id in islice(tokens, num_tokens)]

    def logits_after(self, token_ids: list[int]) -> np.ndarray:
        """float32 [vocabulary]."""
        return self._logits_after(token_ids, len(token_ids))

    def gaps(self, token_ids: list[int], first: int, second: int) -> list[float]:
        """Return the logit of one token above that of another, once for each number of last tokens run together.

        For some quantised models, llama.cpp's logits of a token depend on the number of tokens that it runs with it.
        """
        together = [*range(1, min(10, len(token_ids))), len(token_ids)]
        rows = [self._logits_after(token_ids, number) for number in together]
        return [float(row[first] - row[second]) for row in rows]

    def _logits_after(self, token_ids: list[int], num_together: int) -> np.ndarray:
        self._model.reset()
        if num_together < len(token_ids):
            self._model.eval(token_ids[:-num_together])
        self._model.eval(token_ids[-num_together:])
        row = self._model._ctx.get_logits_ith(-1)
        return np.array(np.ctypeslib.as_array(row, shape=(self._model.n_vocab(),)))
