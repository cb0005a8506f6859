"""Pools of a simulated system: targets that verify in steps, drafts, and coordinators between them.

A stream alternates between a draft call and a verification. While there is no draft it is a run: the target takes it
into every step. A target takes all calls that wait into one step, and as many rows of prompts as make the step longer
by the budget; the time of the step is that of `specdec plan`. A draft call lasts for its steps at the number of calls
in the replica, and half a step until it is taken. A coordinator is one queue for the processor time of its rounds.
Streams of one step that go to the same draft replica travel together, with the mean wait at their coordinators.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import simpy
from simpy.events import Event

from k8s.simulation.admission import Slots
from specdec.cli.planning.cards import CALLS
from specdec.cli.planning.deployment import Deployment, ExpectedLoad

_NUM_DRAWS = 1 << 16
#: Prompt rows that run in any step, and the most that one step takes.
_PROMPT_BLOCK, _MAX_PROMPT_ROWS = 16, 1 << 14


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, models and costs of a simulated system."""

    load: ExpectedLoad
    """Limits and lengths; its rate is that of the plan at the begin of a trace."""
    alpha: float
    deployment: Deployment
    """Models, cards and gamma."""
    coordinator_s_per_token: float
    prefill_budget_s: float
    """Time for prompts in one step of a target."""
    draft_deadline_s: float
    slots_per_target: int
    max_wait_s: float
    """Predicted wait for a slot beyond which a request is refused."""


@dataclass(slots=True)
class Stream:
    """One request."""

    arrived_s: float
    tokens_left: int
    coordinator: Coordinator
    prompt_tokens_left: int
    """Tokens of its prompt that have not run yet."""
    target: Target | None = None
    """None while it waits for a slot."""
    begun_s: float = 0.0
    called_s: float = 0.0
    """Time at which its current call arrived at the target."""
    first_token_s: float = 0.0


@dataclass(eq=False, slots=True)
class Replica:
    """Counters of a pod; a pod serves from `serving_s` on."""

    name: str
    serving_s: float
    is_leaving: bool = False
    num_calls: int = 0
    """Calls in the replica."""
    call_seconds: float = 0.0
    num_answered: int = 0
    busy_s: float = 0.0


@dataclass(eq=False, slots=True)
class Draft(Replica):
    busy_since_s: float = 0.0

    def busy_until(self, now_s: float) -> float:
        """Return the busy time, that of current calls included."""
        return self.busy_s + (now_s - self.busy_since_s if self.num_calls else 0.0)


@dataclass(eq=False, slots=True)
class Target(Replica):
    waiting: list[Stream] = field(default_factory=list)
    """Calls that no step has taken."""
    prompts: deque[Stream] = field(default_factory=deque)
    num_streams: int = 0
    wake: Any = None


@dataclass(eq=False, slots=True)
class Coordinator(Replica):
    free_s: float = 0.0
    """Time at which its processor has done what it has."""
    cpu_s: float = 0.0
    num_assigned: int = 0
    """Requests, those that wait for a slot included."""
    num_streams: int = 0
    lag_sum_s: float = 0.0
    lag_count: int = 0


