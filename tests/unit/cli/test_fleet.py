"""More and fewer replicas of `specdec up`: real child processes of a trivial service, a clock of the test's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from specdec.contract.errors import InvalidRequest, ResourceExhausted, error_line
from specdec.supervision.fleet import KNOWN_AFTER_S, MAX_REPLICAS, Fleet, Scaling
from specdec.supervision.processes import Child
from specdec.supervision.services import STOP_GRACE_S, Service
from tests.support.clock import Clock

SERVES = (
    "import signal, sys\n"
    """print('{"level": "info", "message": "listening", "advertised": "h:1"}', flush=True)\n"""
    "signal.sigwait([signal.SIGTERM])\n"
)
FAILS = "raise SystemExit('error: no memory (KV_EXHAUSTED)')\n"
HANGS = "import signal\nsignal.pause()\n"
CLINGS = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVES.replace(
    "sigwait([signal.SIGTERM])", "pause()"
)


def told(scaling: Scaling) -> str:
    """Return the error line of a request that failed."""
    assert scaling.failure is not None
    return error_line(scaling.failure)


class Launcher:
    """Starts a trivial service for each name."""

    roles = ("target", "draft")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_alike: dict[str, int] = {}
        self.room = MAX_REPLICAS
        self.write(SERVES)

    def write(self, source: str) -> None:
        (self.folder / "some_service.py").write_text(source)

    def coordinator(self) -> Service:
        return Child("coordinator", "some_service", [], self._environ)

    def gateway(self) -> Service:
        return Child("gateway", "some_service", [], self._environ)

    def replica(self, name: str, num_alike: int) -> Service:
        self.num_alike[name] = num_alike
        return Child(name, "some_service", [], self._environ)

    def join(self, name: str, model: str) -> str:
        if name == "taken":
            raise InvalidRequest("taken")
        if f"draft-{name}" in self.roles:
            raise InvalidRequest("there already")
        self.roles = (*self.roles, f"draft-{name}")
        return f"draft-{name}"

    def forget(self, role: str) -> None:
        self.roles = tuple(other for other in self.roles if other != role)

    def require_room(self, added: Mapping[str, int]) -> None:
        if sum(added.values()) > self.room:
            raise ResourceExhausted("no room")

    @property
    def _environ(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder)}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.fixture
def fleet(launcher: Launcher, clock: Clock) -> Iterator[Fleet]:
    """A target, a draft and a coordinator that serve."""
    fleet = Fleet(launcher, clock)
    fleet.begin({"target": 1, "draft": 1})
    look_until(fleet, lambda: all(service.has_started for service in fleet.services), looks=False)
    fleet.settle()
    fleet.look()
    clock.now_s += KNOWN_AFTER_S
    yield fleet
    fleet.stop()


def look_until(fleet: Fleet, done: Callable[[], bool], *, looks: bool = True) -> None:
    while not done():
        if looks:
            fleet.look()
        time.sleep(0.01)


def names(fleet: Fleet) -> list[str]:
    return [service.name for service in fleet.services]


def reach(fleet: Fleet, clock: Clock, **counts: int) -> Scaling:
    """Scales, while time passes."""
    scaling = fleet.scale(counts)

    def done() -> bool:
        clock.now_s += 0.1
        return scaling.ended.is_set()

    look_until(fleet, done)
    return scaling


def test_replicas_that_are_added_have_names_of_their_own_and_are_waited_for(
    fleet: Fleet, launcher: Launcher, clock: Clock
) -> None:
    scaling = reach(fleet, clock, target=3, draft=2)
    assert (scaling.failure, scaling.counts) == (None, {"target": 3, "draft": 2})
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "draft-1", "target-0", "target-1", "target-2"]
    assert all(service.is_serving for service in fleet.services)
    assert launcher.num_alike == {"target-0": 1, "draft-0": 1, "target-1": 3, "target-2": 3, "draft-1": 2}


def test_a_further_draft_model_gets_one_replica_and_a_refused_one_nothing(fleet: Fleet, clock: Clock) -> None:
    joining = fleet.join("new", "/m")
    look_until(fleet, joining.ended.is_set)
    assert (joining.failure, joining.counts) == (None, {"target": 1, "draft": 1, "draft-new": 1})
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "draft-new-0", "target-0"]
    with pytest.raises(InvalidRequest):
        fleet.join("taken", "/m")
    assert reach(fleet, clock, target=2).counts == {"target": 2, "draft": 1, "draft-new": 1}


def test_the_name_of_a_draft_that_joined_and_never_served_is_free_again(
    fleet: Fleet, launcher: Launcher, clock: Clock
) -> None:
    launcher.write(FAILS)
    failing = fleet.join("new", "/m")
    look_until(fleet, failing.ended.is_set)
    assert told(failing) == "error: no memory (KV_EXHAUSTED)"
    launcher.room = 0
    with pytest.raises(ResourceExhausted):
        fleet.join("new", "/m")
    launcher.room = MAX_REPLICAS
    launcher.write(HANGS)
    hanging = fleet.join("new", "/m")
    look_until(fleet, lambda: len(fleet.services) == 4)
    with pytest.raises(InvalidRequest):
        fleet.join("new", "/m")
    fleet.scale({"draft-new": 0})
    assert "other numbers" in told(hanging)
    look_until(fleet, lambda: "draft-new" not in launcher.roles)
    launcher.write(SERVES)
    joining = fleet.join("new", "/m")
    look_until(fleet, joining.ended.is_set)
    assert (joining.failure, joining.counts) == (None, {"target": 1, "draft": 1, "draft-new": 1})
    # One that has served is a pool like the others: it may have no replica, and comes back by its number.
    assert reach(fleet, clock, **{"draft-new": 0}).counts["draft-new"] == 0
    with pytest.raises(InvalidRequest):
        fleet.join("new", "/m")
    assert reach(fleet, clock, **{"draft-new": 1}).failure is None


def test_the_oldest_leave_and_a_later_one_may_have_their_name(fleet: Fleet, clock: Clock) -> None:
    reach(fleet, clock, target=3)
    assert reach(fleet, clock, target=1).counts == {"target": 1, "draft": 1}
    assert sorted(names(fleet))[2:] in (["target-1"], ["target-2"])
    reach(fleet, clock, target=2)
    assert "target-0" in names(fleet)


def test_the_oldest_stay_until_coordinators_have_had_time_to_find_the_others(
    fleet: Fleet, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.scale({"target": 2})
    look_until(fleet, lambda: sum(service.is_serving for service in fleet.services) == 4)
    fleet.look()
    scaling = fleet.scale({"target": 1})
    clock.now_s += KNOWN_AFTER_S - 0.1
    fleet.look()
    assert "leaving" not in capsys.readouterr().err
    clock.now_s += 0.2
    look_until(fleet, scaling.ended.is_set)
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "target-1"]


def test_all_drafts_may_leave_and_come_back(fleet: Fleet, clock: Clock) -> None:
    assert reach(fleet, clock, draft=0).counts == {"target": 1, "draft": 0}
    assert reach(fleet, clock, draft=1).counts == {"target": 1, "draft": 1}


def test_one_that_ends_before_it_serves_is_not_tried_again(
    fleet: Fleet, launcher: Launcher, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher.write(FAILS)
    scaling = reach(fleet, clock, target=2)
    assert told(scaling) == "error: no memory (KV_EXHAUSTED)"
    for _ in range(5):
        clock.now_s += 60
        fleet.look()
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "target-0"]
    assert (
        "[target-1] ended before it served and is not started again: no memory (KV_EXHAUSTED)\n"
        in capsys.readouterr().err
    )


def test_one_that_was_added_comes_back_when_it_is_killed(fleet: Fleet, clock: Clock) -> None:
    reach(fleet, clock, target=2)
    (added,) = [service for service in fleet.services if service.name == "target-1"]
    assert isinstance(added, Child)
    os.kill(added.pid, signal.SIGKILL)
    look_until(fleet, lambda: not added.is_alive)
    fleet.look()
    clock.now_s += 1
    look_until(fleet, lambda: sum(service.is_serving for service in fleet.services) == 4)


def test_one_that_does_not_serve_leaves_before_those_that_do(fleet: Fleet, clock: Clock) -> None:
    reach(fleet, clock, target=2)
    (added,) = [service for service in fleet.services if service.name == "target-1"]
    assert isinstance(added, Child)
    os.kill(added.pid, signal.SIGKILL)
    added._process.wait()
    fleet.look()
    assert reach(fleet, clock, target=1).failure is None
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "target-0"]


def test_one_that_does_not_drain_is_made_to_end(fleet: Fleet, launcher: Launcher, clock: Clock) -> None:
    launcher.write(CLINGS)
    reach(fleet, clock, target=2)
    (clinging,) = [service for service in fleet.services if service.name == "target-1"]
    clock.now_s += KNOWN_AFTER_S
    reach(fleet, clock, target=1)  # target-0 goes, the clinging one stays
    launcher.write(SERVES)
    reach(fleet, clock, target=2)
    scaling = fleet.scale({"target": 1})
    clock.now_s += KNOWN_AFTER_S
    fleet.look()
    clock.now_s += STOP_GRACE_S - 0.1
    fleet.look()
    assert clinging.is_alive
    clock.now_s += 0.2
    look_until(fleet, scaling.ended.is_set)
    assert not clinging.is_alive


def test_a_later_request_replaces_one_that_has_not_ended(fleet: Fleet, clock: Clock) -> None:
    first = fleet.scale({"target": 4})
    second = reach(fleet, clock, target=1)
    assert (first.ended.is_set(), "other numbers" in told(first)) == (True, True)
    assert (second.failure, second.counts) == (None, {"target": 1, "draft": 1})


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"target": 0}, "target=0: the number must be 1 to 256"),
        ({"draft": -1}, "draft=-1: the number must be 0 to 256"),
        ({"draft": 257}, "draft=257: the number must be 0 to 256"),
        ({"coordinator": 2}, "this system has no coordinator model"),
    ],
)
def test_numbers_that_cannot_be_are_refused_and_change_nothing(
    fleet: Fleet, counts: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        fleet.scale(counts)
    fleet.look()
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "target-0"]


def test_more_than_there_is_room_for_is_refused_and_changes_nothing(fleet: Fleet, launcher: Launcher) -> None:
    launcher.room = 1
    with pytest.raises(ResourceExhausted):
        fleet.scale({"target": 2, "draft": 2})
    fleet.look()
    assert sorted(names(fleet)) == ["coordinator", "draft-0", "target-0"]


def test_stopping_ends_those_that_start_and_those_that_leave_too(fleet: Fleet, clock: Clock) -> None:
    reach(fleet, clock, target=2)
    clock.now_s += KNOWN_AFTER_S
    scaling = fleet.scale({"target": 1, "draft": 2})
    fleet.look()
    services = fleet.services
    assert len(services) == 5
    fleet.stop()
    assert not any(service.is_alive for service in services)
    assert told(scaling) == "error: specdec up is ending (DRAINING)"


def test_a_gateway_is_started_and_supervised_beside_the_coordinator(launcher: Launcher, clock: Clock) -> None:
    fleet = Fleet(launcher, clock)
    fleet.begin({"target": 1, "draft": 0}, with_gateway=True)
    look_until(fleet, lambda: all(service.has_started for service in fleet.services), looks=False)
    fleet.settle()
    assert [service.name for service in fleet.services] == ["gateway", "target-0", "coordinator"]
    services = fleet.services
    fleet.stop()
    assert not any(service.is_alive for service in services)
