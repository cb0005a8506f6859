"""Log-probabilities of tokens in the two shapes of OpenAI's API: that of chat, and that of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.client import TokenDetail

#: The least log-probability that JSON gets, which has no infinity; vLLM's.
_LEAST = -9999.0


def chat_logprobs(details: Sequence[TokenDetail]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    content = []
    for detail in details:
        tops = [_entry(top.token_bytes, top.logprob) for top in detail.top_logprobs]
        content.append(_entry(detail.token_bytes, detail.logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def completion_logprobs(details: Sequence[TokenDetail], first_offset: int) -> dict[str, Any]:
    """Return the `logprobs` object of a completion choice.

    Args:
        details: tokens of the choice or of one chunk of it.
        first_offset: characters of the choice's text before these tokens.
    """
    tokens, values, tops, offsets = [], [], [], []
    offset = first_offset
    for detail in details:
        token, value = _name(detail.token_bytes), _finite(detail.logprob)
        tokens.append(token)
        values.append(value)
        top_tokens = {_name(top.token_bytes): _finite(top.logprob) for top in detail.top_logprobs}
        tops.append({token: value} | top_tokens)
        offsets.append(offset)
        offset += len(detail.text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _entry(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _name(token_bytes: bytes) -> str:
    """Return a token as text; a part of a character as OpenAI's completions spell it: `bytes:\\xe2\\x82`.

    U+FFFD would be the name of every such token, and the object of top tokens has one entry a name.
    """
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _text(token_bytes: bytes) -> str:
    """Return a token as text. A token may be a part of a character, which the field `bytes` of chat tells."""
    return token_bytes.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(logprob, _LEAST)
