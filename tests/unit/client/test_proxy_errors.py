"""Errors that a proxy in front of a coordinator made, as a client sees them: when are they tried again?"""

from __future__ import annotations

import grpc
import pytest

from specdec.client.failures import read_failure
from specdec.contract.errors import Forbidden, SpecdecError, Unauthenticated, Unavailable, Unsupported

ENDPOINT = "coordinator:50051"


def failure(code: grpc.StatusCode, details: str = "", *, was_answered: bool) -> SpecdecError:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    return read_failure(error, ENDPOINT, was_answered=was_answered)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, Unsupported),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.PERMISSION_DENIED, Forbidden),
    ],
)
def test_a_refusal_is_tried_again_only_after_a_coordinator_has_answered(
    code: grpc.StatusCode, kind: type[SpecdecError]
) -> None:
    before, after = (failure(code, was_answered=was_answered) for was_answered in (False, True))
    assert type(before) is type(after) is kind
    assert (before.retryable, after.retryable) == (False, True)
    assert before.message == after.message
    assert f"the server at {ENDPOINT} " in before.message


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.ABORTED])
def test_any_other_status_without_a_reason_is_tried_again(code: grpc.StatusCode) -> None:
    error = failure(code, was_answered=False)
    assert (type(error), error.reason, error.retryable) == (Unavailable, "COORDINATOR_UNAVAILABLE", True)
    assert code.name in error.message


def test_a_reset_stream_names_the_http2_code() -> None:
    error = failure(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", was_answered=True)
    assert error.message == (
        f"the stream to the coordinator at {ENDPOINT} was reset on its way, with HTTP/2 code 2; check the coordinator "
        "and each proxy in front of it"
    )
