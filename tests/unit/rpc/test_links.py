"""Links and servicers over real gRPC and over Unix sockets: concurrent sessions, errors, breaks and drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.replicas.replica import TARGET
from draft_service.servicer import DraftServicer
from specdec.contract import errors
from specdec.contract.types import DrawRule, ProposeRequest, VerifyRequest
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc import codec, proposals
from specdec.rpc.client import DraftLink, WireStats
from specdec.rpc.frames import MAX_OPEN_ITEMS, FrameServer
from specdec.rpc.framing import MAX_FRAME_ITEMS
from specdec.rpc.service_server import DRAFT_SERVICE, ServiceServer
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.support.arithmetic_engines import (
    GREEDY,
    MAX_GAMMA,
    ArithmeticDraft,
    ArithmeticTarget,
    make_error,
    make_round,
    support_of,
)
from tests.support.links import recorded_frames, silent_service
from tests.support.table_services import linked


@pytest.fixture(autouse=True, params=[False, True], ids=["grpc", "unix-socket"])
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftReplica, "has_unix_socket", request.param)


class DraftReplica:
    """A draft service around the arithmetic engine, on a real port."""

    has_unix_socket = False

    def __init__(self, port: int = 0, *, max_message_bytes: int = 4 << 20) -> None:
        self.max_message_bytes = max_message_bytes
        self.engine = ArithmeticDraft()
        self.metrics = EngineMetrics("arithmetic", role="draft")
        self.servicer = DraftServicer(self.engine, self.metrics)
        self.server = ServiceServer(
            f"127.0.0.1:{port}", service_names=(DRAFT_SERVICE,), max_message_bytes=max_message_bytes
        )
        self.servicer.add_to(self.server.grpc_server)

    async def __aenter__(self) -> DraftReplica:
        await self.server.start()
        if self.has_unix_socket:
            await self.servicer.open_unix_socket(self.max_message_bytes)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0)

    async def stop(self, grace_s: float) -> None:
        await asyncio.gather(self.server.stop(grace_s), self.servicer.close_unix_socket(grace_s))

    def link(self) -> DraftLink:
        """Return a link that knows the replica's Unix socket."""
        link = DraftLink(self.server.address)
        link.transports.unix_socket = self.servicer.info().unix_socket
        return link


@asynccontextmanager
async def draft_link(replica: DraftReplica) -> AsyncIterator[DraftLink]:
    link = replica.link()
    try:
        yield link
    finally:
        await link.close()


def ask(session_id: str = "s", gamma: int = 3, *, num_tokens: int = 3) -> ProposeRequest:
    return ProposeRequest(make_round(session_id, num_tokens=num_tokens), gamma)


async def test_a_proposal_comes_back_with_the_bytes_it_cost() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        request = ask(gamma=4)
        wire = WireStats()
        reply = await link.propose(request, wire)
        expected = await replica.engine.propose(request)
        assert reply.draft_token_ids.tolist() == [3, 4, 5, 6]
        assert reply.kv_len == expected.kv_len
        sent = codec.encode_propose_request(request, 1).ByteSize()
        received = proposals.encode_proposal(expected, 1).ByteSize()
        assert wire.num_bytes == sent + received


async def test_failed_and_cancelled_calls_are_counted_with_what_they_sent_and_received() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        wire = WireStats()
        missed = ask("raise:KvMiss")
        with pytest.raises(errors.KvMiss):
            await link.propose(missed, wire)
        sent = codec.encode_propose_request(missed, 1).ByteSize()
        assert wire.num_bytes > sent
        wire = WireStats()
        held = ask("hold")
        cancelled = asyncio.create_task(link.propose(held, wire))
        await replica.engine.asked["hold"].wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert wire.num_bytes == codec.encode_propose_request(held, 1).ByteSize()


@pytest.mark.parametrize("rule", [DrawRule.DISTRIBUTION, DrawRule.COUPLED])
async def test_a_verification_comes_back_with_rows_or_choices(rule: DrawRule) -> None:
    engine = ArithmeticTarget()
    drafts = np.array([4, 5], dtype=np.uint32)
    supports = (support_of(4, 3).token_ids, support_of(5, 4).token_ids) if rule is DrawRule.DISTRIBUTION else ()
    async with linked(TARGET, engine) as link:
        reply = await link.verify(VerifyRequest(make_round(draw_rule=rule), drafts, supports, num_logprobs=1))
        assert len(reply.rows) == (3 if rule is DrawRule.DISTRIBUTION else 0)
        assert len(reply.choice_token_ids) == (0 if rule is DrawRule.DISTRIBUTION else 3)
        assert [row.logsumexp for row in reply.logit_rows] == [10.0, 11.0, 12.0]
        assert (await link.info()).role == "target"
        await link.release(["a", "b"])
        assert engine.released == ["a", "b"]


async def test_calls_of_one_loop_turn_share_a_frame_and_find_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = recorded_frames(monkeypatch)
    async with DraftReplica() as replica, draft_link(replica) as link:
        requests = [ask(f"session {index}", 1 + index % MAX_GAMMA, num_tokens=1 + index) for index in range(64)]
        replies = await asyncio.gather(*map(link.propose, requests))
        assert frames == [64]
        for index, reply in enumerate(replies):
            first = index + 1
            assert reply.draft_token_ids.tolist() == list(range(first, first + 1 + index % MAX_GAMMA))


