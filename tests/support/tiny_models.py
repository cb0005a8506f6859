"""Tiny random checkpoints of every supported architecture, saved the way Hugging Face saves real ones.

Not trained, not fixtures: each call writes one self-contained directory (config, safetensors, tokenizer.json,
tokenizer_config, generation_config). Weights are scaled so that logits have real spread: greedy text wanders, and two
top logits within 1e-4 of each other are rare. A *perturbed copy* (same seed, `perturb` above 0) is a draft that really
gets accepted and rejected. Called by tests that need a model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.tiny_hybrids import HYBRIDS

#: Smaller than the contexts tests use, and no multiple of the KV block, so that windows really cut.
SLIDING_WINDOW = 24
UNK_TOKEN_ID = 0
EOS_TOKEN_ID = 1

_Sizes = dict[str, Any]


def _llama_like(sizes: _Sizes) -> _Sizes:
    return {
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "intermediate_size": sizes["mlp"],
        "max_position_embeddings": sizes["context"],
        "tie_word_embeddings": False,
    }


def _gemma_like(sizes: _Sizes) -> _Sizes:
    alternating = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(sizes["layers"])]
    return _llama_like(sizes) | {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": SLIDING_WINDOW,
        "layer_types": alternating,
    }


def _opt(sizes: _Sizes) -> _Sizes:
    return {
        "hidden_size": sizes["hidden"],
        "word_embed_proj_dim": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "ffn_dim": sizes["mlp"],
        "max_position_embeddings": sizes["context"],
    }


def _gpt2(sizes: _Sizes) -> _Sizes:
    return {
        "n_embd": sizes["hidden"],
        "n_layer": sizes["layers"],
        "n_head": sizes["heads"],
        "n_inner": sizes["mlp"],
        "n_positions": sizes["context"],
    }


def _without_kv_heads(sizes: _Sizes) -> _Sizes:
    return {name: value for name, value in _llama_like(sizes).items() if name != "num_key_value_heads"}


_CONFIGS: dict[str, tuple[type[PreTrainedConfig], Callable[[_Sizes], _Sizes]]] = {
    "llama": (LlamaConfig, _llama_like),
    "qwen2": (Qwen2Config, _llama_like),
    "qwen3": (Qwen3Config, lambda sizes: _llama_like(sizes) | {"head_dim": 24}),
    "mistral": (MistralConfig, lambda sizes: _llama_like(sizes) | {"sliding_window": SLIDING_WINDOW}),
    "mixtral": (MixtralConfig, lambda sizes: _llama_like(sizes) | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (GPT2Config, _gpt2),
    "gemma2": (
        Gemma2Config,
        lambda sizes: _gemma_like(sizes) | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (Gemma3TextConfig, _gemma_like),
    "phi": (PhiConfig, _llama_like),
    "phi3": (Phi3Config, _llama_like),
    "gpt_neox": (GPTNeoXConfig, _without_kv_heads),
    "opt": (OPTConfig, _opt),
    **HYBRIDS,
}

#: The ten architectures whose greedy output is promised, then two close relatives.
ARCHITECTURES: tuple[str, ...] = (
    "llama",
    "qwen3",
    "mistral",
    "mixtral",
    "gpt2",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt_neox",
    "opt",
    "qwen2",
    "phi",
)

#: `perturb` for a draft whose greedy choices agree with the unperturbed target's about two times in three (measured
#: over 20 prompts of 128 tokens).
DRAFT_PERTURBATION: dict[str, float] = dict.fromkeys(ARCHITECTURES, 0.03) | {
    "mixtral": 0.02,
    "gpt_neox": 0.02,
    "qwen3": 0.04,
    "phi": 0.04,
    "opt": 0.05,
    "gemma2": 0.05,
    "gemma3": 0.06,
}


#: Gated MLPs amplify more than plain ones: rounding errors must stay well under a tie's 1e-4.
_GAIN: dict[str, float] = dict.fromkeys(("llama", "qwen2", "mistral", "mixtral", "phi3"), 1.5) | {"gpt_neox": 3.0}


def build_tiny_model(
    architecture: str,
    directory: str | Path,
    *,
    seed: int = 0,
    vocabulary_size: int = 256,
    perturb: float = 0.0,
    num_layers: int = 3,
    context: int = 512,
    padded_rows: int = 0,
    eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,),
    logit_spread: float = 4.0,
    gain: float | None = None,
    dtype: torch.dtype = torch.float32,
    chat_template: str | None = None,
    config_overrides: dict[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint directory of a random model and returns it.

    Args:
        architecture: one of `ARCHITECTURES`.
        directory: made if absent.
        seed: equal seeds give equal weights; a draft is the same seed with `perturb` above 0.
        vocabulary_size: entries of the tokenizer's map: `<unk>`, `</s>`, then the words w2, w3, ...
        perturb: standard deviation of the noise added to every matrix, in units of the matrix's own.
        num_layers: decoder layers.
        context: positions the model has.
        padded_rows: embedding rows beyond the tokenizer's map, as real checkpoints have.
        eos_token_ids: written to generation_config; one is written as a plain int. The default id practically never
            wins, so that outputs reach their length; other ids win as often as any.
        logit_spread: standard deviation of a row of logits, about.
        gain: of every layer's matrices; more makes text wander more and rounding errors grow more from layer to layer.
        dtype: of the stored weights.
        chat_template: stored with the tokenizer.
        config_overrides: set on the configuration last.
    """
    directory = Path(directory)
    config_class, arguments = _CONFIGS[architecture]
    sizes = {"hidden": 64, "layers": num_layers, "heads": 4, "kv_heads": 2, "mlp": 112, "context": context}
    special_ids = {"bos_token_id": None, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": None}
    settings = arguments(sizes) | special_ids | {"vocab_size": vocabulary_size + padded_rows}
    config = config_class(**(settings | (config_overrides or {})))
    with torch.random.fork_rng():  # some models draw vectors, which keep their values
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    _scale_weights(model, torch.Generator().manual_seed(seed), logit_spread, gain or _GAIN.get(architecture, 2.0))
    if perturb > 0:
        _perturb_weights(model, torch.Generator().manual_seed(seed + 1), perturb)
    ids = list(eos_token_ids)
    model.generation_config = GenerationConfig(eos_token_id=ids[0] if len(ids) == 1 else ids, do_sample=False)
    model.to(dtype).save_pretrained(directory)
    save_tokenizer(directory, vocabulary_size, chat_template)
    return directory


def build_tiny_pair(architecture: str, directory: str | Path, *, seed: int = 0, **options: Any) -> tuple[Path, Path]:
    """A target and its perturbed copy as draft: `(target directory, draft directory)` under `directory`."""
    perturb = options.pop("perturb", DRAFT_PERTURBATION.get(architecture, 0.03))
    target = build_tiny_model(architecture, Path(directory) / "target", seed=seed, **options)
    draft = build_tiny_model(architecture, Path(directory) / "draft", seed=seed, perturb=perturb, **options)
    return target, draft


@torch.no_grad()
def _scale_weights(model: torch.nn.Module, generator: torch.Generator, logit_spread: float, gain: float) -> None:
    """Draws every matrix afresh with a high gain, so that layers, not the last token's embedding, decide the output."""
    head = model.get_output_embeddings().weight
    embed_scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            # Norm gains stay near their neutral value, biases near 0; neither is left where a mistake would not show.
            parameter.add_(noise, alpha=0.1)
        elif parameter is head:
            parameter.copy_(noise * (logit_spread / parameter.shape[1] ** 0.5))
            parameter[EOS_TOKEN_ID] = 0.0
        elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
            # Gemma multiplies by its embed_scale; left in, the last token would drown the layers and repeat itself.
            parameter.copy_(noise / embed_scale)
        else:
            # Conv1D (GPT-2) stores [in, out]; everything else [..., out, in].
            fan_in = parameter.shape[0] if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else -1
            fan_in = parameter.shape[-1] if fan_in == -1 else fan_in
            parameter.copy_(noise * (gain / fan_in**0.5))


@torch.no_grad()
def _perturb_weights(model: torch.nn.Module, generator: torch.Generator, perturb: float) -> None:
    for _name, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            noise = torch.randn(parameter.shape, generator=generator)
            eos_untouched = (parameter.abs().sum(-1, keepdim=True) > 0).to(parameter.dtype)
            parameter.add_(noise * parameter.std() * eos_untouched, alpha=perturb)


def save_tokenizer(directory: Path, vocabulary_size: int, chat_template: str | None = None) -> None:
    token_to_id = {"<unk>": UNK_TOKEN_ID, "</s>": EOS_TOKEN_ID}
    token_to_id |= {f"w{token_id}": token_id for token_id in range(2, vocabulary_size)}
    backend = Tokenizer(WordLevel(token_to_id, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
