"""Runs a draft head over one sequence as a target does, with a dense cache: full steps first, then draft steps.

Not the paged cache (`specdec.engine.heads.paged_head`), whose tests run whole workers: here a head's own arithmetic is
looked at alone. Called by the tests of heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.engine.heads.interface import DraftHead, HeadTokens


class HeadDrive:
    """A head behind a sequence whose last token the target has not run."""

    def __init__(
        self, head: DraftHead, token_ids: list[int], hidden: list[torch.Tensor], chunk: int, shift: int = 1
    ) -> None:
        """Runs the full steps.

        Args:
            head: of the target that `hidden` is of.
            token_ids: the sequence.
            hidden: the target's hidden states of all tokens but the last, numbered as Transformers does.
            chunk: tokens of a full step.
            shift: how far before its token the feature stands that a token is given; 1 is right.
        """
        self._head, self._token_ids = head, token_ids
        self._rows: list[torch.Tensor | None] = [None] * len(head.kv_layers)
        outputs = [state.float() for state in hidden[1:]]
        self.features = head.features([outputs[layer] for layer in head.feature_layers])  # [T - 1, F]
        previous = torch.cat((torch.zeros(1, head.feature_size), self.features))
        self.previous = torch.roll(previous, shift - 1, dims=0)  # [T, F]
        for start in range(0, len(self.features), chunk):
            self.extend(start, min(start + chunk, len(self.features)))

    def extend(self, start: int, end: int) -> None:
        """Writes the head's KV of positions [start, end)."""
        if self._head.kv_layers:
            self._head.extend(self._tokens(self._token_ids[start:end], start, self.previous[start:end]))

    def draft(self, num_drafts: int, drafted: Sequence[int] = ()) -> torch.Tensor:
        """Drafts behind the sequence, of the tokens `drafted` and then greedy ones: [num_drafts, V] logits."""
        token, previous, rows = self._token_ids[-1], self.previous[-1:], []
        for index in range(num_drafts):
            tokens = self._tokens([token], len(self._token_ids) - 1 + index, previous)
            step = self._head.draft(tokens, self.features[-1:], torch.tensor([index]))
            previous = previous if step.features is None else step.features
            rows.append(step.logits[0])
            token = drafted[index] if index < len(drafted) else int(rows[-1].argmax())
        return torch.stack(rows)

    def _tokens(self, token_ids: list[int], start: int, previous: torch.Tensor) -> HeadTokens:
        positions = torch.arange(start, start + len(token_ids))

        def attend(layer: int, query: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
            shape, kind = self._head.kv_layers[layer]
            before = self._rows[layer]
            kept = rows[:0] if before is None else before[:start]
            self._rows[layer] = everything = torch.cat((kept, rows))
            keys, values = everything.split([shape.num_kv_heads * dim for dim in (shape.key_dim, shape.value_dim)], 1)
            keys = keys.view(-1, shape.num_kv_heads, shape.key_dim).transpose(0, 1)
            values = values.view(-1, shape.num_kv_heads, shape.value_dim).transpose(0, 1)
            behind = positions[:, None] - torch.arange(len(everything))
            seen = (behind >= 0) & (behind < (kind.window or len(everything)))
            return scaled_dot_product_attention(
                query.transpose(0, 1), keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            ).transpose(0, 1)

        return HeadTokens(torch.tensor(token_ids), positions, previous, attend)
