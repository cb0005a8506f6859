"""Every error crosses gRPC and a program's last line unchanged, and other statuses map to an error of the tree."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.contract import errors
from specdec.contract.errors import SpecdecError
from specdec.rpc import status_mapping

TREE = sorted(SpecdecError.__subclasses__(), key=lambda error_type: error_type.__name__)


def instances() -> list[SpecdecError]:
    plain = [error_type("one sentence") for error_type in TREE if error_type is not errors.KvMiss]
    return [
        *plain,
        errors.KvMiss("send more", have=48),
        errors.InvalidRequest("top_p is 3", field="sampling.top_p"),
        errors.InvalidRequest("too long", reason="CONTEXT_TOO_LONG"),
        errors.InvalidRequest("no template", reason="NO_CHAT_TEMPLATE"),
        errors.NotFound("no pool", reason="POOL_NOT_FOUND"),
        errors.ResourceExhausted("full", reason="KV_EXHAUSTED", retry_after_s=2.25),
        errors.ResourceExhausted("enough", reason="QUOTA_EXCEEDED"),
        errors.Unavailable("redis is gone", reason="STORE_UNAVAILABLE"),
        errors.Unavailable("going", reason="DRAINING"),
    ]


def identity(error: SpecdecError) -> tuple[object, ...]:
    have = error.have if isinstance(error, errors.KvMiss) else None
    return type(error), error.code, error.reason, error.message, error.field, error.retry_after_s, have


@pytest.mark.parametrize("error", instances(), ids=lambda error: f"{type(error).__name__}-{error.reason}")
def test_an_error_survives_a_status_with_all_fields(error: SpecdecError) -> None:
    wire = status_mapping.to_status(error, request_id="r1").SerializeToString()
    assert identity(status_mapping.from_status(status_pb2.Status.FromString(wire))) == identity(error)


@pytest.mark.parametrize("error", instances(), ids=lambda error: f"{type(error).__name__}-{error.reason}")
def test_an_error_survives_an_item_status(error: SpecdecError) -> None:
    back = status_mapping.from_item_status(status_mapping.to_item_status(error))
    assert (type(back), back.reason, back.message) == (type(error), error.reason, error.message)


@pytest.mark.parametrize("error", instances(), ids=lambda error: f"{type(error).__name__}-{error.reason}")
def test_an_error_survives_the_line_that_a_program_ends_with(error: SpecdecError) -> None:
    back = errors.parse_error_line(errors.error_line(error))
    assert back is not None
    assert (type(back), back.reason, back.message) == (type(error), error.reason, error.message)


def test_a_status_carries_the_standard_details() -> None:
    carried = status_mapping.to_status(errors.InvalidRequest("top_p is 3", field="sampling.top_p"), request_id="r1")
    error_info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert carried.details[0].Unpack(error_info)
    assert carried.details[1].Unpack(bad_request)
    assert (error_info.reason, error_info.domain) == ("INVALID_REQUEST", "specdec")
    assert error_info.metadata["request_id"] == "r1"
    assert bad_request.field_violations[0].field == "sampling.top_p"
    retry = error_details_pb2.RetryInfo()
    assert status_mapping.to_status(errors.Unavailable("later", retry_after_s=1.5)).details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.5


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unsupported),
        (grpc.StatusCode.PERMISSION_DENIED, errors.Forbidden),
        (grpc.StatusCode.UNKNOWN, errors.Unavailable),
        (grpc.StatusCode.INTERNAL, errors.Unavailable),
        (grpc.StatusCode.DATA_LOSS, errors.Unavailable),
    ],
)
def test_a_status_without_details_is_mapped_by_its_code(code: grpc.StatusCode, expected: type[SpecdecError]) -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="words")
    mapped = status_mapping.from_rpc_error(error, peer="10.0.0.1:5")
    assert type(mapped) is expected
    assert mapped.message == "10.0.0.1:5: words"


def test_a_reset_stream_is_never_a_refusal() -> None:
    """gRPC makes PERMISSION_DENIED of INADEQUATE_SECURITY, and RESOURCE_EXHAUSTED of ENHANCE_YOUR_CALM."""
    for code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED):
        reset = "Received RST_STREAM with error code 12"
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=reset)
        assert type(status_mapping.from_rpc_error(error)) is errors.Unavailable


def test_a_status_with_an_error_info_of_another_domain_comes_from_a_proxy() -> None:
    foreign = status_pb2.Status(code=code_pb2.INTERNAL, message="elsewhere")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="SESSION_BUSY", domain="example.com"))
    trailing = grpc.aio.Metadata(*status_mapping.trailing_metadata(foreign))
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), trailing, details="elsewhere")
    assert not status_mapping.is_ours(error)
    assert type(status_mapping.from_rpc_error(error)) is errors.Unavailable


@pytest.mark.parametrize(
    ("details", "expected", "message"),
    [
        (
            "SERVER: Received message larger than max (3000075 vs. 1048576)",
            errors.InvalidRequest,
            "the request has 3000075 bytes; the limit of 10.0.0.1:5 is 1048576 (its --max-message-bytes)",
        ),
        (
            "CLIENT: Received message larger than max (70 vs. 64)",
            errors.Internal,
            "the answer of 10.0.0.1:5 has 70 bytes; the limit is 64",
        ),
        ("the queue is full", errors.ResourceExhausted, "10.0.0.1:5: the queue is full"),
    ],
)
def test_a_message_too_large_for_grpc_names_the_side_and_its_limit(
    details: str, expected: type[SpecdecError], message: str
) -> None:
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    error = grpc.aio.AioRpcError(exhausted, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    mapped = status_mapping.from_rpc_error(error, peer="10.0.0.1:5")
    assert (type(mapped), mapped.message) == (expected, message)


def test_an_error_info_of_another_domain_is_ignored() -> None:
    foreign = status_pb2.Status(code=code_pb2.NOT_FOUND, message="elsewhere")
    foreign.details.add().Pack(error_details_pb2.ErrorInfo(reason="SESSION_BUSY", domain="example.com"))
    assert type(status_mapping.from_status(foreign)) is errors.NotFound