async def test_a_failed_item_fails_alone_and_keeps_its_error() -> None:
    names = [error_type.__name__ for error_type in errors.SpecdecError.__subclasses__()]
    async with DraftReplica() as replica, draft_link(replica) as link:
        calls = [link.propose(ask(f"raise:{name}")) for name in names]
        good, *failed = await asyncio.gather(link.propose(ask()), *calls, return_exceptions=True)
        assert not isinstance(good, BaseException)
        for name, failure in zip(names, failed, strict=True):
            expected = make_error(name)
            assert (type(failure), str(failure)) == (type(expected), str(expected))
            assert failure.reason == expected.reason  # type: ignore[union-attr]
            assert getattr(failure, "have", None) == getattr(expected, "have", None)


async def test_an_engine_fault_is_internal_and_its_traceback_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        with pytest.raises(errors.Internal, match=r"request id [0-9a-f]{32}") as caught:
            await link.propose(ask("crash"))
        request_id = str(caught.value).split()[-1]
        record = next(record for record in caplog.records if getattr(record, "failed_request_id", "") == request_id)
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError
        assert "ZeroDivisionError" not in str(caught.value)


async def test_a_malformed_item_is_refused_and_the_stream_goes_on() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        bad = link.propose(ask("bad", gamma=MAX_GAMMA + 1))
        good = link.propose(ask("good"))
        refused, answered = await asyncio.gather(bad, good, return_exceptions=True)
        assert isinstance(refused, errors.InvalidRequest)
        assert not isinstance(answered, BaseException)
        assert replica.engine.seen == ["good"]


async def test_a_slow_session_does_not_hold_up_the_others() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        slow = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        assert (await link.propose(ask())).kv_len == 5
        assert not slow.done()
        replica.engine.release_held.set()
        await slow


async def test_cancelling_one_call_disturbs_no_other() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        given_up = asyncio.create_task(link.propose(ask("hold 1")))
        kept = asyncio.create_task(link.propose(ask("hold 2")))
        await replica.engine.asked["hold 2"].wait()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        replica.engine.release_held.set()
        assert (await kept).draft_token_ids.tolist() == [3, 4, 5]
        assert (await link.propose(ask())).kv_len == 5  # the late reply to the first was dropped


async def test_a_call_cancelled_before_it_was_sent_is_never_sent() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        await link.propose(ask("first"))
        given_up = asyncio.create_task(link.propose(ask("given up")))
        kept = asyncio.create_task(link.propose(ask("kept")))
        given_up.cancel()
        await asyncio.wait([given_up, kept])
        assert replica.engine.seen == ["first", "kept"]


async def test_an_address_without_a_listener_is_unavailable_and_named() -> None:
    async with DraftReplica() as replica:
        address = replica.server.address
    link = DraftLink(address)
    with pytest.raises(errors.Unavailable, match=address) as caught:
        await link.propose(ask())
    assert caught.value.reason == "REPLICA_UNAVAILABLE"
    with pytest.raises(errors.Unavailable, match=address):
        await link.info()
    await link.close()


async def test_a_dying_replica_fails_every_pending_call_and_a_restarted_one_is_dialled_again() -> None:
    async with DraftReplica() as replica:
        port = replica.server.port
        link = replica.link()
        pending = [asyncio.create_task(link.propose(ask(f"hold {index}"))) for index in range(5)]
        await replica.engine.asked["hold 4"].wait()
    for call in pending:
        with pytest.raises(errors.Unavailable, match=link.address):
            await call
    assert sorted(replica.engine.given_up) == [f"hold {index}" for index in range(5)]
    async with DraftReplica(port):
        assert (await link.propose(ask())).kv_len == 5
        await link.close()


async def test_a_closed_link_fails_its_calls_and_the_replica_drops_them() -> None:
    async with DraftReplica() as replica:
        link = replica.link()
        pending = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        await link.close()
        with pytest.raises(errors.Unavailable, match="closed"):
            await pending
        with pytest.raises(errors.Unavailable, match="closed"):
            await link.propose(ask())
        await replica.engine.given_up["hold"].wait()
        await link.close()


async def test_a_peer_that_does_not_read_its_answers_is_read_up_to_a_limit() -> None:
    num_asked, num_answered = 0, 0

    async def ask_without_end() -> AsyncIterator[draft_pb2.ProposeFrame]:
        nonlocal num_asked
        while num_asked < 3 * MAX_OPEN_ITEMS:
            num_asked += 1
            yield draft_pb2.ProposeFrame(requests=[draft_pb2.ProposeRequest(call_id=num_asked)])

    async def answer(item: draft_pb2.ProposeRequest, received_s: float, outgoing: Any) -> draft_pb2.Proposal:
        return draft_pb2.Proposal(call_id=item.call_id)

    is_read = asyncio.Event()

    async def write(frame: draft_pb2.ProposalFrame) -> None:
        nonlocal num_answered
        await is_read.wait()
        num_answered += len(frame.proposals)

    server = FrameServer(
        items_of=lambda frame: frame.requests,
        answer=answer,
        reply_type=draft_pb2.Proposal,
        frame_of=lambda parts: draft_pb2.ProposalFrame(proposals=parts.replies),
    )
    serving = asyncio.create_task(server.serve(ask_without_end(), write))
    for _ in range(100):
        await asyncio.sleep(0)
    assert num_asked == MAX_OPEN_ITEMS + 1
    is_read.set()
    await serving
    assert num_answered == 3 * MAX_OPEN_ITEMS


