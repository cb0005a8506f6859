"""Parts that the demos share: a system of processes on this machine, an answer printed as it comes, and Transformers.

Called by `demo`, `demo_real` and `demo_pair`, which say what is asked and compared.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specdec.cli.terminal import TokenWriter
from specdec.client import Client, Completion
from specdec.contract.errors import SpecdecError, error_line


def with_system(flags: Sequence[str], show: Callable[[str], int]) -> int:
    """Run `specdec up` with these flags, call `show` with its endpoint, and stop everything that was started.

    Returns:
        The exit code of `show`, or 1 after an error, which has been printed to stderr.
    """
    up = subprocess.Popen(
        [sys.executable, "-m", "specdec.cli", "up", *flags, "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert up.stdout is not None  # it was opened above
    try:
        ready = up.stdout.readline().split("grpc=")
        if len(ready) != 2:
            return 1  # `up` has printed the reason
        return show(ready[1].strip())
    except SpecdecError as error:
        print(error_line(error), file=sys.stderr)
        return 1
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait()


def print_answer(client: Client, writer: TokenWriter, prompt: str | None = None, **asked: Any) -> Completion:
    """Print a greedy answer as it arrives, each token in the colour of its source, and delete its session."""
    with client.generate(prompt, stream=True, provenance=True, temperature=0, **asked) as chunks:
        for chunk in chunks:
            writer.write(chunk)
        completion = chunks.result()
    client.delete_session(completion.session_id)
    return completion


class TransformersPeer:
    """GGUF files in Transformers, float32, in this process."""

    def __init__(self, target: Path, draft: Path | None = None) -> None:
        """Load a model and, for assisted generation, its draft."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        disable_progress_bar()
        set_verbosity_error()
        self._torch = torch
        self._target, self._draft = (
            path and AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
            for path in (target, draft)
        )

    def answer(
        self, prompt: Sequence[int], max_new_tokens: int, *, is_assisted: bool = False
    ) -> tuple[list[int], float]:
        """Return greedy token ids, the end token included, and tokens a second."""
        inputs = self._torch.tensor([list(prompt)])  # [1, T]
        began_s = time.perf_counter()
        with self._torch.inference_mode():
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                assistant_model=self._draft if is_assisted else None,
            )
        token_ids = output[0, len(prompt) :].tolist()
        return token_ids, len(token_ids) / (time.perf_counter() - began_s)
