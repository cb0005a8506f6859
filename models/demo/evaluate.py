"""Measures the demo pair on the benchmarks' held-out prompts: acceptance, and what the target writes.

The measurement uses plain transformers, so that the figures do not depend on the system that serves the pair. Run it
alone: `python models/demo/evaluate.py [--show 3]`.

Greedy alpha is exact for any system at temperature 0: a draft token is tested only where all before it agreed, and
there the draft saw the target's own text, so that one forward pass of the draft over that text decides every round.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
PROMPTS = HERE.parents[1] / "bench" / "prompts"


def greedy_alpha(agrees: list[bool], gamma: int) -> tuple[int, int]:
    """Accepted and tested draft tokens of the rounds over one output.

    Args:
        agrees: per output token, whether the draft's top token was the target's.
        gamma: draft tokens a round.
    """
    accepted = tested = position = 0
    while position < len(agrees):
        drafted = agrees[position : position + gamma]
        num_accepted = drafted.index(False) if False in drafted else len(drafted)
        accepted += num_accepted
        tested += min(num_accepted + 1, len(drafted))
        position += num_accepted + 1
    return accepted, tested


class Pair:
    """Target, draft and tokenizer of a folder with `target/` and `draft/`, in fp32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
        self._target = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        self._draft = LlamaForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32)

    @torch.inference_mode()
    def generate(self, token_ids: list[int], num_tokens: int, temperature: float) -> list[int]:
        """The target's continuation; EOS is ignored. Temperature 0 is greedy, else 1."""
        inputs = torch.tensor([token_ids])
        options = {"do_sample": temperature > 0, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
        output = self._target.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=num_tokens, **options
        )
        return output[0, len(token_ids) :].tolist()

    @torch.inference_mode()
    def laws(self, token_ids: list[int], num_output: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distributions of target and draft at each of the last `num_output` positions.  [T, V] float64,
        twice
        """
        inputs = torch.tensor([token_ids])
        rows = slice(len(token_ids) - num_output - 1, len(token_ids) - 1)
        target, draft = (model(inputs).logits[0, rows].double() for model in (self._target, self._draft))
        return functional.softmax(target, dim=-1), functional.softmax(draft, dim=-1)


def main() -> None:
    """Print alpha at temperature 0 and 1, and the first continuations if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--show", type=int, default=0, help="print this many continuations")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    pair = Pair(arguments.folder)
    prompts = [pair.tokenizer(path.read_text("utf-8"))["input_ids"] for path in sorted(PROMPTS.glob("*.txt"))]

    accepted = tested = 0
    overlaps = []
    for index, prompt in enumerate(prompts):
        output = pair.generate(prompt, arguments.tokens, temperature=0)
        _, draft = pair.laws(prompt + output, len(output))
        counts = greedy_alpha((draft.argmax(-1) == torch.tensor(output)).tolist(), arguments.gamma)
        accepted, tested = accepted + counts[0], tested + counts[1]
        sampled = pair.generate(prompt, arguments.tokens, temperature=1)
        overlaps.append(torch.minimum(*pair.laws(prompt + sampled, len(sampled))).sum(-1).mean().item())
        if index < arguments.show:
            text, drawn = pair.tokenizer.decode(output), pair.tokenizer.decode(sampled)
            print(f"--- prompt {index}, greedy\n{text}\n--- prompt {index}, temperature 1\n{drawn}")
    print(f"greedy alpha, gamma {arguments.gamma}: {accepted / tested:.3f} ({accepted} of {tested})")
    print(f"mean overlap of the laws at temperature 1: {sum(overlaps) / len(overlaps):.3f}")


if __name__ == "__main__":
    main()
