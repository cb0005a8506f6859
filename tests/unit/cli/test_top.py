"""`specdec top` against a scripted coordinator and the real metrics of services."""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import ExitStack
from fcntl import ioctl

import grpc
import pytest
from rich.console import Console

from specdec.cli.__main__ import run
from specdec.cli.metrics_page import MetricsPage
from specdec.cli.top import plot_of
from specdec.cli.top_figures import Reader, figures_of
from specdec.client import Client
from specdec.contract.engine_api import EngineStats
from specdec.observability.coordinator_metrics import CoordinatorMetrics
from specdec.observability.engine_metrics import EngineMetrics
from specdec.v1 import coordinator_pb2 as pb
from tests.support.scraping import served
from tests.support.scripted_coordinator import pool
from tests.support.up_rig import ENVIRON, SPECDEC
from tests.unit.cli.conftest import Serve, answer
from tests.unit.cli.test_pool_tables import served_pair


class Services:
    """The metrics of a coordinator, of a target and of two drafts of a pool, at addresses of their own."""

    def __init__(self, stack: ExitStack) -> None:
        self.coordinator = CoordinatorMetrics("model")
        self.coordinator.set_capacity(64)
        self.target = EngineMetrics("model", role="target")
        self.drafts = [EngineMetrics("model", role="draft") for _ in range(2)]
        everyone = [self.coordinator, self.target, *self.drafts]
        self.addresses = [stack.enter_context(served(each.registry)).address for each in everyone]


@pytest.fixture
def services() -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(stack)


def observe_round(services: Services, *, num_accepted: int) -> None:
    services.coordinator.rounds.observe_round(
        pool="default", num_requested=4, num_draft_tokens=4, num_accepted=num_accepted, draft_s=0.01, verify_s=0.02,
        wire_bytes=100,
    )  # fmt: skip


