"""The overlay `cpu` as real containers: ready, confined, rolled and restarted under streams: `make test-pods`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specdec.client import AsyncClient, Budgets
from tests.support.name_server import NameServer
from tests.support.pods.cluster import NETWORK, Cluster
from tests.support.pods.images import size_mb
from tests.support.pods.pod import Pod
from tests.support.pods.programs import ProgramFailed, podman
from tests.support.target_alone import TargetAlone

from .conftest import Deployed

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_STREAMS = 4, 24, 128, 6
USER, PORT = 10001, 50051
#: Time in which a draft is found hung, ended by force and started again: 85 s as rendered, and a start.
RESTART_S = 300.0
#: Points at which podman mounts files of its own.
_MADE_BY_PODMAN = {"/etc", "/etc/mtab", "/run", "/run/.containerenv"}
#: Limit of a client on connecting and resuming. No test waits that long unless something is wrong.
_PATIENCE_S = 120.0

# The images are built in the first test's time.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def references() -> dict[tuple[int, ...], list[int]]:
    """Greedy continuations by Hugging Face's model, by their prompts."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO / "target")
    oracle = TargetAlone(DEMO / "target")
    files = sorted((ROOT / "bench" / "prompts").glob("*.txt"))[:NUM_PROMPTS]
    prompts = [tuple(tokenizer.encode(path.read_text())[-NUM_PROMPT_TOKENS:]) for path in files]
    return {prompt: oracle.greedy(prompt, NUM_TOKENS) for prompt in prompts}


@contextlib.asynccontextmanager
async def coordinators(cluster: Cluster, budgets: Budgets | None = None) -> AsyncIterator[AsyncClient]:
    """Yield a client of the coordinators' Service, whose name leads to the pods that are ready at the time."""

    async def resolve(server: NameServer) -> None:
        while True:
            server.addresses = cluster.addresses("coordinator")
            await asyncio.sleep(0.1)

    with NameServer(cluster.addresses("coordinator")) as server:
        resolving = asyncio.create_task(resolve(server))
        try:
            async with AsyncClient(server.target(PORT), budgets=budgets) as client:
                yield client
        finally:
            resolving.cancel()


@dataclass
class Streams:
    """Generations that follow each other without a pause, several at once."""

    cluster: Cluster
    references: dict[tuple[int, ...], list[int]]
    num_completed: int = 0
    differing: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the streams meanwhile; one that fails ends the block with its error."""
        ending = asyncio.Event()
        budgets = Budgets(resume_s=_PATIENCE_S, connect_s=_PATIENCE_S)
        async with coordinators(self.cluster, budgets) as client, asyncio.TaskGroup() as tasks:
            for _ in range(NUM_STREAMS):
                tasks.create_task(self._follow(client, ending))
            try:
                await self.grow()
                yield
            finally:
                ending.set()

    async def grow(self) -> None:
        """Return once two generations for each stream have ended since the call."""
        goal = self.num_completed + 2 * NUM_STREAMS
        while self.num_completed < goal:  # noqa: ASYNC110  services need the processors
            await asyncio.sleep(0.1)

    async def _follow(self, client: AsyncClient, ending: asyncio.Event) -> None:
        for prompt, expected in itertools.cycle(self.references.items()):
            if ending.is_set():
                return
            output = await client.generate(prompt_token_ids=prompt, max_new_tokens=NUM_TOKENS, temperature=0.0)
            if list(output.token_ids) != expected:
                self.differing.append(output.session_id)
            self.num_completed += 1


def services(deployed: Deployed) -> list[Pod]:
    """Return the pods of our own images."""
    return [pod for pod in deployed.cluster.pods if pod.workload.name != "redis"]


async def test_ready_pods_give_what_greedy_decoding_gives(
    deployed: Deployed, references: dict[tuple[int, ...], list[int]]
) -> None:
    counts = {name: len(deployed.cluster.pods_of(name)) for name in deployed.cluster.workloads}
    assert counts == {"redis": 1, "draft": 1, "target": 2, "coordinator": 2}
    assert [pod.num_restarts for pod in deployed.cluster.pods] == [0] * len(deployed.cluster.pods)
    async with coordinators(deployed.cluster) as client:
        for prompt, expected in references.items():
            output = await client.generate(prompt_token_ids=prompt, max_new_tokens=NUM_TOKENS, temperature=0.0)
            assert list(output.token_ids) == expected
            assert output.stats.num_accepted_tokens > 0, "the draft took part"


def test_a_client_in_another_pod_finds_the_coordinators_by_the_name_of_their_service(deployed: Deployed) -> None:
    image = deployed.cluster.workloads["coordinator"].image
    command = ("specdec", "generate", "import os\n", "--json", "--temperature", "0", "--max-new-tokens", "16")
    output = podman("run", "--rm", "--network", NETWORK, image, *command, "--endpoint", f"coordinator:{PORT}")
    assert json.loads(output)["usage"]["num_output_tokens"] == 16


def test_the_containers_run_as_the_manifests_say(deployed: Deployed) -> None:
    for pod in services(deployed):
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pod.pid}/status").read_text().splitlines())
        assert {*status["Uid"].split(), *status["Gid"].split()} == {str(USER)}, pod.name
        assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}, pod.name
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2"), pod.name
        assert memory_limit_bytes(pod) == 2**30 * int(limit(pod).removesuffix("Gi")), pod.name
        assert os.stat(f"/proc/{pod.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino


def limit(pod: Pod) -> str:
    return str(pod.workload.container["resources"]["limits"]["memory"])


def memory_limit_bytes(pod: Pod) -> int:
    """Return the limit that the container's own cgroup has, of either version."""
    files = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"
    return int(pod.execute(["sh", "-c", f"cat {files} 2>/dev/null || true"]))


