"""Limits and usage records cost no command of Redis for a token: counted by the server itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import redis

from specdec.access.grants import Limits
from tests.support.coordinator_rig import Rig, request
from tests.support.redis_fixture import RedisServer

LIMITS = Limits(max_concurrent=8, max_requests_per_minute=1000, max_tokens_per_minute=1_000_000)

#: Reports of a limited tenant in a second, at most: four, and one at each end of a turn.
REPORTS_PER_S = 4


async def test_a_long_output_of_a_limited_tenant_sends_no_more_scripts_than_its_commits(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with Rig(store_url=server.url) as rig:
            coordinator = await rig.coordinator(tenant_limits=LIMITS)
            await coordinator.generate(request(session_id="first", max_new_tokens=4))  # loads the scripts
            counted = [
                await _count(server, coordinator, f"s{num_tokens}", num_tokens) for num_tokens in (8, 300)
            ]  # fmt: skip
        (short, short_s), (long, long_s) = counted
        assert long["num_commits"] > short["num_commits"]
        assert long["num_records"] == short["num_records"] == 1
        # What is left beside the commits are the calls of a turn, which do not depend on its length, and reports.
        assert long["num_others"] <= short["num_others"] + REPORTS_PER_S * (short_s + long_s) + 4
    finally:
        server.stop()


async def _count(
    server: RedisServer, coordinator: Any, session_id: str, num_tokens: int
) -> tuple[dict[str, int], float]:
    """Return the scripts that Redis ran for a turn, and the time that the turn took."""
    with redis.Redis.from_url(server.url) as client:
        client.config_resetstat()
        began_s = time.monotonic()
        output = await coordinator.generate(request(session_id=session_id, max_new_tokens=num_tokens, ignore_eos=True))
        seconds = time.monotonic() - began_s
        assert len(output.token_ids) == num_tokens
        stats: dict[str, Any] = client.info("commandstats")

    def calls(command: str) -> int:
        return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])

    num_commits = calls("setrange") - 1  # `begin_request` writes the prompt
    counts = {
        "num_commits": num_commits,
        "num_records": calls("xadd"),
        "num_others": calls("evalsha") - num_commits,
    }
    return counts, seconds
