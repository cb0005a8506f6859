"""A device that keeps failing ends its replica's process; one that hangs makes it NOT_SERVING until it continues."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import common_pb2, coordinator_pb2, target_pb2_grpc
from tests.support.injured_stack import Injured
from tests.support.process_rig import NUM_TOKENS, ask, models, read_rest, read_some, reference, run, stub_of
from tests.support.scraping import Endpoint
from tests.support.stack import Stack, is_serving

__all__ = ["models", "reference"]

_PATIENCE_S = 60.0

_ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def injured(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Injured]:
    """Yield the stack; every test leaves it with all replicas serving."""
    stack = Stack(*models, coordinator_arguments=("--target-wait-s", "0"), has_metrics=True)
    injured = Injured(stack, tmp_path_factory.mktemp("injuries"))
    with stack:
        yield injured


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("role", [pytest.param("target", marks=pytest.mark.full), "draft"])
def test_a_device_that_keeps_failing_ends_its_process_with_one_error_line(
    injured: Injured, reference: list[int], role: str
) -> None:
    stub = stub_of(injured.stack.endpoint)
    injured.injure(role, "fail", _ILLEGAL_ADDRESS)
    stream = stub.Generate(ask(role, num_tokens=4 * NUM_TOKENS, gamma=1), timeout=_PATIENCE_S)
    output = read_some(stream, 8)
    if role == "draft":
        read_rest(stream, output)
        assert output.token_ids == reference
    else:
        with pytest.raises(grpc.RpcError) as caught:
            read_rest(stream, output)
        assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"
    part = injured.stack.parts[role]
    assert part.process is not None
    assert part.process.wait(_PATIENCE_S) == 1
    errors = [line for line in part.log.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: the device failed permanently")
    assert _ILLEGAL_ADDRESS in errors[0]
    # After a restart with a working device the replica serves the same session.
    injured.heal(role)
    injured.stack.restart(role)
    if role == "target":
        _until(lambda: is_serving(injured.stack.endpoint))
        rest = run(stub, coordinator_pb2.GenerateRequest(session_id=role, resume_from=len(output.token_ids)))
        assert output.token_ids + rest.token_ids == reference


def test_a_target_whose_device_hangs_is_not_serving_until_its_step_ends(injured: Injured, reference: list[int]) -> None:
    stub, target = stub_of(injured.stack.endpoint), injured.stack.parts["target"]
    metrics = Endpoint(target.metrics)
    assert metrics.scrape_now().value("device_stalled") == 0
    injured.injure("target", "hang")
    stream = stub.Generate(ask("s", num_tokens=4 * NUM_TOKENS, gamma=1), timeout=_PATIENCE_S)
    output = read_some(stream, 8)
    with pytest.raises(grpc.RpcError) as caught:
        read_rest(stream, output)
    assert from_rpc_error(caught.value).reason == "REPLICA_UNAVAILABLE"
    _until(lambda: not is_serving(target.address) and not is_serving(injured.stack.endpoint))
    with grpc.insecure_channel(target.address) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            target_pb2_grpc.TargetServiceStub(channel).GetEngineInfo(common_pb2.GetEngineInfoRequest(), timeout=10.0)
        assert from_rpc_error(refused.value).reason == "REPLICA_UNAVAILABLE"
    assert metrics.scrape_now().value("device_stalled") == 1
    injured.heal("target")
    _until(lambda: is_serving(target.address) and is_serving(injured.stack.endpoint))
    assert metrics.scrape_now().value("device_stalled") == 0
    rest = run(stub, coordinator_pb2.GenerateRequest(session_id="s", resume_from=len(output.token_ids)))
    assert output.token_ids + rest.token_ids == reference


def test_a_target_whose_device_hangs_can_be_terminated(injured: Injured) -> None:
    injured.injure("target", "hang")
    stream = stub_of(injured.stack.endpoint).Generate(ask(num_tokens=4 * NUM_TOKENS, gamma=1), timeout=_PATIENCE_S)
    read_some(stream, 8)
    _until(lambda: Endpoint(injured.stack.parts["target"].metrics).scrape_now().value("device_stalled") == 1)
    process = injured.stack.parts["target"].process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(_PATIENCE_S) == 0
    injured.heal("target")
    injured.stack.restart("target")
