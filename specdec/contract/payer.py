"""The payer of a turn: what a usage record names besides the tenant, and how a gateway states it to a coordinator."""

from __future__ import annotations

import re
from typing import NamedTuple

from specdec.contract.errors import InvalidRequest

#: gRPC metadata key that names the id of the API key a call is made for. It is believed of callers that may name
#: tenants, and of anyone on a coordinator without keys.
KEY_ID_KEY = "specdec-key-id"

#: Number of hexadecimal digits of a key's SHA-256 that make its id: enough to find its line in a key file.
_KEY_ID_CHARS = 16

_KEY_ID = re.compile(rf"[0-9a-f]{{{_KEY_ID_CHARS}}}")


class Payer(NamedTuple):
    """The key and the model of a turn."""

    key_id: str = ""
    """Id of the API key that began the turn; "" for a caller without one."""
    model: str = ""
    """Name of the turn's adapter, else the last part of the target model's path."""


#: Payer of a turn that has no usage record.
NO_PAYER = Payer()


def key_id_of(key_hash: str) -> str:
    """Return the id of a key by its SHA-256 in hexadecimal digits; "" for ""."""
    return key_hash[:_KEY_ID_CHARS]


def check_key_id(key_id: str) -> str:
    """Return `key_id` if it has the form of a key's id.

    Raises:
        InvalidRequest: it is not 16 hexadecimal digits.
    """
    if not _KEY_ID.fullmatch(key_id):
        shown = ascii(key_id[: _KEY_ID_CHARS + 1])
        raise InvalidRequest(f"{KEY_ID_KEY}: {shown} is not {_KEY_ID_CHARS} hexadecimal digits", field=KEY_ID_KEY)
    return key_id
