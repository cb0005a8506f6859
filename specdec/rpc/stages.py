"""The stages of a call (`specdec.contract.types.Stages`) in a reply.

Clocks of two machines differ, so a replica states microseconds since it had read the frame with the call. Written by
`specdec.rpc.replica_servicer` and, for the last stage, by `specdec.rpc.frames`; read by `specdec.rpc.proposals` and
`specdec.rpc.verifications`. `coordinator.round.timeline` places them between the coordinator's own times.
"""

from __future__ import annotations

from typing import Any

from specdec.contract.types import Stages
from specdec.v1 import common_pb2

_MICROSECOND_S = 1e-6
_MOST_US = (1 << 32) - 1


def encode_stages(stages: Stages, message: common_pb2.Stages) -> None:
    """Fill an empty message, except for the time of sending, which `note_sent` adds.

    A stage that ended before the frame was received, as for a repeated call, counts as ended at that moment.
    """
    at_us = 0
    for field, at_s in (
        ("decoded_us", stages.decoded_s),
        ("admitted_us", stages.admitted_s),
        ("step_began_us", stages.step_began_s),
        ("step_ended_us", stages.step_ended_s),
        ("answered_us", stages.answered_s),
        ("encoded_us", stages.encoded_s),
    ):
        at_us = max(at_us, _microseconds(at_s - stages.received_s))
        setattr(message, field, at_us)


def note_sent(reply: Any, seconds: float) -> None:
    """Add the time of sending, `seconds` after the call was received, to a reply that states its stages."""
    if reply.HasField("stages"):
        reply.stages.sent_us = max(reply.stages.encoded_us, _microseconds(seconds))


def decode_stages(message: common_pb2.Stages) -> Stages:
    """Return the stages on a clock that began when the frame had been read."""
    return Stages(
        admitted_s=message.admitted_us * _MICROSECOND_S,
        step_began_s=message.step_began_us * _MICROSECOND_S,
        step_ended_s=message.step_ended_us * _MICROSECOND_S,
        decoded_s=message.decoded_us * _MICROSECOND_S,
        answered_s=message.answered_us * _MICROSECOND_S,
        encoded_s=message.encoded_us * _MICROSECOND_S,
        sent_s=message.sent_us * _MICROSECOND_S,
    )


def _microseconds(seconds: float) -> int:
    return min(_MOST_US, max(0, round(seconds / _MICROSECOND_S)))
