"""Trains the demo's second draft, for prose: the code draft goes on learning the target's distribution, of prose alone.

It starts from the code draft's weights and learns docstrings and the reference manual (`corpus.prose`); the target is
unchanged. Nothing at run time imports this module.

    python models/demo/train_prose.py --out models/demo --bf16
"""

import argparse
import json
import random
import time
from pathlib import Path

import corpus
import torch
from train import Batches, Optimizers, TrainingPlan, distillation_loss, logits_of, token_stream
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent


@torch.inference_mode()
def held_out_kl(target: LlamaForCausalLM, draft: LlamaForCausalLM, rows: torch.Tensor) -> float:
    """KL(target || draft) in nats a token."""
    parts = rows.split(8)
    return sum(
        distillation_loss(logits_of(draft, part, False), logits_of(target, part, False)).item() for part in parts
    ) / len(parts)


def main() -> None:
    """Read the command line, train, and save every `--save-every` steps and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE, help="folder that has target/ and draft/ and gets prose/")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16: faster on CPUs that have it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = TrainingPlan(
        num_steps=arguments.steps, num_draft_steps=0, late_share=1.0, matrix_lr=4e-3, other_lr=2e-3, seed=3
    )
    torch.manual_seed(plan.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.out / "target")
    files = corpus.standard_library_files()
    texts = corpus.prose(files, held_out=False)
    random.Random(plan.seed).shuffle(texts)
    stream = token_stream(tokenizer, texts)
    held_out = token_stream(tokenizer, corpus.prose(files, held_out=True))
    rows = torch.from_numpy(held_out[: len(held_out) // plan.row_tokens * plan.row_tokens]).view(-1, plan.row_tokens)
    rows = rows[:32]
    target = LlamaForCausalLM.from_pretrained(arguments.out / "target", dtype=torch.float32).requires_grad_(False)
    draft = LlamaForCausalLM.from_pretrained(arguments.out / "draft", dtype=torch.float32)
    before = held_out_kl(target, draft, rows)
    print(f"{len(stream)} tokens of prose; the code draft's KL on held-out prose {before:.3f}", flush=True)

    optimizers, batches, started = Optimizers(draft, plan.num_steps, plan), Batches(stream, plan), time.monotonic()
    for index in range(plan.num_steps):
        token_ids = batches.at(index)[:, :-1]
        with torch.no_grad():
            told = logits_of(target, token_ids, arguments.bf16)
        loss = distillation_loss(logits_of(draft, token_ids, arguments.bf16), told)
        loss.backward()
        optimizers.step()
        if (index + 1) % 10 == 0:
            elapsed = time.monotonic() - started
            print(f"step {index + 1}/{plan.num_steps} KL {loss.item():.3f} {elapsed:.0f} s", flush=True)
        if (index + 1) % arguments.save_every == 0 or index + 1 == plan.num_steps:
            facts = {
                "corpus": corpus.fingerprint(files), "prose_tokens": len(stream), "finished_steps": index + 1,
                "training_s": round(time.monotonic() - started), "code_draft_held_out_kl_nats": round(before, 4),
                "held_out_kl_nats": round(held_out_kl(target, draft, rows), 4),
            }  # fmt: skip
            print(facts, flush=True)
            _save(draft, tokenizer, arguments.out / "prose", facts)


def _save(draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict) -> None:
    half = LlamaForCausalLM(draft.config)
    half.load_state_dict(draft.state_dict())
    half = half.half()
    half.generation_config = draft.generation_config
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
