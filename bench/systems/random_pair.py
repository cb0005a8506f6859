"""A random model of any Llama or Qwen3.5 shape and its own first layers as the draft, written for measuring.

Every layer after the draft's adds eps times what an untrained layer adds to the residual stream, so eps dials how often
both choose the same token; it is found by bisection on the device, from text that the target generates. The text has no
meaning, and only greedy decoding is intended: at T = 1 the distributions are nearly flat over the whole vocabulary, and
no short support covers one. The measured agreement includes the noise of bfloat16: logits are rounded to 8 bits, so the
top two sometimes tie.

Called by the suites `gpu` and `hybrids` and by tests.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bench.harness.workload import prompt_token_ids
from bench.systems.models import DEMO, OUTPUT_PROJECTIONS, copy_tokenizer

DTYPE = torch.bfloat16

#: Range of eps that is searched (narrow layers add little), and the tolerance of the share of equal tokens.
_LEAST_EPS, _MOST_EPS = 2.0**-10, 2.0**6
_NUM_TRIALS, _TOLERANCE = 12, 0.01
_PROMPT_TOKENS, _NUM_TRIED_TOKENS = 48, 64


@dataclass(frozen=True)
class PairModel:
    """One checkpoint of the pair, in bfloat16."""

    directory: Path
    step_bytes: int
    """Bytes of weights that a step of one row reads: all but the input embedding."""
    kv_bytes_per_token: int


@dataclass(frozen=True)
class RandomPair:
    """Both checkpoints, with a tokenizer as large as the model's head."""

    target: PairModel
    draft: PairModel
    eps: float
    agreement: float
    """Share of the tokens of the target's own greedy text that the draft names too: alpha at T = 0, as configured."""


def write_random_pair(
    config: PreTrainedConfig,
    num_draft_layers: int,
    alpha: float,
    directory: Path,
    device: str,
    seed: int = 0,
    dtype: torch.dtype = DTYPE,
) -> RandomPair:
    """Makes, dials and writes the pair; nothing of it stays in memory.

    Args:
        config: the target's shape, input embedding and head not tied.
        num_draft_layers: how many of its first layers the draft has.
        alpha: share of the target's greedy tokens that the draft is to choose.
        directory: gets the folders `target` and `draft`.
        device: where the weights are made and the dialling runs.
        seed: fixes the weights.
        dtype: dtype of the weights.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        target: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        # As large as a layer's contribution: with a smaller embedding, texts soon repeat themselves.
        target.get_input_embeddings().weight.mul_(1 / config.initializer_range)
    for settings in (target.config, target.generation_config):
        settings.eos_token_id = None  # random text has no end token
    draft = _first_layers(target, num_draft_layers)
    write_tokenizer(directory / "target", config.vocab_size)
    prompts = torch.tensor(prompt_token_ids(directory / "target", _PROMPT_TOKENS), device=device)  # [B, T]
    eps, agreement = _dial(partial(_agreement, target, draft, prompts), alpha)
    with torch.no_grad():
        for projection in _later_projections(target, num_draft_layers):
            projection.weight.mul_(eps)
    pair = RandomPair(_write(target, directory / "target"), _write(draft, directory / "draft"), eps, agreement)
    copy_tokenizer(pair.target.directory, pair.draft.directory)
    return pair


def write_tokenizer(directory: Path, vocabulary_size: int) -> None:
    """Writes the demo's tokenizer, with entries that no text makes up to the size of a model's head.

    Without them our services would choose among the tokenizer's tokens and the peers among the head's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(DEMO / "target", directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<unused{token_id}>": token_id for token_id in range(len(vocabulary), vocabulary_size)}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def _first_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The model of the target's first layers: the same tensors, not copies."""
    fewer: dict[str, Any] = {"num_hidden_layers": num_layers}
    if kinds := getattr(target.config, "layer_types", None):
        fewer["layer_types"] = kinds[:num_layers]
    with torch.device("meta"):
        draft = type(target)(type(target.config)(**(target.config.to_dict() | fewer)))
    draft.model.embed_tokens, draft.model.layers = target.model.embed_tokens, target.model.layers[:num_layers]
    draft.model.norm, draft.model.rotary_emb = target.model.norm, target.model.rotary_emb
    draft.lm_head = target.lm_head
    draft.generation_config = target.generation_config
    return draft.eval()


def _later_projections(target: PreTrainedModel, num_draft_layers: int) -> list[torch.nn.Module]:
    layers = target.model.layers[num_draft_layers:]
    names = {*OUTPUT_PROJECTIONS, "linear_attn.out_proj"}
    return [module for layer in layers for name, module in layer.named_modules() if name in names]


def _dial(agreement_at: Callable[[float], float], alpha: float) -> tuple[float, float]:
    """Return the tried eps whose agreement came nearest, and that agreement, by bisection: more eps agrees less."""
    low, high = _LEAST_EPS, _MOST_EPS
    tried: dict[float, float] = {}
    for _ in range(_NUM_TRIALS):
        eps = math.sqrt(low * high)
        tried[eps] = agreement_at(eps)
        if abs(tried[eps] - alpha) <= _TOLERANCE:
            break
        low, high = (eps, high) if tried[eps] > alpha else (low, eps)
    nearest = min(tried, key=lambda eps: abs(tried[eps] - alpha))
    return nearest, tried[nearest]


@torch.inference_mode()
def _agreement(target: PreTrainedModel, draft: PreTrainedModel, prompts: torch.Tensor, eps: float) -> float:
    """Lets the target write on after every prompt and the draft read it: the share of tokens both name.

    The later layers' outputs are scaled as they come, which spares a copy of the weights they will be scaled from.
    """

    def scale(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * eps

    projections = _later_projections(target, draft.config.num_hidden_layers)
    hooks = [projection.register_forward_hook(scale) for projection in projections]
    try:
        texts = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=_NUM_TRIED_TOKENS
        )  # [B, T + N]
    finally:
        for hook in hooks:
            hook.remove()
    logits = draft(texts[:, :-1], logits_to_keep=_NUM_TRIED_TOKENS, use_cache=False).logits  # [B, N, V]
    return float((logits.argmax(dim=-1) == texts[:, prompts.shape[1] :]).float().mean())


def _write(model: PreTrainedModel, directory: Path) -> PairModel:
    model.save_pretrained(directory)
    config = model.config
    width = config.num_key_value_heads * config.head_dim
    return PairModel(
        directory=directory,
        step_bytes=sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes,
        kv_bytes_per_token=2 * width * config.num_hidden_layers * model.dtype.itemsize,
    )
