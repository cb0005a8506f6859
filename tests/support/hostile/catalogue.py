"""Hostile input by name: raw bytes for every port, and calls for those that serve gRPC; and honest messages.

A small message of a gRPC method may become millions of objects, or is no message at all. `clients` sends
them. Random messages, which include damaged honest ones, are made by `strategies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from specdec.contract.types import DrawRule, ProposeRequest, VerifyRequest
from specdec.rpc import codec
from specdec.rpc.framing import MAX_FRAME_ITEMS, join_items
from specdec.rpc.unix_sockets import handshake, prefixed
from specdec.v1 import coordinator_pb2 as pb
from tests.support.arithmetic_engines import make_round
from tests.support.coordinator_rig import request
from tests.support.hostile.strategies import HEADER_BLOCKS, message_field
from tests.support.raw_http2 import END_HEADERS, HEADERS, PREFACE, SETTINGS, call_bytes, frame

PROPOSE, VERIFY = "/specdec.v1.DraftService/Propose", "/specdec.v1.TargetService/Verify"
_COORDINATOR = "/specdec.v1.CoordinatorService"
GENERATE = f"{_COORDINATOR}/Generate"

#: A field 1 whose length exceeds the message.
BROKEN = b"\x0a\xff"
#: Number of fields of a message of up to 1 MB. Field 1 is a frame's item, and a session of TokenizeRequest and so on.
_MANY = 1 << 19
SESSION = message_field(1, b"s") + message_field(6, b"\x05")
_PROMPT = message_field(3, b"p")


def _item(content: bytes) -> bytes:
    return message_field(1, message_field(2, SESSION) + content)


#: Small messages of too many fields, by method.
EXPLOSIONS: dict[str, dict[str, bytes]] = {
    VERIFY: {
        "empty items": b"\x0a\x00" * _MANY,
        "unknown fields": b"\x78\x00" * _MANY,
        "unknown fields of an item": _item(b"\x78\x00" * (_MANY - 32)),
        "fields in unknown groups": message_field(1, b"\x7b\x12\x02\xff\xff\x7c" + b"\x22\x00" * (_MANY - 32)),
        "draft tokens one by one": _item(b"\x18\x00" * (_MANY - 32)),
        "draft tokens, packed one by one": _item(b"\x1a\x01\x00" * (_MANY // 2)),
        "supports again and again": _item(b"\x22\x00" * (_MANY - 32)),
        "biases": message_field(1, message_field(2, SESSION + message_field(7, b"\x42\x00" * (_MANY - 64)))),
        "a round again and again": message_field(1, b"\x12\x00" * (_MANY - 32)),
        "ids of supports": _item(message_field(4, message_field(1, b"\x01" * (_MANY - 64)))),
        "draft tokens": _item(message_field(3, b"\x01" * (_MANY - 64))),
        "items above the limit": b"\x0a\x00" * (MAX_FRAME_ITEMS + 1),
    },
    PROPOSE: {"items above the limit": b"\x0a\x00" * (MAX_FRAME_ITEMS + 1)},
    GENERATE: {
        "stop strings": _PROMPT + message_field(6, b"\x62\x00" * (_MANY - 32)),
        "messages": message_field(5, b"\x0a\x00" * (_MANY - 32)),
        "biases": _PROMPT + message_field(6, b"\x52\x00" * (_MANY - 32)),
        "sampling again and again": _PROMPT + b"\x32\x00" * (_MANY - 32),
        "inputs in turn": b"\x2a\x00\x22\x00" * (_MANY // 2 - 32),
        "stop tokens": _PROMPT + message_field(6, message_field(13, b"\x01" * (_MANY - 64))),
        "text that is not Unicode": message_field(3, b"\xff\xfe"),
    },
    f"{_COORDINATOR}/Tokenize": {"messages": message_field(2, b"\x0a\x00" * (_MANY - 32))},
    f"{_COORDINATOR}/Detokenize": {"ids one by one": b"\x08\x01" * _MANY},
    "/specdec.v1.TargetService/Release": {
        "sessions": b"\x0a\x00" * _MANY,
        "some sessions": b"\x0a\x00" * 100_000,
    },
}  # fmt: skip


@dataclass(frozen=True)
class RawBytes:
    """All that a client sends on one connection."""

    content: bytes
    answers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Pattern of the right answers, by the kind of port. Other kinds may answer anything but a fault."""


