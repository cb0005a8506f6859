"""The contract of a draft head: modules beside the target that draft from what its layers have computed.

A target that drafts locally runs two kinds of steps (`specdec.engine.base.StepPlan.local_draft`): full ones, over
committed and draft tokens, and draft steps, of one token a session, which give the distribution of the next draft
token. What a head remembers is paged like the target's own KV, in the same blocks and slots, so that rollback, shared
prefixes, forks, copies of blocks and the cold tier hold for it without knowing of it:

- **Features**: one vector of `feature_size` numbers for each token, in the token's slot. Every full step writes those
  of its tokens, from the outputs of `feature_layers` (`features`); a draft step writes what stands for them, which the
  full step that verifies the token overwrites.
- **KV** of the head's own layers, `kv_layers`, if it attends. The KV for the pair (feature of position j - 1, token j)
  lies in slot j and so depends on the tokens up to j alone, as the chain hash of a block demands. (Kept by slot j - 1,
  a block's last entry would depend on the *next* block's first token.) Every full step writes it anew for its tokens,
  through `extend`, and a draft step for the token it runs.

A round begins with KV and features of all committed tokens but the last: position n - 1 is pending, and the draft step
of `draft_index` 0 runs it, with the feature of n - 2. A session that lacks more than that (its first round here) is
verified without a draft; its full step writes what the next round needs. At position 0 the previous feature is zeros.

Who calls: `specdec.engine.heads.paged_head`, which reads and writes the slots, on the device thread, in inference mode;
it belongs to a worker (`engine.model.model_runner`, `engine.native.runner`). Heads are made by
`specdec.engine.heads.factory.load_head` before the worker takes the model apart. What a head computes is only ever q:
it may be rounded, stale or badly trained, and the output is exact all the same.

**The adapter of an early exit** is no head: it has no state. `early-exit:K:PATH` names a safetensors file, or a
directory with `adapter.safetensors`, that holds in float32, bfloat16 or float16

    weight [H, H]    bias [H]

for logits = head(weight @ norm(hidden) + bias), hidden being the output of layer K - 1, norm and head the target's own:
an affine map *after* the norm, so that it can be multiplied into the head. Untrained, it is the identity and zeros. Its
metadata may say `{"num_layers": "K"}`, which must then be the K that is asked for. `engine.model.early_exit` reads it.
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

#: Attends in one of the head's layers: (index into `kv_layers`, query [T, heads, key_dim], KV rows [T, row_width] of
#: the T tokens, scale) -> [T, heads, value_dim]. Stores the rows in the tokens' slots first. A row holds the keys of
#: all KV heads, then their values; positions are encoded already.
Attend = Callable[[int, torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head may take of the target. Only while it is made: it keeps what it needs."""

    config: PreTrainedConfig
    """Of the text model."""
    embedding: torch.Tensor
    """[rows, H]"""
    norm: Callable[[torch.Tensor], torch.Tensor]
    """The final norm: [..., H] -> [..., H]."""
    head: torch.Tensor
    """[rows, H]: of the logits."""
    vocabulary_size: int
    """Of the tokens that there are; rows beyond are masked."""
    max_context_tokens: int
    dtype: torch.dtype
    device: torch.device
    model: PreTrainedModel | None = None
    """As it was loaded, whole: for heads that its checkpoint brings."""
    project: Callable[[torch.Tensor, torch.Tensor | None], Projection] = Projection
    """Makes a product of a weight [out, in] and a bias [out]; one that can be learned through, where a head learns."""


@dataclass(frozen=True, slots=True)
class HeadTokens:
    """T tokens that a head runs, and what it knows of the place where they stand."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    previous: torch.Tensor
    """[T, F]: the feature of the position before each token; of a draft step beyond its first, what the step before
    gave for it."""
    attend: Attend


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """What a draft step gives."""

    features: torch.Tensor | None
    """[T, F]: what stands for the features of these tokens in the next draft step; None: the head reads none."""
    logits: torch.Tensor
    """float [T, V], V the target's vocabulary: of the token after each; -inf for those that the head cannot name."""


class DraftHead(Protocol):
    """One local draft's modules."""

    feature_layers: tuple[int, ...]
    """Decoder layers, counted from 0, whose outputs (before the next layer, after the residual) a full step hands
    over; ascending. The last layer's is the hidden state before the final norm."""
    feature_size: int
    """F, at least 1."""
    kv_layers: tuple[tuple[LayerShape, AttentionKind], ...]
    """What it caches and how it attends, layer by layer; () for a head that does not attend."""
    fingerprint: str
    """Of its weights: blocks pass between replicas only where it is equal."""
    max_draft_tokens: int = 0
    """Most that one draft can have; 0: as many as are asked for."""

    @property
    def layer(self) -> FeatureLayer | None:
        """All of it, where it is one decoder layer and can be told as plain weights."""
        return None

    def features(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """[T, F] of the outputs [T, H] of `feature_layers`."""
        ...

    def extend(self, tokens: HeadTokens) -> None:
        """Writes the KV of tokens that a full step has run, by calling `attend` (the result of the last layer's call is
        not needed). Not called where `kv_layers` is ()."""
        ...

    def draft(self, tokens: HeadTokens, verified: torch.Tensor, draft_index: torch.Tensor) -> HeadDraft:
        """One draft step, one token a session.

        Args:
            tokens: each of another session.
            verified: [T, F], the feature of the last position that a full step has run: n - 2.
            draft_index: int64 [T], how many draft tokens the session has before the one that is drafted now: 0 while
                its last committed token runs.
        """
        ...
