"""Key files: the keys of tenants, operators and services, hashed, with their rights and limits.

A key file has one key a line: `SHA256 TENANT RIGHTS [LIMITS]`. SHA256 is the key's hash in hexadecimal. RIGHTS are
`generate`, `operate` and `service`, joined by commas. LIMITS are joined by commas: `concurrent=N` (requests at once),
`rpm=N` (requests a minute), `tpm=N` (tokens a minute), `sessions=N`, `prompt_tokens=N` and `reserved_tokens=N` (tokens
that the requests at once may reach). Lines that are empty or begin with # are skipped.
"""

from __future__ import annotations

import hashlib

from specdec.access.grants import RIGHTS, Access, Limits
from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import check_tenant

_HASH_CHARACTERS = 64
_MAX_LIMIT = (1 << 31) - 1
_MAX_DIGITS = 10

#: Field of `Limits` by the name of the limit in a key file.
_LIMITS = {
    "concurrent": "max_concurrent",
    "rpm": "max_requests_per_minute",
    "tpm": "max_tokens_per_minute",
    "sessions": "max_sessions",
    "prompt_tokens": "max_prompt_tokens",
    "reserved_tokens": "max_reserved_tokens",
}


def parse_keys(text: str) -> dict[str, Access]:
    """Return the keys of a key file, by hash.

    Raises:
        InvalidRequest: a line is malformed; the message has its number and never its hash.
    """
    keys: dict[str, Access] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            access = _parse_line(words)
        except (ValueError, InvalidRequest) as error:
            raise InvalidRequest(f"api_keys: line {number}: {error}", field="api_keys") from None
        if access.key_hash in keys:
            raise InvalidRequest(f"api_keys: line {number}: this key has a line before", field="api_keys")
        keys[access.key_hash] = access
    return keys


def hash_key(key: str) -> str:
    """Return the hash by which a key is stored and found."""
    return hashlib.sha256(key.encode()).hexdigest()


def _parse_line(words: list[str]) -> Access:
    if not 3 <= len(words) <= 4:
        raise ValueError(f"must be SHA256 TENANT RIGHTS [LIMITS], got {len(words)} words")
    key_hash, tenant, rights = words[0].lower(), check_tenant(words[1]), frozenset(words[2].split(","))
    if len(key_hash) != _HASH_CHARACTERS or not set(key_hash) <= set("0123456789abcdef"):
        raise ValueError(f"the key's SHA-256 must be {_HASH_CHARACTERS} hexadecimal digits")
    if not rights <= RIGHTS:
        raise ValueError(f"rights must be among {', '.join(sorted(RIGHTS))}, got {words[2][:64]!r}")
    limits = _parse_limits(words[3]) if len(words) == 4 else Limits()
    return Access(tenant, rights, limits, key_hash)


def _parse_limits(text: str) -> Limits:
    limits = {}
    for limit in text.split(","):
        name, _, number = limit.partition("=")
        is_number = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS
        if name not in _LIMITS or not is_number or not 0 < int(number) <= _MAX_LIMIT:
            *names, last = (f"{each}=N" for each in _LIMITS)
            raise ValueError(f"a limit must be {', '.join(names)} or {last} with N of 1 or more, got {limit[:64]!r}")
        limits[_LIMITS[name]] = int(number)
    return Limits(**limits)