_NO_HTTP = {"http": "400 invalid_request_error"}
_HTTP = _NO_HTTP | {"metrics": "4..|CLOSED"}
_TOO_LONG = {"http": "431.*|CLOSED"}
_ENDED = {"socket": "CLOSED"}
_HTTP2 = PREFACE + frame(SETTINGS, 0, 0, b"")
_POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
#: A request whose round has 200,000 token ids, each as a field.
_MANY_FIELDS = b"\x12\x80\xb5\x18" + b"\x30\x01" * 200_000
_UNSERVED = dict.fromkeys(("grpc", "admin", "health"), "status UNIMPLEMENTED")

RAW: dict[str, RawBytes] = {
    "nothing of a protocol": RawBytes(b"nonsense\r\n\r\n", _HTTP | _ENDED),
    "HTTP/1.1": RawBytes(b"GET / HTTP/1.1\r\n\r\n", _ENDED),
    "a header with a zero byte": RawBytes(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\0b\r\n\r\n", _NO_HTTP),
    "a negative length": RawBytes(_POST + b"content-length: -5\r\n\r\n", _HTTP),
    "two lengths": RawBytes(_POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", _NO_HTTP),
    "a length of 5000 digits": RawBytes(_POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n", _NO_HTTP),
    "chunks and a length": RawBytes(
        _POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", _NO_HTTP
    ),
    "a chunk of no length": RawBytes(_POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n", _NO_HTTP),
    "200 headers": RawBytes(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", {"metrics": "4.."}),
    "a header of 2 MB": RawBytes(b"GET / HTTP/1.1\r\nx: " + b"y" * (2 << 20), _TOO_LONG),
    "headers of 2 MB": RawBytes(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * ((2 << 20) // 6), _TOO_LONG),
    "a path of 2 MB": RawBytes(b"GET /" + b"y" * (2 << 20), _TOO_LONG),
    "HTTP/2": RawBytes(_HTTP2, {"http": "505.*"} | _ENDED),
    "half of HTTP/2": RawBytes(PREFACE[:9]),
    **{
        f"headers that cannot be decoded, {block[:6]!r}": RawBytes(_HTTP2 + frame(HEADERS, END_HEADERS, 1, block))
        for block in HEADER_BLOCKS
    },
    **{
        f"the method {path[:30]!r}": RawBytes(call_bytes(path), _UNSERVED if b"specdec" in path else {})
        for path in (
            b"/specdec.v1.\xff\xfe/Generate", b"/specdec.v1.CoordinatorService/Nothing", b"\xff", b"", b"/\0",
            b"/grpc.health.v1.Health/Ch\xc3", b"/a" * 60,
        )
    },
    "no handshake": RawBytes(prefixed(b"no handshake"), _ENDED),
    "a long handshake": RawBytes(b"\xff\xff\xff\xff", _ENDED),
    "a handshake of another model": RawBytes(handshake("another model"), _ENDED),
    "a long frame": RawBytes(handshake("") + b"\xff\xff\xff\x7f", _ENDED),
    "bytes that are no frame": RawBytes(handshake("") + prefixed(b"\xff\xff\xff"), _ENDED),
    "an item of many fields": RawBytes(handshake("") + prefixed(join_items([_MANY_FIELDS])), _ENDED),
    "a frame of many items": RawBytes(handshake("") + prefixed(join_items([b""] * 2000)), _ENDED),
}  # fmt: skip


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
    messages[f"{_COORDINATOR}/Generate"] = [message.SerializeToString() for message in generations]
    messages[f"{_COORDINATOR}/GetSession"] = [pb.GetSessionRequest(session_id="s1").SerializeToString()]
    messages[f"{_COORDINATOR}/DeleteSession"] = [pb.DeleteSessionRequest(session_id="s1").SerializeToString()]
    messages[f"{_COORDINATOR}/Tokenize"] = [pb.TokenizeRequest(text="w5 w6").SerializeToString()]
    messages[f"{_COORDINATOR}/Detokenize"] = [pb.DetokenizeRequest(token_ids=[5, 6]).SerializeToString()]
    return messages
