"""Messages that services serve, as bytes by method: what hostile ones are made of by damage."""

from __future__ import annotations

import numpy as np

from specdec.contract.types import DrawRule, ProposeRequest, VerifyRequest
from specdec.rpc import codec
from specdec.rpc.framing import join_items
from specdec.v1 import coordinator_pb2 as pb
from tests.support.arithmetic_engines import make_round
from tests.support.coordinator_rig import request

PROPOSE, VERIFY = "/specdec.v1.DraftService/Propose", "/specdec.v1.TargetService/Verify"
COORDINATOR = "/specdec.v1.CoordinatorService"


def honest_frames() -> list[tuple[str, bytes]]:
    """Return frames of three sessions each, with both kinds of round."""
    rounds = [make_round(f"s{index}", num_tokens=4, draw_rule=DrawRule.COUPLED) for index in range(3)]
    asked = [codec.encode_propose_request(ProposeRequest(round_, 2), index) for index, round_ in enumerate(rounds)]
    drafts = np.array([3, 4], np.uint32)
    to_verify = [
        codec.encode_verify_request(VerifyRequest(round_, drafts, ()), index) for index, round_ in enumerate(rounds)
    ]
    return [
        (PROPOSE, join_items([message.SerializeToString() for message in asked])),
        (VERIFY, join_items([message.SerializeToString() for message in to_verify])),
    ]


def honest_messages() -> dict[str, list[bytes]]:
    """Return messages by method: rounds, generations in all modes, and calls of the text service."""
    generations = [
        request(max_new_tokens=8, mode=mode, session_id=session_id, temperature=temperature)
        for mode in pb.SpeculationMode.values()
        for session_id, temperature in (("", 0.0), ("s1", 1.0))
    ]
    generations += [
        pb.GenerateRequest(prompt="w5 w6", sampling=pb.SamplingParams(max_new_tokens=4, stop=["w9"], logprobs=2)),
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="w5")])),
        pb.GenerateRequest(session_id="s1", resume_from=1),
    ]
    messages = {method: [content] for method, content in honest_frames()}
    messages[f"{COORDINATOR}/Generate"] = [message.SerializeToString() for message in generations]
    messages[f"{COORDINATOR}/GetSession"] = [pb.GetSessionRequest(session_id="s1").SerializeToString()]
    messages[f"{COORDINATOR}/DeleteSession"] = [pb.DeleteSessionRequest(session_id="s1").SerializeToString()]
    messages[f"{COORDINATOR}/Tokenize"] = [pb.TokenizeRequest(text="w5 w6").SerializeToString()]
    messages[f"{COORDINATOR}/Detokenize"] = [pb.DetokenizeRequest(token_ids=[5, 6]).SerializeToString()]
    return messages