def test_a_container_writes_to_its_volumes_and_nowhere_else(deployed: Deployed) -> None:
    for pod in services(deployed):
        volumes = {mount["mountPath"] for mount in pod.workload.container["volumeMounts"]}
        for volume in volumes:
            pod.execute(["touch", f"{volume}/written"])
        for folder in ("/", "/app", "/home/specdec", "/var/tmp", "/run"):
            with pytest.raises(ProgramFailed, match="Read-only file system"):
                pod.execute(["touch", f"{folder}/written"])
        # Podman itself makes the points that it mounts something at.
        assert set(pod.changed_paths()) - _MADE_BY_PODMAN - volumes == set(), pod.name


@pytest.mark.parametrize("name", ["target", "coordinator"])
async def test_no_stream_fails_or_differs_while_a_deployment_is_rolled(
    name: str, deployed: Deployed, references: dict[tuple[int, ...], list[int]]
) -> None:
    streams = Streams(deployed.cluster, references)
    async with streams.running():
        ended = await asyncio.to_thread(deployed.cluster.roll, name)
        await streams.grow()
    print(f"{streams.num_completed} generations while {len(ended)} pods of {name} were replaced")
    assert streams.differing == []
    assert [pod.exit_status for pod in ended] == [0] * len(ended)
    assert len(deployed.cluster.pods_of(name)) == len(ended)


async def test_a_draft_that_hangs_is_restarted_by_its_probe_while_streams_go_on(
    deployed: Deployed, references: dict[tuple[int, ...], list[int]]
) -> None:
    (pod,) = deployed.cluster.pods_of("draft")
    hung = pod.pid
    streams = Streams(deployed.cluster, references)
    async with streams.running():
        os.kill(hung, signal.SIGSTOP)
        await streams.grow()
        async with asyncio.timeout(RESTART_S):
            while not (pod.num_restarts and pod.is_ready):  # noqa: ASYNC110  a thread changes them
                await asyncio.sleep(0.2)
        await streams.grow()
    assert (pod.num_restarts, streams.differing) == (1, [])
    assert pod.pid != hung
    others = [each.num_restarts for each in deployed.cluster.pods if each is not pod]
    assert others == [0] * len(others)


def test_the_image_of_the_coordinator_has_at_most_300_mb_above_its_base(deployed: Deployed) -> None:
    base_mb = size_mb(deployed.base)
    above_mb = {workload.name: size_mb(workload.image) - base_mb for workload in deployed.cluster.workloads.values()}
    print(f"base {base_mb:.0f} MB; above it, in MB: { {name: round(size) for name, size in above_mb.items()} }")
    assert above_mb["coordinator"] <= 300
