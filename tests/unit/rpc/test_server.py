"""The gRPC server of every service: error statuses, health, ports and draining."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec.contract import errors
from specdec.observability.logging import ID_NAMES, configure_logging
from specdec.rpc.channels import require_free
from specdec.rpc.health import Health
from specdec.rpc.interceptors import MAX_SIDE_CALLS
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1 import coordinator_pb2_grpc
from tests.support.log_stream import lines, stream
from tests.support.raw_http2 import reset_calls
from tests.support.stack import free_port

__all__ = ["stream"]

Behaviour = Callable[[], Awaitable[None]]


class ScriptedService(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A unary handler and a streaming one, which sends a message first; a test sets what they do."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self.ended = asyncio.Event()

    async def GetInfo(self, request: pb.GetInfoRequest, context: Any) -> pb.GetInfoResponse:  # noqa: N802
        await self._behave()
        return pb.GetInfoResponse(version="1")

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        try:
            yield pb.GenerateResponse(started=pb.Started(session_id="s"))
            await self._behave()
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(
    behave: Behaviour, **options: Any
) -> AsyncIterator[tuple[ServiceServer, ScriptedService, coordinator_pb2_grpc.CoordinatorServiceStub]]:
    server = ServiceServer("127.0.0.1:0", service_names=(COORDINATOR_SERVICE,), **options)
    service = ScriptedService(behave)
    coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        yield server, service, coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    await server.stop(0)


async def nothing() -> None:
    return None


def raising(error: BaseException) -> Behaviour:
    async def behave() -> None:
        raise error

    return behave


TREE = [
    errors.KvMiss("more", have=3) if error_type is errors.KvMiss else error_type("a sentence")
    for error_type in errors.SpecdecError.__subclasses__()
]


@pytest.mark.parametrize("error", TREE, ids=lambda error: type(error).__name__)
async def test_an_error_of_the_tree_reaches_the_caller_with_all_fields(error: errors.SpecdecError) -> None:
    async with serving(raising(error)) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GetInfo(pb.GetInfoRequest())
        stream = stub.Generate(pb.GenerateRequest())
        assert (await stream.read()).started.session_id == "s"
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stream.read()
        for caught in (unary, streamed):
            assert caught.value.code().name == error.code
            back = from_rpc_error(caught.value)
            assert (type(back), str(back), back.reason) == (type(error), str(error), error.reason)
            assert back.retry_after_s == error.retry_after_s


async def test_an_unknown_error_is_internal_with_a_request_id_and_the_log_has_the_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(raising(ZeroDivisionError("secret detail"))) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(pb.GetInfoRequest(), metadata=(("x-request-id", "r-17"),))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "r-17" in caught.value.details()
    assert "secret" not in caught.value.details()
    record = next(record for record in caplog.records if getattr(record, "failed_request_id", "") == "r-17")
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


async def test_log_records_of_a_call_have_the_callers_request_id(stream: io.StringIO) -> None:
    async def say() -> None:
        logging.getLogger("specdec.test").info("asked")

    configure_logging("json", "info", service="coordinator", stream=stream)
    async with serving(say) as (_, _, stub):
        await stub.GetInfo(pb.GetInfoRequest(), metadata=(("x-request-id", "r-18"),))
    (record,) = (record for record in lines(stream) if record["message"] == "asked")
    assert {name: record[name] for name in ID_NAMES if name in record} == {"request_id": "r-18"}


async def test_a_caller_that_disconnects_ends_the_handler_at_once() -> None:
    async with serving(asyncio.Event().wait) as (_, service, stub):  # type: ignore[arg-type]
        stream = stub.Generate(pb.GenerateRequest())
        await stream.read()
        stream.cancel()
        await service.ended.wait()


async def test_health_is_serving_only_between_warm_up_and_drain() -> None:
    async with serving(nothing) as (server, _, _), grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> set[int]:
            replies = [
                await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", COORDINATOR_SERVICE)
            ]
            return {reply.status for reply in replies}

        assert await statuses() == {health_pb2.HealthCheckResponse.NOT_SERVING}
        await server.set_serving()
        assert await statuses() == {health_pb2.HealthCheckResponse.SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        await server.set_not_serving()
        assert await statuses() == {health_pb2.HealthCheckResponse.NOT_SERVING}


async def test_a_health_watcher_is_informed_of_the_drain_and_does_not_delay_it() -> None:
    async with serving(nothing) as (server, _, _), grpc.aio.insecure_channel(server.address) as channel:
        await server.set_serving()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await server.set_not_serving()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.stop(60)  # well before the grace period ends
        assert await watch.read() is grpc.aio.EOF


async def test_thousands_of_calls_at_once_are_all_answered() -> None:
    async with serving(nothing) as (_, _, stub):
        infos = await asyncio.gather(*(stub.GetInfo(pb.GetInfoRequest()) for _ in range(3000)))
        assert {info.version for info in infos} == {"1"}


async def test_calls_beyond_the_limit_of_a_port_are_refused_with_a_reason_and_a_time_to_retry() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    async with (
        serving(wait, max_calls=2) as (server, _, stub),
        grpc.aio.insecure_channel(server.address, options=(("grpc.use_local_subchannel_pool", 1),)) as other,
    ):
        running = [stub.Generate(pb.GenerateRequest()) for _ in range(2)]
        for call in running:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator_pb2_grpc.CoordinatorServiceStub(other).GetInfo(pb.GetInfoRequest())
        refused = from_rpc_error(caught.value)
        assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert refused.retry_after_s is not None
        assert "answers 2 such calls" in refused.message
        release.set()
        for call in running:
            assert await call.read() is grpc.aio.EOF
        assert (await stub.GetInfo(pb.GetInfoRequest())).version == "1"


async def test_watches_of_health_do_not_use_up_the_calls_of_a_port() -> None:
    async with serving(nothing) as (server, _, stub), grpc.aio.insecure_channel(server.address) as channel:
        await server.set_serving()
        watches = [health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(300)]
        reads = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
        refused = [from_rpc_error(read) for read in reads if isinstance(read, grpc.aio.AioRpcError)]
        assert len(refused) == 300 - MAX_SIDE_CALLS
        assert {error.reason for error in refused} == {"QUEUE_FULL"}
        assert (await stub.GetInfo(pb.GetInfoRequest())).version == "1"


async def test_a_client_that_resets_its_calls_at_once_does_not_keep_the_others_waiting() -> None:
    is_over = threading.Event()
    async with serving(nothing) as (server, _, stub):
        path = b"/specdec.v1.CoordinatorService/GetInfo"
        attack = asyncio.create_task(asyncio.to_thread(reset_calls, server.address, path, is_over))
        try:
            for _ in range(20):
                assert (await stub.GetInfo(pb.GetInfoRequest())).version == "1"
                await asyncio.sleep(0.1)
        finally:
            is_over.set()
        assert await attack > 5000  # more than gRPC keeps for the port


async def test_the_health_port_answers_health_and_nothing_else() -> None:
    address = f"127.0.0.1:{free_port()}"
    health = Health((COORDINATOR_SERVICE,))
    health.open_port(address)
    async with serving(nothing, health=health) as (server, _, _):
        await server.set_serving()
        async with grpc.aio.insecure_channel(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert await watch.code() == grpc.StatusCode.UNIMPLEMENTED  # it would occupy a thread
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await coordinator_pb2_grpc.CoordinatorServiceStub(channel).GetInfo(pb.GetInfoRequest())
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    health.close_port()


async def test_reflection_lists_the_service() -> None:
    async with serving(nothing) as (server, _, _), grpc.aio.insecure_channel(server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {COORDINATOR_SERVICE, "grpc.health.v1.Health"} <= names
        await call.done_writing()


async def test_a_message_over_the_limit_is_refused_and_never_reaches_the_handler() -> None:
    async with serving(nothing) as (_, service, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(prompt="x" * (100 << 20))).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not service.ended.is_set()
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, errors.InvalidRequest)  # a retry can never succeed
        assert not refused.retryable


async def test_stopping_lets_calls_in_flight_finish_and_refuses_new_ones() -> None:
    release, started = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        started.set()
        await release.wait()

    async with serving(wait) as (server, _, stub):
        in_flight = asyncio.ensure_future(stub.GetInfo(pb.GetInfoRequest()))
        await started.wait()
        stopping = asyncio.create_task(server.stop(60))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetInfo(pb.GetInfoRequest())
        # gRPC answers CANCELLED to a call that arrives during the stop, and UNAVAILABLE afterwards.
        assert isinstance(from_rpc_error(refused.value), errors.Unavailable)
        release.set()
        assert (await in_flight).version == "1"
        await stopping


async def test_a_port_in_use_is_one_clear_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with serving(nothing) as (server, _, _):
        other = ServiceServer(server.address, service_names=())
        with pytest.raises(errors.Unavailable, match=f"cannot listen on {server.address}: Address already in use"):
            await other.start()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("address", ["host.invalid:1234", "192.0.2.1:1234"])
def test_an_address_of_another_machine_is_one_clear_error(address: str) -> None:
    with pytest.raises(errors.Unavailable, match=f"cannot listen on {address}: "):
        require_free(address)
