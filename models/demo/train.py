"""Trains the demo pair: a tokenizer, a target of 6 layers x 256 and a draft of 2 layers x 128, on the standard library.

One loop trains both: the target learns the text and the draft learns the target's distribution of the same step (KL on
the logits), so that any checkpoint is a usable pair. A short last phase lets the draft catch up with the finished
target. `corpus.py` chooses the text and `evaluate.py` measures acceptance. Nothing at run time imports this module.

    python models/demo/train.py --out models/demo --bf16
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import corpus
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
MAX_CONTEXT_TOKENS = 2048
SPECIAL_TOKENS = [corpus.PAD, corpus.BOS, corpus.EOS, corpus.SYSTEM, corpus.USER, corpus.ASSISTANT]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class TrainingPlan:
    """Parameters that fix a training run, besides the text and the thread count."""

    num_steps: int
    """Steps in which target and draft learn together."""
    num_draft_steps: int
    """Steps after them in which the draft alone learns from the finished target."""
    batch_tokens: int = 2048
    row_tokens: int = 256
    late_row_tokens: int = 512
    """Rows are this long after `late_share` of the steps: short rows are cheaper, long ones stretch the context."""
    late_share: float = 0.75
    matrix_lr: float = 8e-3
    """Learning rate of the layers' matrices, under Muon."""
    other_lr: float = 6e-3
    """Learning rate of embeddings and norms, under AdamW."""
    initial_std: float = 0.04
    num_warmup_steps: int = 40
    final_lr_share: float = 0.02
    seed: int = 1


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2,048 tokens with BOS, EOS and the role markers as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", special_tokens=[(corpus.BOS, SPECIAL_TOKENS.index(corpus.BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        pad_token=corpus.PAD,
        additional_special_tokens=[corpus.SYSTEM, corpus.USER, corpus.ASSISTANT],
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def new_model(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, initial_std: float
) -> LlamaForCausalLM:
    """A freshly initialised Llama with half as many KV heads as heads and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=initial_std,
        bos_token_id=SPECIAL_TOKENS.index(corpus.BOS),
        eos_token_id=SPECIAL_TOKENS.index(corpus.EOS),
        pad_token_id=SPECIAL_TOKENS.index(corpus.PAD),
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa")


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """All documents one after the other, each between BOS and EOS.  [N] int64"""
    encodings = tokenizer.backend_tokenizer.encode_batch([text + corpus.EOS for text in texts])
    return np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings])


class Batches:
    """Windows of the stream in passes: every pass has another offset and another order, fixed by the seed."""

    def __init__(self, stream: np.ndarray, plan: TrainingPlan) -> None:
        self._stream, self._plan = stream, plan
        self._dice = np.random.default_rng(plan.seed)
        self._starts: list[int] = []

    def at(self, step: int) -> torch.Tensor:
        """The batch of this step, one token longer than a row for the targets.  [B, T + 1]"""
        plan = self._plan
        width = plan.late_row_tokens if step >= plan.late_share * plan.num_steps else plan.row_tokens
        num_rows, stride = plan.batch_tokens // width, plan.late_row_tokens
        while len(self._starts) < plan.batch_tokens // stride:
            starts = np.arange(int(self._dice.integers(stride)), len(self._stream) - stride - 1, stride)
            self._starts.extend(self._dice.permutation(starts).tolist())
        windows = [self._starts.pop() for _ in range(plan.batch_tokens // stride)]
        rows = [start + offset for start in windows for offset in range(0, stride, width)][:num_rows]
        return torch.from_numpy(np.stack([self._stream[start : start + width + 1] for start in rows]))


class Optimizers:
    """Muon for the layers' matrices and AdamW for embeddings and norms, on one schedule (warm-up, then linear)."""

    def __init__(self, model: torch.nn.Module, num_steps: int, plan: TrainingPlan) -> None:
        learned = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        matrices = [p for name, p in learned.items() if p.ndim == 2 and "layers." in name]
        others = [p for name, p in learned.items() if not (p.ndim == 2 and "layers." in name)]
        self._num_steps, self._plan, self._step = num_steps, plan, 0
        self._parameters = list(learned.values())
        self._members: list[torch.optim.Optimizer] = []
        if matrices:
            self._members.append(
                torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
            )
        self._members.append(torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.95), weight_decay=0.0))

    def step(self) -> None:
        """Apply the gradients and clear them."""
        warmup = min(1.0, (self._step + 1) / self._plan.num_warmup_steps)
        decay = max(self._plan.final_lr_share, 1.0 - self._step / self._num_steps)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for member in self._members:
            lr = self._plan.matrix_lr if isinstance(member, torch.optim.Muon) else self._plan.other_lr
            for group in member.param_groups:
                group["lr"] = lr * warmup * decay
            member.step()
            member.zero_grad(set_to_none=True)
        self._step += 1


