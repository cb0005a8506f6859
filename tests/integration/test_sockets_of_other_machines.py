"""A coordinator whose replicas name Unix sockets that exist on another machine only."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from specdec.rpc.unix_sockets import new_name
from tests.support.coordinator_rig import PROMPT, Rig, request

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets exist on Linux alone")


async def test_a_coordinator_on_another_machine_loses_no_request_and_no_draft() -> None:
    async with Rig(targets=1, drafts=1) as rig:
        for service in rig.services:
            service.servicer._unix_socket = SimpleNamespace(name=new_name())
        coordinator = await rig.coordinator()
        for _ in range(3):
            output = await coordinator.generate(request())
            assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
            assert output.finished.stats.num_target_only_steps <= 1


async def test_a_run_that_begins_on_another_machine_is_sent_again_and_its_replica_stays_in_use() -> None:
    async with Rig(targets=1, drafts=0) as rig:
        (service,) = rig.services
        service.servicer._unix_socket = SimpleNamespace(name=new_name())
        coordinator = await rig.coordinator()
        output = await coordinator.generate(request(gamma=0))
        assert output.token_ids == rig.target.worker.greedy_continuation(PROMPT, 24)
        (replica,) = coordinator.pools.targets()
        assert replica.takes_sessions