def test_rates_are_of_the_time_between_two_readings_and_counts_are_of_now(
    coordinator: Serve, services: Services
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    clock = iter([10.0, 12.0])
    observe_round(services, num_accepted=0)
    services.coordinator.observe_tokens(1000, None)
    with Client(environ["SPECDEC_ENDPOINT"]) as client:
        reader = Reader(client, lambda: [*services.addresses, "127.0.0.1:1"], lambda: next(clock))
        before = reader.read()
        observe_round(services, num_accepted=3)
        services.coordinator.request_running(1)
        services.coordinator.observe_tokens(50, None)
        for draft in services.drafts:
            draft.observe_call(duration_s=0.1, num_committed_tokens=9, num_cached_tokens=8, num_draft_tokens=6)
            draft.watch_engine(lambda: EngineStats(num_waiting_calls=2, num_running_calls=1), lambda: None)
        figures = figures_of(before, reader.read())
    assert (figures.num_running, figures.num_admitting, figures.capacity) == (1, 0, 64)
    assert (figures.tokens_per_s, figures.acceptance) == (25.0, 0.75)
    assert (figures.num_pages, figures.unreachable) == (4, ("127.0.0.1:1",))
    draft, target = figures.pools
    assert (draft.num_waiting, draft.num_running, draft.draft_tokens_per_s) == (4, 2, 6.0)
    assert (target.num_waiting, target.num_running, target.draft_tokens_per_s) == (0, 0, 0.0)


def test_a_counter_that_begins_again_after_a_restart_gives_no_negative_rate(coordinator: Serve) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    clock = iter([0.0, 1.0])
    with Client(environ["SPECDEC_ENDPOINT"]) as client, ExitStack() as stack:
        first, second = (Services(stack) for _ in range(2))
        first.coordinator.observe_tokens(1000, None)
        second.coordinator.observe_tokens(7, None)
        reader = Reader(client, lambda: first.addresses, lambda: next(clock))
        before, now = reader.read(), Reader(client, lambda: second.addresses, lambda: next(clock)).read()
    moved = dict(zip(before.pages, now.pages.values(), strict=True))
    assert figures_of(before, type(now)(1.0, now.info, moved, ())).tokens_per_s == 7.0


def test_without_metrics_a_frame_has_what_the_coordinator_knows_and_says_what_is_missing(
    coordinator: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    assert run(["top"], environ) == 0  # its output is not a terminal
    title, requests, note, _, pools, draft, target, _, replicas, *rows = capsys.readouterr().out.splitlines()
    assert title == "specdec 9 · [bold]m · context 512 tokens"
    assert requests == "- of - requests running, - starting · - tokens/s · - accepted"
    assert "give each service --metrics HOST:PORT, and name the addresses here" in note
    assert pools.split() == ["role", "pool", "model", "up", "accepted", "gamma", "waiting", "running", "draft/s"]
    assert draft.split() == ["draft", "default", "draft-model", "2", "75%", "3.5", "-", "-", "-"]
    assert target.split() == ["target", "default", "target-model", "1", "-", "-", "-"]
    assert replicas.split() == ["role", "pool", "replica", "address", "sessions", "KV", "used"]
    assert rows[2].split() == ["target", "default", "target-0", "h0:1", "7", "25%"]


def test_json_is_one_object_with_the_figures_of_pools_and_replicas(
    coordinator: Serve, services: Services, capsys: pytest.CaptureFixture[str]
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    flags = [word for address in services.addresses for word in ("--metrics", address)]
    assert run(["top", "--json", *flags], environ) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["requests"] == {"running": 0, "admitting": 0, "capacity": 64}
    assert (shown["tokens_per_s"], shown["acceptance"]) == (0.0, None)
    assert shown["metrics"] == {"num_services": 4, "unreachable": []}
    draft, target = shown["pools"]
    assert (draft["gamma"], draft["num_waiting"], target["gamma"]) == (3.5, 0, None)
    assert [replica["replica_id"] for replica in draft["replicas"]] == ["draft-0", "draft-1"]
    assert target["replicas"][0]["kv_usage"] == 0.25


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:0", "unix:1"])
def test_a_metrics_address_that_cannot_be_dialled_is_a_usage_error(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["top", "--metrics", address], {}) == 2
    assert "argument --metrics: must be HOST:PORT" in capsys.readouterr().err


def test_a_page_is_read_whatever_its_labels_hold() -> None:
    page = MetricsPage(
        '# HELP specdec:n x\nspecdec:n{pool="a",model_name="} \\" {"} 2.0\nspecdec:n{pool="b"} 1e1 1700\nother:n 5\n'
    )
    assert (page.total("n"), page.total("n", pool="a"), page.total("n", pool="c")) == (12.0, 2.0, None)


def plotted(rates: list[float | None], columns: int, rows: int) -> list[str]:
    console = Console(width=80, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(plot_of(rates, columns, rows))
    return captured.get().splitlines()


def test_the_plot_has_a_bar_for_each_of_the_newest_rates_under_their_scale() -> None:
    assert plotted([400.0, None, 200.0, 100.0, 50.0], 4, 2) == [
        "tokens/s in the last 4 s, up to 200",
        " █  ",
        " ██▄",
    ]  # fmt: skip
    assert plotted([100.0, 100.0], 3, 1)[1] == " ██"
    assert plotted([0.0, 0.0], 3, 1) == ["tokens/s in the last 2 s, up to 0", "   "]


class Screen:
    """`specdec top` in a terminal of 80 columns."""

    def __init__(self, endpoint: str, *flags: str) -> None:
        self.ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [*SPECDEC, "top", "--endpoint", endpoint, *flags], stdin=theirs, stdout=theirs, stderr=theirs,
            env=ENVIRON | {"TERM": "xterm", "NO_COLOR": "1"}, preexec_fn=os.setsid,
        )  # fmt: skip
        self.theirs = theirs
        self.shown = ""

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.theirs)[3] & termios.ECHO)

    def read_until(self, text: str) -> None:
        seen = len(self.shown)
        while text not in self.shown[seen:]:
            self.shown += os.read(self.ours, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self.theirs)
        os.close(self.ours)


@pytest.fixture
def screen(coordinator: Serve) -> Iterator[tuple[pb.GetInfoResponse, Screen]]:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    screen = Screen(environ["SPECDEC_ENDPOINT"])
    yield servicer.served, screen
    screen.process.kill()
    screen.process.wait()
    screen.close()


def test_in_a_terminal_frames_follow_each_other_until_q_and_the_terminal_is_as_before(
    screen: tuple[pb.GetInfoResponse, Screen],
) -> None:
    info, top = screen
    top.read_until("q ends")
    assert not top.echoes
    info.pools.append(pool("draft", alpha=0.5))
    info.pools[-1].name = "newcomer"
    top.read_until("newcomer")
    os.write(top.ours, b"xq")
    top.read_until("\x1b[?1049l")  # back from the screen of its own
    assert top.process.wait() == 0
    assert top.echoes
    assert "Traceback" not in top.shown


def test_in_a_terminal_the_free_rows_have_the_history_of_tokens_per_second(
    coordinator: Serve, services: Services
) -> None:
    servicer, environ = coordinator(answer)
    servicer.served = served_pair()
    flags = [word for address in services.addresses for word in ("--metrics", address)]
    top = Screen(environ["SPECDEC_ENDPOINT"], *flags)
    try:
        while "█" not in top.shown:  # a frame after tokens were made
            services.coordinator.observe_tokens(100, None)
            top.read_until("tokens/s in the last ")
        os.write(top.ours, b"q")
        assert top.process.wait() == 0
    finally:
        top.process.kill()
        top.process.wait()
        top.close()


def test_a_coordinator_that_is_gone_is_told_above_tables_that_are_longer_than_the_screen(
    screen: tuple[pb.GetInfoResponse, Screen], servers: list[grpc.Server]
) -> None:
    info, top = screen
    for number in range(40):
        info.pools[0].replicas.add(replica_id=f"draft-{number}", address="h:1")
    top.read_until("draft-9")
    for server in servers:
        server.stop(None)
    top.read_until("(COORDINATOR_UNAVAILABLE)")
    os.write(top.ours, b"q")
    assert top.process.wait() == 0
    assert "Traceback" not in top.shown


def test_ctrl_c_ends_it_with_the_terminal_as_before(screen: tuple[pb.GetInfoResponse, Screen]) -> None:
    _, top = screen
    top.read_until("q ends")
    top.process.send_signal(signal.SIGINT)
    top.read_until("\x1b[?1049l")
    assert top.process.wait() == 130
    assert top.echoes
    assert "Traceback" not in top.shown


def test_long_names_are_folded_and_leave_every_heading_whole_in_80_columns(
    screen: tuple[pb.GetInfoResponse, Screen],
) -> None:
    info, top = screen
    info.pools[0].replicas[0].replica_id = "draft-default-0123456789abcdef"
    info.pools[0].replicas[0].address = "draft-0.drafts.svc.cluster.local:50061"
    info.pools[0].model = "/models/a-draft-model-with-a-name-of-forty-characters"
    info.version = "10"
    top.read_until("specdec 10")
    top.read_until("25%")
    lines = [line.split() for line in top.shown.rpartition("specdec 10")[2].splitlines()]
    assert ["role", "pool", "model", "up", "accepted", "gamma", "waiting", "running", "draft/s"] in lines
    assert ["role", "pool", "replica", "address", "sessions", "KV", "used"] in lines
