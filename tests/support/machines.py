"""Machines for tests: network namespaces on one switch, whose cables can be pulled without anybody being told.

    with Machines("redis", "coordinator", "target") as machines:
        process = subprocess.Popen([*machines.command("target"), "python", "-m", "target_service", ...])
        with machines.without("target"):
            ...

A process in such a namespace has a network of its own, abstract Unix sockets included, as one in a container or on
another machine has. Packets to and from a machine whose cable is pulled vanish: nobody sees a closed connection, as
where a machine or a network is gone. `parted` does so between two machines alone. Needs root and `ip`. Called by tests
of what parts on different machines make of that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

#: The machine that the tests run on.
HERE = ""

#: A card that nobody has.
_NO_MAC = "02:5d:00:00:00:ff"


def unable() -> str:
    """Why there can be no such machines here; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    try:
        with Machines("tried"):
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


class Machines:
    """A switch, the machines by name, and this process's own as one more, all known to each other for good."""

    def __init__(self, *names: str) -> None:
        self._names = (HERE, *names)
        self._prefix = f"sd{os.getpid()}"
        # Of the addresses that are set aside for tests of networks, 256 for each process.
        self._network = f"198.{18 + os.getpid() // 256 % 2}.{os.getpid() % 256}"

    def address(self, name: str) -> str:
        return f"{self._network}.{self._names.index(name) + 1}"

    def interface(self, name: str) -> str:
        """Return the network interface of a machine that its address belongs to."""
        return self._card(name)

    def command(self, name: str) -> list[str]:
        """Return how a command line begins that is to run on a machine."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def __enter__(self) -> Self:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for name in self._names:
                self._plug_in_new(name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    @contextmanager
    def without(self, name: str) -> Iterator[None]:
        """While open, packets to and from this machine vanish."""
        port = ("-n", self._switch, "link", "set", self._port(name))
        _ip(*port, "nomaster")
        try:
            yield
        finally:
            _ip(*port, "master", "switch")

    @contextmanager
    def parted(self, name: str, *others: str) -> Iterator[None]:
        """While open, packets between this machine and others vanish, both ways."""
        pairs = [pair for other in others for pair in ((name, other), (other, name))]
        for sender, receiver in pairs:
            self._introduce(sender, receiver, _NO_MAC)
        try:
            yield
        finally:
            for sender, receiver in pairs:
                self._introduce(sender, receiver, self._mac(receiver))

    @property
    def _switch(self) -> str:
        return f"{self._prefix}switch"

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _port(self, name: str) -> str:
        return f"port{self._names.index(name)}"

    def _card(self, name: str) -> str:
        return f"{self._prefix}e{self._names.index(name)}"

    def _mac(self, name: str) -> str:
        return f"02:5d:00:00:00:{self._names.index(name):02x}"

    def _plug_in_new(self, name: str) -> None:
        if name != HERE:
            _ip("netns", "add", self._namespace(name))
            self._ip_at(name, "link", "set", "lo", "up")
        card, where = self._card(name), str(os.getpid()) if name == HERE else self._namespace(name)
        _ip("-n", self._switch, "link", "add", self._port(name), "type", "veth", "peer", "name", card)
        _ip("-n", self._switch, "link", "set", card, "netns", where)
        _ip("-n", self._switch, "link", "set", self._port(name), "master", "switch", "up")
        self._ip_at(name, "link", "set", card, "address", self._mac(name))
        self._ip_at(name, "addr", "add", f"{self.address(name)}/24", "dev", card)
        self._ip_at(name, "link", "set", card, "up")
        # Else the kernel would ask for one that is gone, and say that there is no way to it.
        for other in self._names:
            if other != name:
                self._introduce(name, other, self._mac(other))

    def _introduce(self, sender: str, receiver: str, mac: str) -> None:
        """Return where `sender` sends what is for `receiver`."""
        card = self._card(sender)
        self._ip_at(sender, "neigh", "replace", self.address(receiver), "lladdr", mac, "dev", card, "nud", "permanent")

    def _ip_at(self, name: str, *arguments: str) -> None:
        _ip(*(() if name == HERE else ("-n", self._namespace(name))), *arguments)

    def _remove(self) -> None:
        # A namespace's cards go some time after it; of this one's, the name may be wanted again at once.
        subprocess.run(["ip", "link", "del", self._card(HERE)], capture_output=True, check=False)
        namespaces = [self._switch, *(self._namespace(name) for name in self._names if name != HERE)]
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