class System:
    """The pods of all pools and the streams that they serve."""

    def __init__(self, workload: Workload, seed: int, on_end: Callable[[Stream, float], None]) -> None:
        """
        Args:
            workload: requests and models.
            seed: of arrivals, placement and acceptance.
            on_end: receives each finished stream and the time.
        """
        self.env = simpy.Environment()
        self.workload = workload
        self.targets: list[Target] = []
        self.drafts: list[Draft] = []
        self.coordinators: list[Coordinator] = []
        self.random = random.Random(seed)
        self.num_late = 0
        """Draft calls beyond their deadline."""
        self.num_target_only = 0
        """Rounds that found no draft replica."""
        self._on_end = on_end
        self._slots = Slots(workload.max_wait_s, workload.load.output_tokens * workload.deployment.expected.tpot_s)
        self._emitted = _emitted(workload.alpha, workload.deployment.gamma, self.random)
        self._num_draws = 0
        self._context = workload.load.context_tokens
        self._prompt_rooms: dict[tuple[int, int], int] = {}
        """Known results of `_prompt_room` by calls and rows of each."""

    # ---- pods ----

    def add_target(self, name: str, serving_s: float) -> Target:
        target = Target(name, serving_s)
        self.targets.append(target)
        self.env.process(self._serve(target))
        return target

    def add_draft(self, name: str, serving_s: float) -> Draft:
        self.drafts.append(Draft(name, serving_s))
        return self.drafts[-1]

    def add_coordinator(self, name: str, serving_s: float) -> Coordinator:
        self.coordinators.append(Coordinator(name, serving_s))
        return self.coordinators[-1]

    # ---- a request ----

    def arrive(self) -> bool:
        """Begin a request at the coordinator with the fewest, or let it wait for a slot. False: it is refused."""
        if self._slots.refuses(self._num_slots):
            return False
        coordinator = min(_serving(self.coordinators, self.env.now), key=lambda each: each.num_assigned)
        coordinator.num_assigned += 1
        load = self.workload.load
        stream = Stream(self.env.now, load.output_tokens, coordinator, load.prompt_tokens)
        self._slots.waiting.append(stream)
        self.begin_waiting()
        return True

    def begin_waiting(self) -> None:
        """Give free slots to the requests that wait, each at the less loaded of two targets."""
        while (stream := self._slots.take(self._num_slots)) is not None:
            target = self._placed(_serving(self.targets, self.env.now))
            stream.target, stream.begun_s, stream.called_s = target, self.env.now, self.env.now
            target.num_streams += 1
            stream.coordinator.num_streams += 1
            target.prompts.append(stream)
            self._enter(target, 1)

    @property
    def _num_slots(self) -> int:
        return max(1, self.workload.slots_per_target * len(_serving(self.targets, self.env.now)))

    def _placed(self, targets: list[Target]) -> Target:
        first, second = self.random.choice(targets), self.random.choice(targets)
        return first if first.num_streams <= second.num_streams else second

    def _enter(self, target: Target, num_calls: int) -> None:
        target.num_calls += num_calls
        if target.wake is not None:
            target.wake.succeed()
            target.wake = None

    # ---- targets ----

    def _serve(self, target: Target) -> Generator[Event, Any, None]:
        """Run steps until the target has left and its last stream has ended."""
        env = self.env
        while not (target.is_leaving and not target.num_streams):
            if not target.waiting and not target.prompts:
                target.wake = env.event()
                yield target.wake
                continue
            calls, target.waiting = target.waiting, []
            num_prompt_rows, prompted = self._take_prompts(target, len(calls))
            step_s = self._step_s(len(calls), num_prompt_rows)
            yield env.timeout(step_s)
            target.busy_s += step_s
            self._finish_step(target, calls, prompted)

    @property
    def _num_rows(self) -> int:
        """Rows of a call."""
        return self.workload.deployment.gamma + 1 if _serving(self.drafts, self.env.now) else 1

    def _step_s(self, num_calls: int, num_prompt_rows: int) -> float:
        sequences = num_calls or 1
        rows = (num_calls * self._num_rows + num_prompt_rows) / sequences
        return self.workload.deployment.target.step_s(sequences, rows, self._context if num_calls else 0)

    def _take_prompts(self, target: Target, num_calls: int) -> tuple[int, list[Stream]]:
        """Return the number of prompt rows in the next step, and the streams whose prompts end with it."""
        if not target.prompts:
            return 0, []
        left = room = self._prompt_room(num_calls)
        ended = []
        while target.prompts and left:
            stream = target.prompts[0]
            part = min(left, stream.prompt_tokens_left)
            stream.prompt_tokens_left -= part
            left -= part
            if not stream.prompt_tokens_left:
                ended.append(target.prompts.popleft())
        return room - left, ended

    def _prompt_room(self, num_calls: int) -> int:
        """Return how many prompt rows make a step longer by the budget; a block of them runs in any case."""
        key = num_calls, self._num_rows
        if key not in self._prompt_rooms:
            most_s = (self._step_s(num_calls, 0) if num_calls else 0.0) + self.workload.prefill_budget_s
            fits, too_many = _PROMPT_BLOCK, _MAX_PROMPT_ROWS
            while too_many - fits > _PROMPT_BLOCK:
                middle = (fits + too_many) // 2
                fits, too_many = (middle, too_many) if self._step_s(num_calls, middle) <= most_s else (fits, middle)
            self._prompt_rooms[key] = fits
        return self._prompt_rooms[key]

    def _finish_step(self, target: Target, calls: list[Stream], prompted: list[Stream]) -> None:
        """Emit tokens, and send the streams that go on to their drafts."""
        now_s = self.env.now
        ended = len(calls) + len(prompted)
        target.num_calls -= ended
        target.num_answered += ended
        target.call_seconds += sum(now_s - stream.called_s for stream in calls)
        for stream in prompted:
            target.call_seconds += now_s - stream.called_s
            stream.first_token_s = now_s + CALLS.target_s
            stream.tokens_left -= 1
        self._begin_rounds(target, prompted + self._continued(calls))

    def _continued(self, calls: list[Stream]) -> list[Stream]:
        """Emit the tokens of a verification and return the streams that are not at their end."""
        going, has_drafts = [], bool(_serving(self.drafts, self.env.now))
        for stream in calls:
            self._num_draws += 1
            stream.tokens_left -= self._emitted[self._num_draws % _NUM_DRAWS] if has_drafts else 1
            if stream.tokens_left > 0:
                going.append(stream)
            else:
                self._end(stream)
        return going

    def _end(self, stream: Stream) -> None:
        assert stream.target is not None
        stream.target.num_streams -= 1
        stream.coordinator.num_streams -= 1
        stream.coordinator.num_assigned -= 1
        self._slots.end(self.env.now - stream.begun_s)
        self._on_end(stream, self.env.now + CALLS.target_s)
        self.begin_waiting()

    # ---- rounds ----

    def _begin_rounds(self, target: Target, streams: list[Stream]) -> None:
        if not streams:
            return
        wait_s = sum(map(self._coordinate, streams)) / len(streams)
        drafts = _serving(self.drafts, self.env.now)
        if not drafts:
            self.num_target_only += len(streams)
            self._call(target, streams)  # the target goes on by itself
            return
        for index in range(len(drafts)):
            if part := streams[index :: len(drafts)]:
                draft = drafts[(index + self._num_draws) % len(drafts)]
                self._after(wait_s + CALLS.draft_s, partial(self._draft, draft, target, part))

    def _coordinate(self, stream: Stream) -> float:
        """Return the time until the stream's coordinator has done what the round needs."""
        now_s, coordinator = self.env.now, stream.coordinator
        lag_s = max(0.0, coordinator.free_s - now_s)
        cost_s = self.workload.coordinator_s_per_token * self.workload.deployment.tokens_per_round
        coordinator.free_s = now_s + lag_s + cost_s
        coordinator.cpu_s += cost_s
        coordinator.lag_sum_s += lag_s
        coordinator.lag_count += 1
        return lag_s

    def _draft(self, draft: Draft, target: Target, streams: list[Stream]) -> None:
        """Run the draft calls of streams: gamma steps with all that are in the replica, and the rest of a step."""
        now_s, was_busy = self.env.now, draft.num_calls > 0
        if not was_busy:
            draft.busy_since_s = now_s
        draft.num_calls += len(streams)
        model, gamma = self.workload.deployment.draft, self.workload.deployment.gamma
        assert model is not None
        draft_s = model.step_s(draft.num_calls, 1, self._context) * (gamma + 0.5 * was_busy)
        self._after(draft_s, partial(self._drafted, draft, target, streams, draft_s))

    def _drafted(self, draft: Draft, target: Target, streams: list[Stream], draft_s: float) -> None:
        draft.num_calls -= len(streams)
        draft.num_answered += len(streams)
        draft.call_seconds += draft_s * len(streams)
        self.num_late += len(streams) * (draft_s > self.workload.draft_deadline_s)
        if not draft.num_calls:
            draft.busy_s += self.env.now - draft.busy_since_s
        self._after(CALLS.target_s, partial(self._call, target, streams))

    def _call(self, target: Target, streams: list[Stream]) -> None:
        for stream in streams:
            stream.called_s = self.env.now
        target.waiting += streams
        self._enter(target, len(streams))

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.env.timeout(delay_s).callbacks.append(lambda _: act())


def _serving(pods: list[Any], now_s: float) -> list[Any]:
    return [pod for pod in pods if pod.serving_s <= now_s and not pod.is_leaving]


def _emitted(alpha: float, gamma: int, source: random.Random) -> list[int]:
    """Return draws of the tokens of a round: accepted draft tokens, and one of the target's."""
    draws = []
    for _ in range(_NUM_DRAWS):
        accepted = gamma if alpha >= 1.0 else int(math.log(1.0 - source.random()) / math.log(alpha)) if alpha else 0
        draws.append(1 + min(gamma, accepted))
    return draws
