"""Measure the acceptance of drafts for the demo target by draft position, on held-out prompts.

The measurement runs plain PyTorch over the target's own text, so that the figures do not depend on the system that
serves the heads. It reports greedy alpha of the first, second, ... draft token of a round (accepted / tested), tokens a
round, and the overlap of the distributions (the sum of min(p, q), which is alpha at temperature 1).

    python models/demo/evaluate_heads.py [--prose]
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import corpus
import torch
from evaluate import HERE, PROMPTS, Pair
from learners import LEARNERS, Target, View
from torch import nn
from train_heads import FILES, load
from transformers import LlamaForCausalLM

#: Of a view: logits [1, T, V] of each draft depth, how far before what they predict they stand, and how many rows a
#: further depth moves on.
Drafter = Callable[[View], Iterator[tuple[torch.Tensor, int, int]]]


def head_drafter(name: str, folder: Path, model: LlamaForCausalLM, gamma: int) -> Drafter:
    """A trained head of `folder`."""
    kind = LEARNERS[name]
    options: dict = {"eagle3": {"num_depths": gamma}}.get(name, {})
    learner: nn.Module = kind(model, **options)
    load(learner, folder / name)

    def draft(view: View) -> Iterator[tuple[torch.Tensor, int, int]]:
        for logits, offset in learner.logits(view):
            yield logits, offset, 0 if name == "medusa" else 1

    return draft


def model_drafter(folder: Path) -> Drafter:
    """A separate model."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def draft(view: View) -> Iterator[tuple[torch.Tensor, int, int]]:
        yield model(view.token_ids, use_cache=False).logits, 0, 1

    return draft


def of_depths(drafter: Drafter, view: View, num_prompt: int, gamma: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of draft and target, depth after depth, in row i of the round that begins behind output token i."""
    first = num_prompt - 1  # the row that predicts the first output token
    count = view.logits.shape[1] - num_prompt - gamma
    depths = list(drafter(view))
    for depth in range(gamma):
        # A kind of one depth drafts every token alike; one of fewer heads than gamma drafts no further.
        logits, offset, moves = depths[min(depth, len(depths) - 1)]
        if moves == 0 and depth >= len(depths):
            return
        predicted = first + 1 + depth  # behind output token 0, whose own row is `first`
        row = predicted - offset
        yield logits[0, row : row + count], view.logits[0, predicted : predicted + count]


@torch.inference_mode()
def measure(
    drafter: Drafter, target: Target, texts: list[tuple[int, list[int]]], gamma: int
) -> tuple[list, list, list]:
    """Greedy agreement, chain by chain, and overlap, each by depth: [texts][gamma, rows]."""
    agreements, overlaps = [], []
    for num_prompt, token_ids in texts:
        view = target.look(torch.tensor([token_ids]))
        pairs = list(of_depths(drafter, view, num_prompt, gamma))
        agreements.append(torch.stack([q.argmax(-1) == p.argmax(-1) for q, p in pairs]))
        overlaps.append(torch.stack([torch.minimum(q.softmax(-1), p.softmax(-1)).sum(-1) for q, p in pairs]))
    return agreements, overlaps, [len(agreement) for agreement in agreements]


def alpha_by_depth(agreements: list[torch.Tensor]) -> list[float]:
    """Accepted over tested of each depth, over every round that could begin."""
    accepted = torch.cat([agreement.int().cumprod(0) for agreement in agreements], dim=1).double().sum(1)
    tested = torch.cat((torch.tensor([float(sum(a.shape[1] for a in agreements))]), accepted[:-1]))
    return (accepted / tested.clamp(min=1)).tolist()


def tokens_a_round(agreements: list[torch.Tensor]) -> float:
    """Emitted by a round of greedy text, one round after the other."""
    emitted = rounds = 0
    for agreement in agreements:
        kept = agreement.int().cumprod(0).sum(0)
        row = 0
        while row < len(kept):
            step = int(kept[row]) + 1
            emitted, rounds, row = emitted + step, rounds + 1, row + step
    return emitted / max(1, rounds)


def main() -> None:
    """Print one line for each draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--prose", action="store_true", help="beginnings of held-out prose, not of code")
    arguments = parser.parse_args()
    pair = Pair(arguments.folder)
    starts = [path.read_text("utf-8") for path in sorted(PROMPTS.glob("*.txt"))]
    if arguments.prose:
        starts = corpus.prose_prompts(corpus.standard_library_files())
    prompts = [pair.tokenizer(text).input_ids for text in starts]
    torch.manual_seed(0)
    greedy, sampled = (
        [(len(ids), ids + pair.generate(ids, arguments.tokens, temperature)) for ids in prompts]
        for temperature in (0, 1)
    )
    model = LlamaForCausalLM.from_pretrained(arguments.folder / "target", dtype=torch.float32)
    target = Target(model, bf16=False)
    drafters = {name: model_drafter(arguments.folder / name) for name in ("draft", "prose")
                if (arguments.folder / name).is_dir()}  # fmt: skip
    drafters |= {name: head_drafter(name, arguments.folder, model, arguments.gamma) for name in LEARNERS
                 if (arguments.folder / name / FILES[name]).is_file()}  # fmt: skip
    for name, drafter in drafters.items():
        agreements, _, _ = measure(drafter, target, greedy, arguments.gamma)
        _, overlaps, _ = measure(drafter, target, sampled, arguments.gamma)
        alpha = " ".join(f"{value:.3f}" for value in alpha_by_depth(agreements))
        overlap = " ".join(f"{value:.3f}" for value in torch.cat(overlaps, dim=1).mean(1).tolist())
        print(f"{name:<11} greedy alpha {alpha}  tokens a round {tokens_a_round(agreements):.2f}  overlap {overlap}")


if __name__ == "__main__":
    main()
