"""`specdec up --api-keys`: every service asks for credentials, and the commands send them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from specdec.client import Client
from specdec.contract.errors import SpecdecError
from specdec.rpc.channels import dial_blocking
from specdec.rpc.status_mapping import from_rpc_error
from specdec.v1 import common_pb2, target_pb2_grpc
from tests.support.key_files import key_line, write_private
from tests.support.up_rig import specdec, start_up

pytestmark = pytest.mark.full


def test_a_locked_system_serves_each_tenant_and_operator_by_its_key(tmp_path: Path) -> None:
    keys = key_line("of-acme", "acme generate") + key_line("of-beta", "beta generate") + key_line("of-ops", "o operate")
    up, endpoint = start_up("--api-keys", str(write_private(tmp_path / "keys", keys)), "--route", "auto")
    try:
        refused = specdec("generate", "hello", "--endpoint", endpoint)
        assert "(UNAUTHENTICATED)" in refused.stderr
        ours = specdec("generate", "hello", "--endpoint", endpoint, "--json", SPECDEC_API_KEY="of-acme")
        session_id = json.loads(ours.stdout)["session_id"]
        with Client(endpoint, api_key="of-beta") as beta, Client(endpoint, api_key="of-acme") as acme:
            with pytest.raises(SpecdecError, match="is not a session"):
                beta.get_session(session_id)
            assert acme.get_session(session_id).num_tokens > 0
        assert "(FORBIDDEN)" in specdec("promote", "default", "--endpoint", endpoint, SPECDEC_API_KEY="of-acme").stderr
        promoted = specdec("promote", "default", "--endpoint", endpoint, SPECDEC_API_KEY="of-ops")
        assert promoted.returncode == 0, promoted.stderr
        with Client(endpoint, api_key="of-ops") as operator:
            (target,) = [pool.replicas[0] for pool in operator.info().pools if pool.role == "target"]
        with dial_blocking(target.address) as channel, pytest.raises(Exception, match="API key is needed") as error:
            target_pb2_grpc.TargetServiceStub(channel).GetEngineInfo(common_pb2.GetEngineInfoRequest())
        assert from_rpc_error(error.value).reason == "UNAUTHENTICATED"  # type: ignore[arg-type]
    finally:
        up.send_signal(signal.SIGTERM)
        _, stderr = up.communicate()
    assert not any(key in stderr for key in ("of-acme", "of-beta", "of-ops"))
