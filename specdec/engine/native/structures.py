"""The kernels' structures, field by field as in `kernels/layout.h`, which describes the fields."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p


class Product(Structure):
    """A linear layer."""

    _fields_ = [
        ("weights", c_void_p),
        ("format", c_int64),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("rest", c_void_p),
        ("rest_from", c_int64),
    ]


class Layer(Structure):
    """A decoder layer."""

    _fields_ = [
        ("qkv", Product),
        ("output", Product),
        ("gate_up", Product),
        ("down", Product),
        ("attention_gains", c_void_p),
        ("mlp_gains", c_void_p),
        ("qk_gains", c_void_p),
        ("cache", c_void_p),
        ("window", c_int64),
        ("mark", c_int64),
        ("unseen", c_float),
    ]


class Model(Structure):
    """A model, or the first layers of a model."""

    _fields_ = [
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("mlp", c_int64),
        ("embeddings", c_void_p),
        ("embedding_format", c_int64),
        ("embedding_row_bytes", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("final_gains", c_void_p),
        ("head", Product),
        ("epsilon", c_float),
        ("qk_epsilon", c_float),
        ("scaling", c_float),
        ("tapped", c_void_p),
        ("num_tapped", c_int64),
        ("draft_heads", c_void_p),
        ("num_draft_heads", c_int64),
    ]


class HeadStructure(Structure):
    """A draft head with one decoder layer."""

    _fields_ = [
        ("model", Model),
        ("features_of", Product),
        ("taps", c_void_p),
        ("num_taps", c_int64),
        ("feature_gains", c_void_p),
        ("features", c_void_p),
        ("adds_normed", c_int64),
        ("keeps_normed", c_int64),
    ]


class Batch(Structure):
    """The batch of one step."""

    _fields_ = [
        ("tokens", c_int64),
        ("sequences", c_int64),
        ("logit_rows", c_int64),
        ("first_row", c_void_p),
        ("start", c_void_p),
        ("tables", c_void_p),
        ("table_offset", c_void_p),
        ("rows_wanted", c_void_p),
        ("token_ids", c_void_p),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("gate_up", c_void_p),
        ("joined", c_void_p),
        ("integers", c_void_p),
        ("row_scales", c_void_p),
        ("scores", c_void_p),
        ("scores_width", c_int64),
        ("logits", c_void_p),
        ("outputs", c_void_p),
    ]


class MultiStep(Structure):
    """A multi-step draft with greedy tokens."""

    _fields_ = [
        ("steps", c_int64),
        ("num_tokens", c_int64),
        ("rows", c_void_p),
        ("starts", c_void_p),
        ("token_ids", c_void_p),
        ("logits", c_void_p),
    ]
