"""The real processes around simulated engines, and the time of a round by the configured numbers alone.

The engines are `specdec.engine.simulated.engines`; the suite `orchestration` measures.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from specdec.client import Budgets, Client
from specdec.contract.errors import SpecdecError
from specdec.engine.simulated.simulated_pair import SimulatedPair
from specdec.engine.simulated.text import EOS_TOKEN_ID, simulated_vocabulary
from specdec.supervision.processes import Child, free_ports

_START_S = 120.0


def write_tokenizer(directory: Path) -> Path:
    """Writes the tokenizer of the simulated vocabulary: it decodes like a real one; prompts are given as ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = simulated_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    eos = next(token for token, token_id in vocabulary.items() if token_id == EOS_TOKEN_ID)
    tokenizer.add_special_tokens([AddedToken(eos, special=True)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return directory


def ideal_round_s(pair: SimulatedPair, gamma: int, round_trip_s: float) -> float:
    """Time of a round by docs/protocol.md section 6, from the configured numbers alone.

    Args:
        pair: pre-drafted or not, as it says; a missed round waits half a branched step for the one under way.
        gamma: draft tokens a round.
        round_trip_s: R, both links.
    """
    verify_s = pair.verify_s(gamma) + round_trip_s
    drafted_s = verify_s + gamma * pair.draft_step_s()
    if not pair.predrafts:
        return drafted_s
    branches_s = (gamma + 1) * pair.branched_step_s(gamma)
    hit_rate = pair.text.predictability
    # A step is running only while the branches are unfinished.
    cancel_s = pair.branched_step_s(gamma) / 2 if branches_s > verify_s else 0.0
    return hit_rate * max(verify_s, branches_s) + (1 - hit_rate) * (drafted_s + cancel_s)


def ideal_tokens_per_s(pair: SimulatedPair, gamma: int, round_trip_s: float = 0.0) -> float:
    """Tokens a second of one stream at the pair's first alpha."""
    return _expected_tokens(pair, gamma) / ideal_round_s(pair, gamma, round_trip_s)


def ideal_crowd_tokens_per_s(pair: SimulatedPair, num_streams: int, gamma: int = 0) -> float:
    """Tokens a second of streams of which each is in every step, n / step_s(n) without drafts.

    With drafts, all streams draft together and are then verified together, without pre-drafting.
    """
    round_s = gamma * pair.draft.step_s(num_streams) + pair.target.step_s(num_streams * (gamma + 1))
    return num_streams * _expected_tokens(pair, gamma) / round_s


def _expected_tokens(pair: SimulatedPair, gamma: int) -> float:
    alpha = pair.text.alphas[0]
    return sum(alpha**num_accepted for num_accepted in range(gamma + 1))  # Leviathan et al. 2023, equation 1


def best_gamma(pair: SimulatedPair, max_gamma: int = 16) -> int:
    """The gamma with the most tokens a second by the configured numbers."""
    return max(range(1, max_gamma + 1), key=lambda gamma: ideal_tokens_per_s(pair, gamma))


@contextlib.contextmanager
def redis_server(arguments: Sequence[str] = ()) -> Iterator[str]:
    """A `redis-server` of our own without persistence, with further `arguments`; yields its URL.

    Raises:
        RuntimeError: none is installed.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("redis-server is not on the PATH (apt-get install redis-server, brew install redis)")
    with tempfile.TemporaryDirectory(prefix="specdec-bench-redis-") as folder:
        (port,) = free_ports(1)
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        process = subprocess.Popen([*command, "--appendonly", "no", *arguments], stdout=subprocess.DEVNULL)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            with redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.02), 500)) as client:
                client.ping()
            yield url
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class ReplicaCommand:
    """Command that starts one replica; `--listen HOST:PORT` is added."""

    role: str
    """draft | target."""
    module: str
    arguments: tuple[str, ...]

    @classmethod
    def serving(cls, role: str, model: Path | str, *arguments: str) -> Self:
        """Return the command of the service of a role, with a model and further `arguments`."""
        return cls(role, f"{role}_service", ("--model", str(model), "--redis-url", "memory://", *arguments))


def simulated_replicas(
    model: str, num_drafts: int = 1, arguments: tuple[str, ...] = (), num_targets: int = 1
) -> list[ReplicaCommand]:
    """Some targets and drafts of `simulated:...`, with further `arguments`."""
    return [
        ReplicaCommand.serving(role, model, *arguments) for role in [*["target"] * num_targets, *["draft"] * num_drafts]
    ]


class ProcessSystem:
    """Replicas and coordinators that know them, as processes. Use it by `with`; it is ready once entered."""

    def __init__(
        self,
        tokenizer_dir: Path,
        replicas: Sequence[ReplicaCommand],
        *,
        redis_url: str = "memory://",
        num_coordinators: int = 1,
        coordinator_arguments: Sequence[str] = (),
        more_coordinators: Sequence[Sequence[str]] = (),
        runner: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            tokenizer_dir: see `write_tokenizer`.
            replicas: their addresses are given to every coordinator.
            redis_url: of the session store; coordinators that share sessions need a Redis.
            num_coordinators: at least 1.
            coordinator_arguments: further arguments of each.
            more_coordinators: further arguments of each coordinator that is added to these.
            runner: module with its arguments that runs every service.
            environ: environment of the services; None: that of this process.
        """
        of_each = [*[coordinator_arguments] * num_coordinators, *more_coordinators]
        ports = free_ports(len(replicas) + len(of_each))
        self.endpoints = [f"127.0.0.1:{ports.pop()}" for _ in of_each]
        self.endpoint = self.endpoints[0]
        self._runner, self._environ = runner, os.environ if environ is None else environ
        self._num_replicas = len(replicas)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        """HOST:PORT of each replica, in the order of `replicas`."""
        self._commands: list[tuple[str, list[str]]] = []
        coordinator = ["--tokenizer", str(tokenizer_dir), "--redis-url", redis_url]
        for replica, port in zip(replicas, ports, strict=True):
            address = f"127.0.0.1:{port}"
            self._commands.append((replica.module, [*replica.arguments, "--listen", address]))
            coordinator += [f"--{replica.role}-endpoint", address]
        self._commands += [
            ("coordinator", [*coordinator, "--listen", endpoint, *own])
            for endpoint, own in zip(self.endpoints, of_each, strict=True)
        ]
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        try:
            for module, arguments in self._commands:
                first, *words = [*self._runner, module, *arguments]
                self._children.append(Child(module, first, words, self._environ))
            self._wait_connected()
            for child in self._children:
                child.relay()  # from now on only warnings are shown, not a line for each request
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def child(self, address: str) -> Child:
        """Return the process that listens at an address of `addresses` or `endpoints`."""
        return self._children[self._index(address)]

    def start_again(self, addresses: Sequence[str]) -> None:
        """Start parts that have ended once more; return when every coordinator knows every replica."""
        for address in addresses:
            index = self._index(address)
            self._children[index].stop()
            self._children[index] = self._children[index].again()
        self._wait_connected()
        for address in addresses:
            self.child(address).relay()

    def _index(self, address: str) -> int:
        return [*self.addresses, *self.endpoints].index(address)

    @property
    def coordinator_cpu_s(self) -> float:
        """CPU time the (last) coordinator has used so far, user and system, all threads."""
        return self.cpu_s(self.endpoints[-1])

    def cpu_s(self, address: str) -> float:
        """CPU time that the process at an address has used so far, user and system, all threads."""
        fields = Path(f"/proc/{self.child(address).pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _wait_connected(self) -> None:
        deadline = time.monotonic() + _START_S
        for endpoint in self.endpoints:
            self._wait_connected_to(endpoint, deadline)

    def _wait_connected_to(self, endpoint: str, deadline: float) -> None:
        with Client(endpoint, budgets=Budgets(connect_s=0)) as client:
            while _num_replicas(client) < self._num_replicas:
                for child in self._children:
                    if not child.is_alive:
                        raise RuntimeError(f"{child.name} did not start: {child.last_words()}")
                if time.monotonic() > deadline:
                    raise RuntimeError("the system did not start in time")
                time.sleep(0.1)

    def _stop(self) -> None:
        _stop_all(self._children[::-1])


def _stop_all(children: Sequence[Child]) -> None:
    for child in children:
        child.ask_to_stop()
    for child in children:
        child.stop()


def _num_replicas(client: Client) -> int:
    try:
        return sum(len(pool.replicas) for pool in client.info().pools)
    except SpecdecError:
        return 0
