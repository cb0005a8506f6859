"""Detection of a lost rank: a closed connection, missed heartbeats, an error, or an orderly end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from specdec.contract.errors import InvalidRequest, SpecdecError, Unavailable
from specdec.engine.parallel import rank_heartbeat
from specdec.engine.parallel.rank_heartbeat import RankHeartbeat

_PATIENCE_S = 20.0


class Ends:
    """The first rank's heartbeat, and the sockets of the other ranks, which the test controls."""

    def __init__(self, num_ranks: int = 2) -> None:
        pairs = {rank: socket.socketpair() for rank in range(1, num_ranks)}
        self.others = {rank: pair[1] for rank, pair in pairs.items()}
        self.told: SimpleQueue[SpecdecError] = SimpleQueue()
        self.first = RankHeartbeat({rank: pair[0] for rank, pair in pairs.items()})
        self.first.watch(self.told.put)

    def hear(self) -> SpecdecError:
        return self.told.get(timeout=_PATIENCE_S)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    for other in ends.others.values():
        other.close()


def test_a_rank_that_has_ended_is_reported_by_its_number() -> None:
    ends = Ends(3)
    ends.others[2].close()
    assert isinstance(error := ends.hear(), Unavailable)
    assert error.message == "rank 2 is gone: its process has ended"
    ends.others[1].close()
    with pytest.raises(Empty):  # the group is lost once
        ends.told.get(timeout=0.2)


def test_a_late_watcher_learns_of_an_earlier_loss(ends: Ends) -> None:
    ends.others[1].close()
    ends.hear()
    late: SimpleQueue[SpecdecError] = SimpleQueue()
    ends.first.watch(late.put)
    assert late.get_nowait().message == "rank 1 is gone: its process has ended"


def test_a_rank_that_fails_sends_its_error() -> None:
    """The error keeps its type and field, after any heartbeats that were on their way."""
    pair = socket.socketpair()
    told: SimpleQueue[SpecdecError] = SimpleQueue()
    first = RankHeartbeat({1: pair[0]})
    first.watch(told.put)
    RankHeartbeat({0: pair[1]}).fail(InvalidRequest("model 'x' lacks weights", field="model"))
    error = told.get(timeout=_PATIENCE_S)
    assert isinstance(error, InvalidRequest)
    assert (error.message, error.field) == ("model 'x' lacks weights", "model")


@pytest.mark.parametrize("words", [b"{}", b"[1]", b'{"error": "open", "message": "", "field": ""}', b"\xff"])
def test_an_unreadable_last_line_is_a_loss(ends: Ends, words: bytes) -> None:
    ends.others[1].sendall(words + b"\n")
    assert isinstance(error := ends.hear(), Unavailable)
    assert error.message.startswith("rank 1 is gone")


def test_an_orderly_end_is_not_a_loss_even_if_it_is_read_late() -> None:
    pair = socket.socketpair()
    pair[1].sendall(b"bye\n")
    pair[1].close()
    told: SimpleQueue[SpecdecError] = SimpleQueue()
    RankHeartbeat({1: pair[0]}).watch(told.put)
    with pytest.raises(Empty):
        told.get(timeout=0.3)


def test_an_orderly_end_is_not_a_loss(ends: Ends) -> None:
    ends.others[1].sendall(b"\n\nbye\n")
    ends.others[1].close()
    with pytest.raises(Empty):
        ends.told.get(timeout=0.3)


def test_a_rank_is_lost_after_a_number_of_missed_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_heartbeat, "BEAT_S", 0.25)
    pair, silent = socket.socketpair(), socket.socketpair()
    alive, gone = SimpleQueue[SpecdecError](), SimpleQueue[SpecdecError]()
    beating = [RankHeartbeat({1: pair[0]}), RankHeartbeat({0: pair[1]})]
    beating[0].watch(alive.put)
    RankHeartbeat({1: silent[0]}).watch(gone.put)
    assert gone.get(timeout=_PATIENCE_S).message == "rank 1 is gone: it has sent no heartbeat for 2 s"
    assert alive.empty()


def test_connections_of_other_processes_take_no_rank() -> None:
    stored: dict[str, str] = {}
    published = threading.Event()

    class Store:
        def set(self, key: str, value: str) -> None:
            stored[key] = value
            published.set()

        def get(self, key: str) -> bytes:
            published.wait(_PATIENCE_S)
            return stored[key].encode()

    store, led = Store(), SimpleQueue[RankHeartbeat]()
    threading.Thread(target=lambda: led.put(RankHeartbeat.of_first(store, "127.0.0.1", 2)), daemon=True).start()
    address = ("127.0.0.1", int(store.get("lifeline")))
    for words in (b"7\n", b"0\n", b"GET / HTTP/1.1\r\n"):
        with socket.create_connection(address) as stranger:
            stranger.sendall(words)
            assert stranger.recv(1) == b""
    other = RankHeartbeat.of_other(store, "127.0.0.1", 1)
    told: SimpleQueue[SpecdecError] = SimpleQueue()
    led.get(timeout=_PATIENCE_S).watch(told.put)
    other.fail(Unavailable("so it is"))
    assert told.get(timeout=_PATIENCE_S).message == "so it is"
