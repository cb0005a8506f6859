"""The adapters of a server's model that a target serves, each with a separate fingerprint.

vLLM and other servers list adapters after the model, as entries with a `parent`, and apply the one that the field
`model` of a request names. Requests select them here by name (`--adapter`), or by the server's own ids. An adapter is
identified as the model is, by its continuations of fixed prompts: at the start, when the server lists it anew, and over
each new connection (`specdec.engine.remote.pinned_model`). One that the server lost, or has exchanged, is no longer
served under its fingerprint. Its sessions fail until it is back, and all others go on.

Called by `server` and `vllm_backend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from specdec.contract.engine_api import MAX_ADAPTERS, is_adapter_name
from specdec.contract.errors import Internal, InvalidSetting, NotFound, SpecdecError
from specdec.engine.remote.completions import listed_models
from specdec.engine.remote.http_connection import Refused
from specdec.engine.remote.pinned_model import PinnedModel, pin
from specdec.engine.remote.remote_model import Continue, ModelFiles, fingerprint_of, require_token_ids
from specdec.settings.adapter_specs import AdapterSpec

#: Interval at which the server's list is read.
REFRESH_S = 5.0

#: Statuses with which servers refuse the name of a model that they do not have.
_UNKNOWN = (400, 404, 422)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The model whose adapters are served."""

    model: PinnedModel
    files: ModelFiles
    checkpoint: str
    """Checkpoint of its tokenizer, whose last part is the name of the model to clients."""
    continue_as: Callable[[str], Continue]
    """Returns what continues prompts greedily with the model of a name at the server."""


class _Listed(NamedTuple):
    """An adapter as the server lists it."""

    id: str
    parent: str
    root: str
    """Path that it was loaded from; "" if the server does not state it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names that may select it in a request: its id, and for SGLang the id after the name of the model."""
        return (self.id, f"{self.parent}:{self.id}") if self.parent else (self.id,)


