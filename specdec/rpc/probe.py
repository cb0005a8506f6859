"""A round of a new session, by which programs other than coordinators see that a replica really computes."""

from __future__ import annotations

import secrets

import numpy as np

from specdec.contract.types import DrawRule, ProposeRequest, SamplingFilters, SessionPosition, VerifyRequest
from specdec.core.chain import ChainHasher
from specdec.rpc.client import DraftLink, TargetLink

#: Tokens of the prompt, and draft tokens that are asked for.
_NUM_TOKENS, _GAMMA = 4, 1


async def run_probe(link: DraftLink | TargetLink, vocabulary_size: int) -> None:
    """Let a replica draft or verify once for a new session, and free the session.

    Args:
        link: link to the replica.
        vocabulary_size: that of its description.

    Raises:
        SpecdecError: the replica cannot be reached, refuses the caller, or fails.
    """
    position = SessionPosition(
        session_id=f"probe-{secrets.token_hex(8)}",
        epoch=1,
        round_id=1,
        start=0,
        prefix_hash=ChainHasher().at(0),
        token_ids=np.arange(_NUM_TOKENS, dtype=np.uint32) % vocabulary_size,
        filters=SamplingFilters(temperature=0.0),
        seed=0,
        turn=0,
        output_start=_NUM_TOKENS,
        draw_rule=DrawRule.COUPLED,
        max_session_tokens=_NUM_TOKENS + _GAMMA + 1,
    )
    try:
        if isinstance(link, DraftLink):
            await link.propose(ProposeRequest(position, _GAMMA))
        else:
            await link.verify(VerifyRequest(position, np.empty(0, np.uint32), []))
    finally:
        await link.release([position.session_id])
