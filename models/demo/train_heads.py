"""Train the drafts that the demo target makes itself: Medusa heads, an EAGLE-3 head and an early exit's adapter.

In one loop the target reads the demo pair's text and every learner (`learners.py`) learns its distribution of the same
step, by KL on the logits at every draft depth, because drafts are sampled and not only argmaxed. `corpus.py` chooses
the text. Nothing at run time imports this module.

    python models/demo/train_heads.py --out models/demo --bf16
"""

import argparse
import json
import time
from pathlib import Path

import corpus
import torch
from learners import EARLY_EXIT_LAYERS, LEARNERS, EarlyExitLearner, Target, View
from safetensors.torch import load_file, save_file
from torch import nn
from train import Batches, Optimizers, TrainingPlan, distillation_loss, token_stream
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
#: Factor of the loss from one draft depth to the next: a later token is tested only where all before it were accepted.
DEPTH_WEIGHT = 0.8
FILES = {"medusa": "model.safetensors", "eagle3": "model.safetensors", "early_exit": "adapter.safetensors"}


def depth_losses(learner: nn.Module, view: View) -> list[torch.Tensor]:
    """KL(target || learner) in nats a token, draft depth by draft depth."""
    losses = []
    for depth, (logits, offset) in enumerate(learner.logits(view)):
        count = view.logits.shape[1] - offset
        # At depth i the first i rows have no draft of this depth behind them.
        drafted, told = logits[:, depth:count], view.logits[:, offset + depth : offset + count]
        losses.append(distillation_loss(drafted.reshape(1, -1, drafted.shape[-1]), told.reshape(1, -1, told.shape[-1])))
    return losses


class HeadTraining:
    """The target, the learners and their optimizers."""

    def __init__(self, folder: Path, names: list[str], plan: TrainingPlan, bf16: bool) -> None:
        torch.manual_seed(plan.seed)
        model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
        self.target, self._bf16 = Target(model, bf16), bf16
        self.learners = {name: LEARNERS[name](model) for name in names}
        self._optimizers = {name: Optimizers(learner, plan.num_steps, plan) for name, learner in self.learners.items()}

    def step(self, token_ids: torch.Tensor) -> dict[str, list[float]]:
        """One step of every learner; returns its losses by depth."""
        view, told = self.target.look(token_ids), {}
        for name, learner in self.learners.items():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._bf16):
                losses = depth_losses(learner, view)
            sum(loss * DEPTH_WEIGHT**depth for depth, loss in enumerate(losses)).backward()
            self._optimizers[name].step()
            told[name] = [loss.item() for loss in losses]
        return told

    @torch.inference_mode()
    def held_out_losses(self, rows: torch.Tensor) -> dict[str, list[float]]:
        """The same losses on rows that training never saw."""
        views = [self.target.look(batch) for batch in rows.split(8)]
        return {
            name: [
                round(sum(column) / len(views), 4)
                for column in zip(
                    *([loss.item() for loss in depth_losses(learner, view)] for view in views), strict=True
                )
            ]
            for name, learner in self.learners.items()
        }


def save(learner: nn.Module, folder: Path, facts: dict) -> None:
    """Writes one learner's checkpoint in half precision, and how it came about beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().half().contiguous() for name, tensor in learner.tensors().items()}
    metadata = {"num_layers": str(EARLY_EXIT_LAYERS)} if isinstance(learner, EarlyExitLearner) else {"format": "pt"}
    save_file(tensors, folder / FILES[learner.name], metadata)
    if (config := learner.config()) is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def load(learner: nn.Module, folder: Path) -> None:
    """Takes one learner's checkpoint over."""
    stored = load_file(folder / FILES[learner.name])
    with torch.no_grad():
        for name, parameter in learner.tensors().items():
            parameter.copy_(stored[name])


def finished_steps(folder: Path) -> int:
    """Return the number of steps that a checkpoint was trained for."""
    return json.loads((folder / "training.json").read_text())["finished_steps"]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder that has target/ and gets the heads'")
    parser.add_argument("--only", nargs="+", choices=list(LEARNERS), default=list(LEARNERS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="go on from the heads that --out has")
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16: faster on CPUs that have it")
    return parser.parse_args()


def main() -> None:
    """Read the command line, train, and save every `--save-every` steps and at the end."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    steps_before = dict.fromkeys(arguments.only, 0)
    if arguments.resume:
        steps_before = {name: finished_steps(arguments.out / name) for name in arguments.only}
    # Of a run that goes on, other batches than those before.
    plan = TrainingPlan(arguments.steps, 0, late_share=1.0, other_lr=2e-3, seed=2 + max(steps_before.values()))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out / "target")
    files = corpus.standard_library_files()
    stream, held_out = (
        token_stream(tokenizer, corpus.documents([file for file in files if file.held_out == is_held_out], 2))
        for is_held_out in (False, True)
    )
    rows = torch.from_numpy(held_out[: 32 * plan.row_tokens]).view(32, plan.row_tokens)
    training = HeadTraining(arguments.out, arguments.only, plan, arguments.bf16)
    if arguments.resume:
        for name, learner in training.learners.items():
            load(learner, arguments.out / name)
    batches, started = Batches(stream, plan), time.monotonic()
    for index in range(plan.num_steps):
        told = training.step(batches.at(index)[:, :-1])
        if (index + 1) % 10 == 0:
            shown = {name: " ".join(f"{loss:.3f}" for loss in losses) for name, losses in told.items()}
            print(f"step {index + 1}/{plan.num_steps} KL {shown} {time.monotonic() - started:.0f} s", flush=True)
        if (index + 1) % arguments.save_every == 0 or index + 1 == plan.num_steps:
            losses = training.held_out_losses(rows)
            print("held out", losses, flush=True)
            for name, learner in training.learners.items():
                facts = {
                    "corpus": corpus.fingerprint(files),
                    "finished_steps": steps_before[name] + index + 1,
                    "batch_tokens": plan.batch_tokens,
                    "held_out_kl_nats_by_depth": losses[name],
                }
                save(learner, arguments.out / name, facts)


if __name__ == "__main__":
    main()