async def test_draining_answers_calls_in_flight_refuses_new_ones_and_ends_the_stream() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        in_flight = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        replica.servicer.drain()
        with pytest.raises(errors.Unavailable) as refused:
            await link.propose(ask("late"))
        assert refused.value.reason == "DRAINING"
        stopping = asyncio.create_task(replica.stop(60))
        replica.engine.release_held.set()
        assert (await in_flight).kv_len == 5
        await stopping  # well before the grace period ends: the stream ended by itself
        assert replica.engine.seen == ["hold"]


async def test_the_oldest_call_of_a_link_is_that_which_has_waited_longest_for_any_model() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        assert link.oldest_pending is None
        calls, oldest = [], []
        for model in ("model", ""):
            calls.append(asyncio.create_task(link.propose(ask(f"hold {model}"), model=model)))
            await replica.engine.asked[f"hold {model}"].wait()
            oldest.append(link.oldest_pending)
        assert oldest[0] is not None
        assert oldest[1] is oldest[0]
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        assert link.oldest_pending not in (None, oldest[0])
        replica.engine.release_held.set()
        await calls[1]


async def test_an_item_over_the_limit_is_refused_before_it_is_sent() -> None:
    async with DraftReplica(max_message_bytes=4 << 20) as replica, draft_link(replica) as link:
        held = asyncio.create_task(link.propose(ask("hold")))
        await replica.engine.asked["hold"].wait()
        with pytest.raises(errors.InvalidRequest, match="the limit is"):
            await link.propose(ask(num_tokens=2_400_000))
        replica.engine.release_held.set()
        await held


async def test_a_100_megabyte_message_is_refused_clearly_and_leaves_nothing() -> None:
    async with DraftReplica() as replica:
        options = (("grpc.max_send_message_length", -1),)
        async with grpc.aio.insecure_channel(replica.server.address, options=options) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            frame = draft_pb2.ProposeFrame()
            frame.requests.add().round.prefix_hash = bytes(100 << 20)
            call = stub.Propose()
            await call.write(frame)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in caught.value.details()
        assert replica.engine.seen == []


async def test_large_requests_of_one_turn_are_spread_over_frames() -> None:
    """Forty requests of 200 KB are 8 MB; one frame of them would be refused and fail all calls."""
    async with DraftReplica() as replica, draft_link(replica) as link:
        replies = await asyncio.gather(*(link.propose(ask(f"big {index}", num_tokens=110_000)) for index in range(40)))
        assert [reply.kv_len for reply in replies] == [110_002] * 40


async def test_more_calls_of_one_turn_than_a_frame_may_have_items_are_spread_over_frames_both_ways() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        num_calls = 2 * MAX_FRAME_ITEMS + 10
        replies = await asyncio.gather(*(link.propose(ask(f"session {index}")) for index in range(num_calls)))
        assert [reply.kv_len for reply in replies] == [5] * num_calls


async def test_greedy_rounds_carry_token_ids_alone() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        law_wire, greedy_wire = WireStats(), WireStats()
        await link.propose(ProposeRequest(make_round(), 8), law_wire)
        greedy = await link.propose(ProposeRequest(make_round(filters=GREEDY), 8), greedy_wire)
        assert greedy.supports == ()
        assert greedy_wire.num_bytes < 150 < law_wire.num_bytes


async def test_calls_are_counted_by_outcome() -> None:
    async with DraftReplica() as replica, draft_link(replica) as link:
        await link.propose(ask())
        with pytest.raises(errors.KvMiss):
            await link.propose(ask("raise:KvMiss"))
        value = replica.metrics.registry.get_sample_value
        labels = {"model_name": "arithmetic", "role": "draft", "pool": "default"}
        assert value("specdec:draft_tokens_total", labels) == 3
        assert value("specdec:call_repeats_total", {**labels, "reason": "KV_MISS"}) == 1


async def test_a_pending_description_fails_when_the_link_is_closed() -> None:
    async with silent_service() as address:
        link = DraftLink(address)
        asking = asyncio.create_task(link.info())
        done, _ = await asyncio.wait([asking], timeout=0.3)  # the call is in flight
        assert not done
        await link.close()
        with pytest.raises(errors.Unavailable, match="the link was closed"):
            await asking


async def test_a_pending_description_can_be_cancelled() -> None:
    async with silent_service() as address:
        link = DraftLink(address)
        asking = asyncio.create_task(link.info())
        await asyncio.wait([asking], timeout=0.3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await link.close()
