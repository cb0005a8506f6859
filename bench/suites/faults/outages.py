"""How long a stream is silent after one of the processes that serve it is killed or stopped.

Two coordinators, two targets and two drafts on one Redis; one greedy stream. The part that serves the stream is lost in
the middle of it, and the silence is the longest time without a token from then on. Each part is started again before
the next loss. Part of the suite `faults`, which calls this.
"""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.harness.report import progress
from bench.harness.rows import Row
from bench.systems.models import DEMO
from bench.systems.simulated import ProcessSystem, ReplicaCommand, redis_server
from specdec.client import Budgets, Client

NUM_LOSSES, NUM_QUICK_LOSSES = 5, 1
NUM_TOKENS = 300
#: Tokens before the loss.
NUM_WARM_TOKENS = 100
PROMPT = (5, 6, 7)

#: Defaults of the product that the limits are made of: --lease-ttl-s; the least draft deadline; and the time after
#: which a coordinator gives up a target that does not describe itself (two looks at its calls and the wait).
LEASE_TTL_S = 3.0
LEAST_DRAFT_DEADLINE_S = 0.1
DRAFT_DEADLINE_MULTIPLE = 6.0
WATCHDOG_S = 2.5

_PATIENT = Budgets(connect_s=60.0, resume_s=60.0)


@dataclass(frozen=True)
class _Quiet:
    """Times of the undisturbed system, for the limits."""

    token_ids: tuple[int, ...]
    replay_s: float
    """Time of a prompt as long as the stream is when its target is lost."""
    target_only_step_s: float
    draft_wait_s: float
    """Mean wait for a draft in a round."""


def measure_outages(row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the silences, each beside its limit, and the number of streams whose tokens differ."""
    num_losses = NUM_QUICK_LOSSES if quick else NUM_LOSSES
    rows: list[Row] = []
    with redis_server() as redis_url, _system(redis_url) as system:
        quiet = _quiet(system)
        draft_deadline_s = max(LEAST_DRAFT_DEADLINE_S, DRAFT_DEADLINE_MULTIPLE * quiet.draft_wait_s)
        limits = {
            ("coordinator", signal.SIGKILL): LEASE_TTL_S + 1.0,
            ("target", signal.SIGKILL): 1.0 + quiet.replay_s,
            ("target", signal.SIGSTOP): WATCHDOG_S + 1.0,
            ("draft", signal.SIGKILL): draft_deadline_s + quiet.target_only_step_s,
            ("draft", signal.SIGSTOP): draft_deadline_s + quiet.target_only_step_s,
        }
        for (part, number), limit_s in limits.items():
            case = f"demo pair, a {part} {'killed' if number == signal.SIGKILL else 'stopped'}"
            silences, num_faults = [], 0
            with progress(case, num_losses) as advance:
                for _ in range(num_losses):
                    silence_s, token_ids = _lose(system, part, number)
                    silences.append(silence_s)
                    num_faults += token_ids != quiet.token_ids
                    advance()
            of_case = partial(row, case=case, system="specdec")
            note = f"the longest of {num_losses}"
            rows += [
                of_case(metric="silence", value=max(silences), unit="s", at_most=limit_s, note=note),
                of_case(metric="other_tokens", value=float(num_faults), unit="streams", at_most=0.0),
            ]
    return rows


def _system(redis_url: str) -> ProcessSystem:
    return ProcessSystem(DEMO / "target", model_replicas(2, 2), redis_url=redis_url, num_coordinators=2)


def model_replicas(num_targets: int, num_drafts: int) -> list[ReplicaCommand]:
    """Return targets and drafts of the demo pair."""
    return [
        ReplicaCommand.serving(role, DEMO / role, "--device", "cpu", "--dtype", "float32")
        for role in [*["target"] * num_targets, *["draft"] * num_drafts]
    ]


def _quiet(system: ProcessSystem) -> _Quiet:
    with Client(system.endpoint, budgets=_PATIENT) as client:
        options = {"temperature": 0, "ignore_eos": True}
        for _ in range(2):  # the first one warms up
            drafted = client.generate(prompt_token_ids=PROMPT, max_new_tokens=NUM_TOKENS, **options)
            began_s = time.monotonic()
            alone = client.generate(prompt_token_ids=PROMPT, max_new_tokens=NUM_TOKENS, mode="off", **options)
            alone_s = time.monotonic() - began_s
            began_s = time.monotonic()
            replayed = [*PROMPT[::-1], *drafted.token_ids[:NUM_WARM_TOKENS]]
            prefilled = client.generate(prompt_token_ids=replayed, max_new_tokens=1, **options)
            replay_s = time.monotonic() - began_s
            for output in (drafted, alone, prefilled):  # a replica with sessions is taken for the one that serves
                client.delete_session(output.session_id)
    draft_wait_s = drafted.stats.draft_s / max(1, drafted.stats.num_rounds)
    return _Quiet(drafted.token_ids, replay_s, alone_s / NUM_TOKENS, draft_wait_s)


def _lose(system: ProcessSystem, part: str, number: signal.Signals) -> tuple[float, tuple[int, ...]]:
    """Lose the part that serves a stream; return the stream's longest silence after that, and its tokens."""
    silence_s, last_s, num_tokens, lost = 0.0, 0.0, 0, ""
    idle_s = {endpoint: system.cpu_s(endpoint) for endpoint in system.endpoints}
    with Client(f"ipv4:{','.join(system.endpoints)}", budgets=_PATIENT) as client:
        options = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NUM_TOKENS}
        with client.generate(prompt_token_ids=PROMPT, stream=True, **options) as stream:
            for chunk in stream:
                now_s = time.monotonic()
                num_tokens += len(chunk.token_ids)
                if lost:
                    silence_s = max(silence_s, now_s - last_s)
                    last_s = now_s
                elif num_tokens >= NUM_WARM_TOKENS:
                    used_s = {endpoint: system.cpu_s(endpoint) - before_s for endpoint, before_s in idle_s.items()}
                    lost = max(used_s, key=used_s.__getitem__) if part == "coordinator" else _serving(client, part)
                    os.kill(system.child(lost).pid, number)
                    last_s = time.monotonic()
            output = stream.result()
        client.delete_session(output.session_id)
    if number == signal.SIGSTOP:
        os.kill(system.child(lost).pid, signal.SIGKILL)
    system.start_again([lost])
    return silence_s, output.token_ids


def _serving(client: Client, role: str) -> str:
    """Return the address of the replica that holds the only session."""
    replicas = [replica for pool in client.info().pools if pool.role == role for replica in pool.replicas]
    return max(replicas, key=lambda replica: replica.num_sessions).address
