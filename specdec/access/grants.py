"""Access of a caller: its tenant, its rights and its limits.

A key of a key file (`keys`), a JSON web token (`json_web_tokens`) and the service key (`service_key`) each give an
`Access`. `callers` finds the one of a call, and `guards` compares it with the right that the called method needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.contract.errors import Forbidden

#: Right to generate, and to read and delete sessions, for one tenant.
GENERATE = "generate"
#: Right to operate the system: to promote draft pools, and to see the statistics of all tenants and inner addresses.
OPERATE = "operate"
#: Right of the services among themselves. A caller with it names the tenant of each call.
SERVICE = "service"

RIGHTS = frozenset((GENERATE, OPERATE, SERVICE))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the requests of one key; None: no limit."""

    max_concurrent: int | None = None
    """Requests at once (`concurrent=N`)."""
    max_requests_per_minute: int | None = None
    """Requests begun in a minute (`rpm=N`)."""
    max_tokens_per_minute: int | None = None
    """Prompt and output tokens in a minute (`tpm=N`)."""
    max_sessions: int | None = None
    """Sessions that are kept at once (`sessions=N`)."""
    max_prompt_tokens: int | None = None
    """Tokens of the longest prompt (`prompt_tokens=N`)."""
    max_reserved_tokens: int | None = None
    """Tokens that the requests at once may reach, prompts and `max_new_tokens` together (`reserved_tokens=N`)."""

    def loosest(self, other: Limits) -> Limits:
        """Return the limits of a tenant that has keys with both: of each limit the larger one, and none beats any."""
        return Limits(
            _larger(self.max_concurrent, other.max_concurrent),
            _larger(self.max_requests_per_minute, other.max_requests_per_minute),
            _larger(self.max_tokens_per_minute, other.max_tokens_per_minute),
            _larger(self.max_sessions, other.max_sessions),
            _larger(self.max_prompt_tokens, other.max_prompt_tokens),
            _larger(self.max_reserved_tokens, other.max_reserved_tokens),
        )


#: Limits of a caller without any.
UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Access:
    """Tenant, rights and limits of a caller."""

    tenant: str = ""
    """Tenant of the caller's requests; "" for the coordinator's own."""
    rights: frozenset[str] = frozenset((GENERATE,))
    limits: Limits = field(default=UNLIMITED)
    key_hash: str = ""
    """SHA-256 of the key; "" for a caller without one."""

    def require(self, *rights: str) -> None:
        """Raise Forbidden unless the caller has one of the rights."""
        if self.rights.isdisjoint(rights):
            own = ", ".join(sorted(self.rights)) or "none"
            raise Forbidden(f"these credentials lack the right {' or '.join(rights)}; they have {own}")

    @property
    def names_tenants(self) -> bool:
        """Return whether the caller names the tenant of each call itself."""
        return SERVICE in self.rights


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
