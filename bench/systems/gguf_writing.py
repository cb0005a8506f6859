"""Write a Llama checkpoint as a GGUF file, the way llama.cpp's converter does, and a GGUF file in another type.

Query and key rows are stored in the order of llama.cpp's rotary embedding, which every reader of the file undoes. It is
not a general converter: it accepts only checkpoints with a byte-level tokenizer, as the demo pair has. The `gguf`
package, which is llama.cpp's, does the rounding. Called by the suites `peers` and `real` and by the tests of GGUF
files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, LlamaConfig

_BLOCK = 32

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str = "F16",
    *,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    left_out: str = "",
    tensors_in_part: int = 0,
) -> Path:
    """Write the file and return its path.

    Args:
        checkpoint: a Llama checkpoint directory with a byte-level BPE.
        path: the file.
        kind: how matrices are stored, as `GGMLQuantizationType` names it; rows that do not fill its blocks, and
            vectors, stay float32.
        metadata: strings, numbers and truth values to store beside the checkpoint's, or instead of them.
        extra_tensors: stored besides the checkpoint's.
        left_out: a tensor, by its name in the file, that is not stored.
        tensors_in_part: most tensors of a part; 0 writes one file.
    """
    config = LlamaConfig.from_pretrained(checkpoint)
    writer = GGUFWriter(path, "llama", split_max_tensors=tensors_in_part)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, checkpoint)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)  # a value of the checkpoint's gives way
        add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}.get(
            type(value), writer.add_uint32
        )
        add(key, value)
    for name, array in (_tensors(checkpoint, config) | dict(extra_tensors or {})).items():
        if name != left_out:
            _add_tensor(writer, name, array, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, kind: GGMLQuantizationType) -> None:
    is_plain = array.ndim == 1 or array.shape[-1] % _BLOCK
    stored = GGMLQuantizationType.F32 if is_plain else kind
    writer.add_tensor(name, quantize(array, stored), raw_dtype=stored)


def _tensors(checkpoint: Path, config: LlamaConfig) -> dict[str, np.ndarray]:
    state = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    arrays = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        arrays["output.weight"] = state["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for name, stored in _NAMES.items():
            arrays[f"blk.{layer}.{stored}.weight"] = state[f"model.layers.{layer}.{name}.weight"]
        for stored, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            weight = arrays[f"blk.{layer}.{stored}.weight"]
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
            arrays[f"blk.{layer}.{stored}.weight"] = halves.swapaxes(1, 2).reshape(weight.shape)
    return {name: tensor.contiguous().numpy() for name, tensor in arrays.items()}


def add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    """Write the byte-level tokenizer of a checkpoint."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    token_to_id = tokenizer["model"]["vocab"] | added
    tokens = sorted(token_to_id, key=token_to_id.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in added else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(added[settings["bos_token"]])
    writer.add_eos_token_id(added[settings["eos_token"]])
    writer.add_pad_token_id(added[settings["pad_token"]])
    writer.add_add_bos_token(True)
    if (template := checkpoint / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())


def rewrite(source: Path, path: Path, kind: str) -> Path:
    """Copy everything but the matrices' type; return `path`.

    Args:
        source: a GGUF file.
        path: the new one.
        kind: `F16`, `BF16` or `Q8_0`. Vectors, and matrices whose rows fill no whole blocks, stay float32, rounded to
            `kind` where that is a float: the model has no more digits elsewhere than in its other matrices.
    """
    stored = GGMLQuantizationType[kind]
    block_size, _ = GGML_QUANT_SIZES[stored]
    reader = GGUFReader(source)
    writer = GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            kinds = field.types
            sub_type = kinds[-1] if kinds[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1 and values.shape[-1] % block_size == 0:
            writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
        else:
            rounded = values if kind == "Q8_0" else dequantize(quantize(values, stored), stored)
            writer.add_tensor(tensor.name, rounded.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
