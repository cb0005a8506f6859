"""Hugging Face's own generation as the peer: plain, with an assistant model, and by prompt lookup.

`PeerModels` runs one stream at a time. `PeerProcess` runs it in a separate process, so that its threads and allocator
are not ours. The peer is not a tuned server: it is what a user of transformers gets with the same weights, threads,
prompts, gamma and dtype. Called by the suites; `python -m bench.systems.transformers` is the child.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness.line_child import LineChild, answer_lines

METHODS = ("plain", "assisted", "prompt_lookup")


@dataclass(frozen=True)
class PeerRun:
    """One greedy stream as the peer ran it."""

    token_ids: list[int]
    """The new tokens, EOS ignored."""
    ttft_s: float
    e2el_s: float


def load_without_eos(directory: str, dtype: str) -> Any:
    """Return a model that generates past its end token: all systems make the same number of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype), trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


def draft_constantly(assistant: Any, gamma: int) -> None:
    """Make an assistant model draft `gamma` tokens a round, however sure it is of them."""
    assistant.generation_config.num_assistant_tokens = gamma
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0


class PeerModels:
    """A target and, for `assisted`, a draft loaded by transformers, in this process."""

    def __init__(self, target_dir: str, draft_dir: str | None, num_threads: int, device: str, dtype: str) -> None:
        import torch
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(num_threads)
        self._torch = torch
        self._device = device
        models = [load_without_eos(directory, dtype).to(device) for directory in filter(None, (target_dir, draft_dir))]
        self._target, self._draft = models[0], models[-1]  # the target is its own draft where there is none

    def run(
        self, method: str, prompt_token_ids: list[int], max_new_tokens: int, gamma: int, seed: int | None = None
    ) -> PeerRun:
        """Generate greedily, or at temperature 1 without filters where a seed is given.

        Args:
            method: one of `METHODS`.
            prompt_token_ids: BOS included.
            max_new_tokens: exactly this many are made.
            gamma: draft tokens a round, by a constant schedule; unused by `plain`.
            seed: of the draws; None is greedy.
        """
        from transformers import StoppingCriteriaList

        times: list[float] = []

        def note_time(input_ids: Any, scores: object, **unused: object) -> object:
            if not times:
                input_ids[0, -1].item()  # a GPU may still be computing
            times.append(time.perf_counter())
            return input_ids.new_zeros(1, dtype=self._torch.bool)

        options = {"assisted": {"assistant_model": self._draft}, "prompt_lookup": {"prompt_lookup_num_tokens": gamma}}
        draft_constantly(self._draft, gamma)
        inputs = self._torch.tensor([prompt_token_ids], device=self._device)  # [1, T]
        if seed is not None:
            self._torch.manual_seed(seed)
        started = time.perf_counter()
        with self._torch.inference_mode():
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                stopping_criteria=StoppingCriteriaList([note_time]),
                **options.get(method, {}),
                **_sampling(seed),
            )
        token_ids = output[0, len(prompt_token_ids) :].tolist()
        finished = time.perf_counter()
        return PeerRun(token_ids, times[0] - started, finished - started)

    def run_batch(self, prompts: list[list[int]], max_new_tokens: int) -> float:
        """Generate greedily for prompts of one length as one batch; returns the seconds it took."""
        inputs = self._torch.tensor(prompts, device=self._device)  # [B, T]
        started = time.perf_counter()
        with self._torch.inference_mode():
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
            )
        output.tolist()
        return time.perf_counter() - started


def _sampling(seed: int | None) -> dict[str, object]:
    if seed is None:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class PeerProcess(LineChild):
    """`PeerModels` in a child process."""

    def __init__(
        self, target_dir: Path, draft_dir: Path | None, num_threads: int, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        draft = [] if draft_dir is None else ["--draft", str(draft_dir)]
        super().__init__(
            "bench.systems.transformers", "--target", str(target_dir), *draft, "--device", device, "--dtype", dtype,
            num_threads=num_threads,
        )  # fmt: skip

    def run(
        self, method: str, prompt_token_ids: list[int], max_new_tokens: int, gamma: int, seed: int | None = None
    ) -> PeerRun:
        """Run `PeerModels.run` in the child; times are measured there, without the pipe."""
        request = {"method": method, "prompt_token_ids": prompt_token_ids, "max_new_tokens": max_new_tokens}
        return PeerRun(**self.ask(request | {"gamma": gamma, "seed": seed}))

    def run_batch(self, prompts: list[list[int]], max_new_tokens: int) -> float:
        """Run `PeerModels.run_batch` in the child."""
        return float(self.ask({"prompts": prompts, "max_new_tokens": max_new_tokens}))


def main() -> None:
    """Answer one request a line until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    asked = parser.parse_args()
    models = PeerModels(asked.target, asked.draft, asked.threads, asked.device, asked.dtype)
    answer_lines({}, lambda asked: models.run_batch(**asked) if "prompts" in asked else asdict(models.run(**asked)))


if __name__ == "__main__":
    main()