class Adapters:
    """The adapters of one server. Make them with `open_adapters`; use from one event loop."""

    def __init__(self, base: Served, wanted: Sequence[AdapterSpec]) -> None:
        """`wanted`: adapters to serve; empty for all that the server lists."""
        self._base = base
        self._wanted = tuple(wanted)
        self._url = base.model.connection.url
        self._served: dict[str, tuple[_Listed, PinnedModel]] = {}
        """Adapters by the names under which requests select them."""
        self._warned: set[str] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._doubt = asyncio.Event()
        """Set when an adapter was found to be gone or exchanged."""

    @property
    def names(self) -> dict[str, str]:
        """Names of the adapters by fingerprint, as the server last listed them."""
        return {model.fingerprint: name for name, (_, model) in self._served.items()}

    def model_of(self, fingerprint: str) -> PinnedModel:
        """Return the model with a fingerprint, "" for the one without an adapter.

        Raises:
            NotFound: the server does not have the adapter any more (MODEL_NOT_FOUND).
        """
        if not fingerprint:
            return self._base.model
        for _, model in self._served.values():
            if model.fingerprint == fingerprint and not model.has_changed:
                return model
        raise NotFound(f"{self._url} does not have this adapter any more", reason="MODEL_NOT_FOUND", field="adapter")

    @contextlib.contextmanager
    def asking(self, fingerprint: str) -> Iterator[PinnedModel]:
        """Give the model with a fingerprint to ask. Raises NotFound as `model_of`, also if it changes meanwhile."""
        model = self.model_of(fingerprint)
        try:
            yield model
        except Internal:
            if fingerprint and model.has_changed:
                self._doubt.set()
                self.model_of(fingerprint)  # raises
            raise

    async def find(self) -> None:
        """Serve what the server lists at the start.

        Raises:
            InvalidSetting: it lacks a wanted adapter, or one cannot be served; the message says what to change.
            Unavailable: it cannot be reached.
        """
        listed = await self._list()
        for name, adapter in self._select(listed).items():
            if problem := self._problem_of(name):
                raise InvalidSetting(f"adapter: {problem}", field="adapter")
            try:
                await self._add(name, adapter)
            except (Refused, Internal) as error:
                raise InvalidSetting(
                    f"adapter: {self._url} lists {adapter.id}, but does not complete token ids with it: {error}",
                    field="adapter",
                ) from error
        if lacking := [spec for spec in self._wanted if spec.name not in self._served]:
            raise InvalidSetting(self._refusal_of(lacking[0], listed), field="adapter")

    def start(self) -> None:
        """Follow the server's list in the background until `close`."""
        self._refreshing = asyncio.create_task(self._follow(), name="adapters")

    async def close(self) -> None:
        """Stop following the list. Idempotent."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})

    async def refresh(self) -> None:
        """Read the server's list: stop serving adapters that are gone, and serve new ones. Raises SpecdecError."""
        listed = self._select(await self._list())
        for name in [name for name in self._served if name not in listed]:
            self._drop(name)
        for name, adapter in listed.items():
            known, model = self._served.get(name, (None, None))
            if known == adapter and model is not None and not model.has_changed:
                continue
            if model is None and (problem := self._problem_of(name)):
                self._warn_once(problem)
                continue
            try:
                await self._add(name, adapter)
            except (Refused, SpecdecError) as error:
                self._warn_once(f"adapter {name} cannot be served: {error}")
                self._drop(name)

    def _drop(self, name: str) -> None:
        if self._served.pop(name, None):
            _log.warning("adapter %s is no longer served: url=%s", name, self._url)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._doubt.wait()
            self._doubt.clear()
            try:
                await self.refresh()
            except SpecdecError as error:  # the calls of sessions tell what is wrong, and when it is over
                _log.debug("cannot list adapters: %s", error)
            except Exception:
                _log.exception("reading the list of adapters failed: url=%s", self._url)

    async def _list(self) -> list[_Listed]:
        """Return what the server lists besides the base model; nothing if that is an adapter itself."""
        entries = await listed_models(self._base.model.connection)
        if any(entry.get("parent") for entry in entries if entry["id"] == self._base.model.name):
            return []
        return [
            _Listed(entry["id"], str(entry.get("parent") or ""), str(entry.get("root") or ""))
            for entry in entries
            if entry["id"] != self._base.model.name
        ]

    def _select(self, listed: Sequence[_Listed]) -> dict[str, _Listed]:
        """Return the adapters to serve by the names under which requests select them."""
        adapters = [entry for entry in listed if entry.parent]
        if not self._wanted:
            return {entry.id: entry for entry in adapters}
        found = {}
        for spec in self._wanted:
            by_id = [entry for entry in adapters if spec.listed in entry.names]
            by_path = [entry for entry in adapters if entry.root == spec.listed]
            if entry := next(iter([*by_id, *by_path]), None):
                found[spec.name] = entry
        return found

    def _problem_of(self, name: str) -> str:
        """Return why an adapter cannot be served under a name, and what to do; "" if it can."""
        if name in (self._base.model.name, PurePath(self._base.checkpoint).name):
            return f"{name} is the name of the model itself: give the adapter another one with --adapter NAME={name}"
        if not is_adapter_name(name):
            return (
                f"{name[:200]!r} cannot be the name of a model: give the adapter another one with --adapter NAME=PATH"
            )
        if len(self._served) >= MAX_ADAPTERS:
            return f"{self._url} lists more than {MAX_ADAPTERS} adapters: name those to serve with --adapter NAME"
        return ""

    def _refusal_of(self, spec: AdapterSpec, listed: Sequence[_Listed]) -> str:
        if spec.listed == self._base.model.name:
            return f"adapter: {spec.listed} is the model of {self._url} itself, which requests select without --adapter"
        if any(spec.listed == entry.id for entry in listed if not entry.parent):
            return (
                f"adapter: {self._url} lists {spec.listed} as a model without a parent, not as an adapter: start "
                f"another target with --backend-model {spec.listed}"
            )
        names = ", ".join(entry.id for entry in listed if entry.parent) or "none"
        return (
            f"adapter: {self._url} lists no adapter {spec.listed}; it has {names}. Start vLLM with --enable-lora "
            f"--lora-modules {spec.name}=PATH, or name one that it lists"
        )

    async def _add(self, name: str, adapter: _Listed) -> None:
        """Identify an adapter and serve it. Raises Refused, Internal, InvalidSetting and Unavailable."""
        base, server_name = self._base, await self._name_of(adapter)
        continue_greedily = base.continue_as(server_name)
        require_token_ids(await continue_greedily([0]), base.files, self._url)
        identity = f"{base.model.fingerprint} {name}"
        model = await pin(
            base.model.connection, server_name, lambda: fingerprint_of(base.files, identity, continue_greedily)
        )
        self._served[name] = adapter, model
        _log.info("adapter %s is served: url=%s id=%s", name, self._url, model.name)

    async def _name_of(self, adapter: _Listed) -> str:
        """Return the name that selects an adapter in a request.

        A server that accepts a name that nothing has would answer with the model itself, under the adapter's name.

        Raises:
            InvalidSetting: no name selects it.
            Refused: the server refuses requests for another reason.
        """
        for name in adapter.names:
            try:
                await self._base.continue_as(f"{name}-{secrets.token_hex(4)}")([0])
            except Refused as refusal:
                if refusal.status not in _UNKNOWN:
                    raise
                return name
        raise InvalidSetting(
            f"adapter: {self._url} answers requests for any model name with one model, so that none selects "
            f"{adapter.id}; use a server that applies the adapter named in the field model, such as vLLM with "
            "--enable-lora",
            field="adapter",
        )

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            _log.warning("%s", problem)


async def open_adapters(base: Served, wanted: Sequence[AdapterSpec]) -> Adapters:
    """Return the adapters of a server, and follow its list. Raises as `Adapters.find`."""
    adapters = Adapters(base, wanted)
    await adapters.find()
    adapters.start()
    return adapters
