"""Strategies for the bytes of whole connections to an HTTP port: hostile bodies of its routes, and broken requests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.support.hostile_messages import damaged, damages

_ROUTES = (
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/v1/models"),
    ("GET", "/v1/models/x"), ("GET", "/v1/sessions/s1"), ("DELETE", "/v1/sessions/s1"), ("GET", "/v1/responses/r"),
    ("DELETE", "/v1/responses/r"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/"), ("GET", "/version"),
)  # fmt: skip
_POSTS = tuple(route for route in _ROUTES if route[0] == "POST")
_KEYS = (
    "model", "prompt", "messages", "input", "max_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "n",
    "stop", "seed", "logit_bias", "logprobs", "stream", "stream_options", "session_id", "speculation", "tokens",
    "tools", "system", "instructions", "previous_response_id", "echo", "ignore_eos", "metadata", "user", "store",
)  # fmt: skip
_MESSAGES = [{"role": "user", "content": "w5 w6"}]
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 0.5, 1e400, float("nan"), 10**30, 2**32, 2**64, "", "w5 w6", "target", "x" * 5000,
    "\ud800", "\0", [], {}, [5, 6, 7], [[5], [6]], [5, "x"], ["w5", "w6"], [-1], [2**32], _MESSAGES,
    [{"role": "user"}], [{"role": "system", "content": [{"type": "text", "text": "w5"}]}], {"5": 1}, {"5": 1e39},
    {"x": {}}, {"mode": "coupled"}, {"mode": "off", "gamma": 2}, {"gamma": -1}, [[[[[[[[]]]]]]]],
)  # fmt: skip
_HEADERS = (
    b"content-type: application/json", b"content-type: text/plain", b"content-type: application/json; charset=\xff",
    b"content-encoding: gzip", b"authorization: Bearer x", b"authorization: \xff", b"last-event-id: s1:5",
    b"last-event-id: -1", b"specdec-timeout: 0.01", b"specdec-timeout: nan", b"expect: 100-continue",
    b"upgrade: websocket\r\nconnection: upgrade", b"transfer-encoding: chunked", b"transfer-encoding: x",
    b"content-length: -1", b"content-length: 99999999999999", b"x-request-id: " + b"y" * 3000, b"traceparent: 00-zz",
    b"origin: null", b"accept: \xff", b" folded", b"no-colon", b"x:\0", b"host: a\r\nhost: b",
)  # fmt: skip

_values: SearchStrategy[Any] = st.one_of(
    st.sampled_from(_VALUES),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from((*_KEYS, "role", "content")), inner, max_size=4),
        ),
        max_leaves=8,
    ),
)
#: What most routes answer, so that single hostile fields beside it are reached.
_SERVED = {"prompt": "w5 w6", "messages": _MESSAGES, "input": "w5 w6", "tokens": [5, 6], "max_tokens": 2}

_bodies: SearchStrategy[bytes] = st.one_of(
    st.dictionaries(st.sampled_from(_KEYS), _values, max_size=5).map(lambda made: json.dumps(made).encode()),
    st.builds(
        lambda route, made: json.dumps({**_served_at(route), **made}).encode(),
        st.sampled_from(_POSTS),
        st.dictionaries(st.sampled_from(_KEYS), _values, max_size=2),
    ),
    st.builds(
        lambda route, damage: damaged(json.dumps(_served_at(route)).encode(), damage), st.sampled_from(_POSTS), damages
    ),
    st.binary(max_size=60),
    st.sampled_from(
        (b"", b"[" * 3000, b"{}", b"null", b'{"prompt":', b'{"a":1,"a":2}', b"\xff\xfe{\0}\0", b"1" * 5000)
    ),
)


def _served_at(route: tuple[str, str]) -> dict[str, Any]:
    if "tokenize" in route[1]:
        return {"prompt": "w5"} if route[1] == "/tokenize" else {"tokens": [5, 6]}
    kind = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(route[1], "messages")
    limit = "max_output_tokens" if kind == "input" else "max_tokens"
    return {kind: _SERVED[kind], limit: 2}


def _request(route: tuple[str, str], body: bytes, headers: list[bytes], *, states_length: bool) -> bytes:
    lines = [f"{route[0]} {route[1]} HTTP/1.1".encode(), b"host: localhost", b"connection: close", *headers]
    if states_length:
        lines.append(f"content-length: {len(body)}".encode())
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def connections() -> SearchStrategy[bytes]:
    """Return a strategy for all that a client sends on one connection."""
    json_type = [b"content-type: application/json"]
    posts = st.builds(
        lambda route, body: _request(route, body, json_type, states_length=True), st.sampled_from(_POSTS), _bodies
    )
    headers = st.lists(st.one_of(st.sampled_from(_HEADERS), st.binary(max_size=40)), max_size=4)
    requests = st.builds(
        lambda route, body, headers, states_length: _request(route, body, headers, states_length=states_length),
        st.sampled_from(_ROUTES), _bodies, headers, st.booleans(),
    )  # fmt: skip
    return st.one_of(posts, posts, requests, st.builds(damaged, posts, damages), st.binary(max_size=120))