def distillation_loss(draft_logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """KL(target || draft) per token in nats, the mean over all rows of both  [B, T, V]."""
    target_log, draft_log = (
        functional.log_softmax(logits.float().view(-1, logits.shape[-1]), dim=-1)
        for logits in (target_logits, draft_logits)
    )  # [B*T, V]
    return functional.kl_div(draft_log, target_log, reduction="batchmean", log_target=True)


def logits_of(model: LlamaForCausalLM, token_ids: torch.Tensor, bf16: bool) -> torch.Tensor:
    """One forward pass without a cache, the matrices in bf16 where asked.  [B, T] -> [B, T, V] float32"""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        return model(token_ids, use_cache=False).logits.float()


class Training:
    """The state of one run: models, optimizers, batches and the running means of the losses."""

    def __init__(self, plan: TrainingPlan, stream: np.ndarray, bf16: bool) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self._bf16 = plan, bf16
        self.target = new_model(256, 688, num_layers=6, num_heads=8, initial_std=plan.initial_std)
        self.draft = new_model(128, 344, num_layers=2, num_heads=4, initial_std=plan.initial_std)
        self._batches = Batches(stream, plan)
        self._target_optimizers = Optimizers(self.target, plan.num_steps, plan)
        self._draft_optimizers = Optimizers(self.draft, plan.num_steps + plan.num_draft_steps, plan)

    def step(self, index: int) -> tuple[float, float]:
        """One step; returns the target's cross entropy and the draft's KL, both in nats a token."""
        batch = self._batches.at(index)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        target_learns = index < self.plan.num_steps
        with torch.set_grad_enabled(target_learns):
            target_logits = logits_of(self.target, inputs, self._bf16)  # [B, T, V]
            target_loss = functional.cross_entropy(target_logits.reshape(-1, VOCABULARY_SIZE), targets.reshape(-1))
        if target_learns:
            target_loss.backward()
            self._target_optimizers.step()
        draft_loss = distillation_loss(logits_of(self.draft, inputs, self._bf16), target_logits.detach())
        draft_loss.backward()
        self._draft_optimizers.step()
        return target_loss.item(), draft_loss.item()

    @torch.inference_mode()
    def held_out_losses(self, stream: np.ndarray, num_rows: int = 64) -> tuple[float, float]:
        """The same two losses on text that training never saw, in fp32."""
        width = self.plan.late_row_tokens
        count = min(num_rows, (len(stream) - 1) // width)
        rows = torch.from_numpy(np.stack([stream[i * width : (i + 1) * width + 1] for i in range(count)]))
        totals = np.zeros(2)
        for batch in rows.split(8):
            logits = logits_of(self.target, batch[:, :-1], bf16=False)
            truth = functional.cross_entropy(logits.reshape(-1, VOCABULARY_SIZE), batch[:, 1:].reshape(-1))
            divergence = distillation_loss(logits_of(self.draft, batch[:, :-1], bf16=False), logits)
            totals += np.array([truth.item(), divergence.item()]) * len(batch)
        return float(totals[0] / count), float(totals[1] / count)


def save(training: Training, tokenizer: PreTrainedTokenizerFast, out: Path, losses: dict[str, float | int]) -> None:
    """Write both models in half precision, each with the tokenizer's files, and the losses beside them."""
    for name, model in (("target", training.target), ("draft", training.draft)):
        half = LlamaForCausalLM(model.config)
        half.load_state_dict(model.state_dict())
        half = half.half()
        half.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        half.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    (out / "training.json").write_text(json.dumps(losses, indent=1) + "\n")


def main() -> None:
    """Read the command line, train, and save every `--save-every` steps and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder that gets target/ and draft/")
    parser.add_argument("--steps", type=int, default=1800, help="steps of both models together")
    parser.add_argument("--draft-steps", type=int, default=100, help="steps of the draft alone after them")
    parser.add_argument("--save-every", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bf16", action="store_true", help="multiply in bf16: faster on CPUs that have it")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    plan = TrainingPlan(num_steps=arguments.steps, num_draft_steps=arguments.draft_steps)

    files = corpus.standard_library_files()
    training_files = [file for file in files if not file.held_out]
    tokenizer = train_tokenizer([file.text for file in training_files])
    stream = token_stream(tokenizer, corpus.documents(training_files, plan.seed))
    held_out = token_stream(tokenizer, corpus.documents([file for file in files if file.held_out], plan.seed))
    print(f"{len(training_files)} files, {len(stream)} tokens, corpus {corpus.fingerprint(files)}", flush=True)

    training = Training(plan, stream, arguments.bf16)
    started = time.monotonic()
    means = np.zeros(2)
    last = plan.num_steps + plan.num_draft_steps
    for index in range(last):
        means += (np.array(training.step(index)) - means) * max(0.02, 1 / (index + 1))
        if (index + 1) % 20 == 0:
            elapsed = time.monotonic() - started
            print(f"step {index + 1}/{last} target {means[0]:.3f} draft KL {means[1]:.3f} {elapsed:.0f} s", flush=True)
        if (index + 1) % arguments.save_every == 0 or index + 1 == last:
            truth, divergence = training.held_out_losses(held_out)
            summary = asdict(plan) | {
                "corpus": corpus.fingerprint(files),
                "corpus_tokens": len(stream),
                "finished_steps": index + 1,
                "training_s": round(time.monotonic() - started),
                "target_nats_per_token": round(float(means[0]), 4),
                "draft_kl_nats": round(float(means[1]), 4),
                "held_out_target_nats_per_token": round(truth, 4),
                "held_out_draft_kl_nats": round(divergence, 4),
            }
            print(summary, flush=True)
            save(training, tokenizer, arguments.out, summary)


if __name__ == "__main__":
    main()
