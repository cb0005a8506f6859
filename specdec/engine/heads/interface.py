"""Contract of a draft head: modules beside the target that draft from the outputs of its layers.

A target that drafts locally runs two kinds of steps (`specdec.engine.base.StepPlan.local_draft`): full steps over
committed and draft tokens, and draft steps of one token a session, which give the distribution of the next draft token.
A head's state is paged like the target's own KV, in the same blocks and slots. So rollback, shared prefixes, forks,
block copies and the cold tier apply to it without extra code:

- **Features**: one vector of `feature_size` numbers for each token, in the token's slot. Every full step writes those
  of its tokens, computed by `features` from the outputs of `feature_layers`. A draft step writes an approximation,
  which the full step that verifies the token overwrites.
- **KV** of the head's own layers, `kv_layers`, if it attends. The KV of the pair (feature of position j - 1, token j)
  is in slot j and so depends on the tokens up to j alone, which the chain hash of a block requires. (In slot j - 1, a
  block's last entry would depend on the *next* block's first token.) Every full step writes it again for its tokens, by
  `extend`, and a draft step for the token it runs.

A round starts with KV and features of all committed tokens except the last: position n - 1 is pending, and the draft
step of `draft_index` 0 runs it, with the feature of n - 2. A session that lacks more than that (in its first round on
this replica) is verified without a draft; its full step writes what the next round needs. At position 0 the previous
feature is zeros.

`specdec.engine.heads.paged_head`, which reads and writes the slots, calls a head on the device thread in inference
mode, for a worker (`engine.model.model_runner`, `engine.native.native_runner`).
`specdec.engine.heads.factory.load_head` makes heads before the worker takes the model apart. A head only changes q: it
may be rounded, stale or badly trained, and the output is exact nevertheless.

**The adapter of an early exit** has no state and is not a head. `early-exit:K:PATH` names a safetensors file, or a
directory with `adapter.safetensors`, that holds in float32, bfloat16 or float16

    weight [H, H]    bias [H]

for logits = head(weight @ norm(hidden) + bias), where hidden is the output of layer K - 1, and norm and head are the
target's own. The affine map comes *after* the norm, so that it can be multiplied into the head. Untrained, it is the
identity and zeros. Its metadata may contain `{"num_layers": "K"}`, which must then be the requested K.
`engine.model.early_exit` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.engine.linear.projection import Projection
from specdec.engine.model.batch import AttentionKind
from specdec.engine.model.feature_layer import FeatureLayer
from specdec.engine.model.kv_cache import LayerShape

#: Attention of one of the head's layers: (index into `kv_layers`, query [T, heads, key_dim], KV rows [T, row_width] of
#: the T tokens, scale) -> [T, heads, value_dim]. It stores the rows in the tokens' slots first. A row holds the keys of
#: all KV heads, then their values; positions are encoded already.
Attend = Callable[[int, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Parts of the target from which a head is made; the head keeps those that it needs."""

    config: PreTrainedConfig
    """Configuration of the text model."""
    embedding: torch.Tensor
    """Embedding [rows, H]."""
    norm: Callable[[torch.Tensor], torch.Tensor]
    """Final norm: [..., H] -> [..., H]."""
    head: torch.Tensor
    """Weight [rows, H] of the logits."""
    vocabulary_size: int
    """Number of tokens; rows beyond are masked."""
    max_context_tokens: int
    dtype: torch.dtype
    device: torch.device
    model: PreTrainedModel | None = None
    """The loaded model, for heads that its checkpoint contains."""
    project: Callable[[torch.Tensor, torch.Tensor | None], Projection] = Projection
    """Makes a linear layer of a weight [out, in] and a bias [out]; a differentiable one for training."""


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """T tokens that a head runs, with their positions and context."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    previous: torch.Tensor
    """[T, F]: feature of the position before each token. In a draft step other than the first it is the approximation
    that the previous draft step returned."""
    attend: Attend


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """Result of a draft step."""

    features: torch.Tensor | None
    """[T, F]: approximate features of these tokens for the next draft step; None if the head reads none."""
    logits: torch.Tensor
    """float [T, V], V the target's vocabulary: logits of the next token; -inf for tokens that the head lacks."""


class DraftHead(Protocol):
    """One local draft's modules."""

    feature_layers: tuple[int, ...]
    """Indices, ascending, of the decoder layers whose outputs (before the next layer, after the residual) a full step
    passes on. The last layer's output is the hidden state before the final norm."""
    feature_size: int
    """F, at least 1."""
    kv_layers: tuple[tuple[LayerShape, AttentionKind], ...]
    """Cache shape and attention kind of each layer; () for a head that does not attend."""
    fingerprint: str
    """Fingerprint of the weights: replicas exchange blocks only if it is equal."""
    max_draft_tokens: int = 0
    """Most tokens of one draft; 0 if there is no limit."""

    @property
    def layer(self) -> FeatureLayer | None:
        """The head's weights if it is one decoder layer that `FeatureLayer` describes; else None."""
        return None

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the features [T, F] for the outputs [T, H] of `feature_layers`."""
        ...

    def extend(self, tokens: HeadTokens) -> None:
        """Write the KV of tokens that a full step has run, by calling `attend`; the last layer's result is not needed.

        Not called if `kv_layers` is ().
        """
        ...

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        """Run one draft step of one token a session.

        Args:
            tokens: tokens of different sessions.
            verified: [T, F], feature of the last position that a full step has run: n - 2.
            draft_index: int64 [T], number of the session's draft tokens before the one that is drafted now; 0 while its
                last committed token runs.
        """
        ...
