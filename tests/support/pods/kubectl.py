"""Answer the commands of kubectl that `k8s/acceptance.sh` gives, about the pods of a `Cluster`.

    with Kubectl(cluster, folder):
        subprocess.run(["k8s/acceptance.sh"], env={"PATH": f"{folder}:..."})

The folder has a program `kubectl`, which sends its words over a socket. A command that is not known here fails.
"""

from __future__ import annotations

import json
import shlex
import socketserver
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from .cluster import NETWORK, Cluster
from .programs import ROOT, ProgramFailed, podman

_PROGRAM = """#!{python}
import json, socket, sys
words = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({socket!r})
    text = sys.stdin.read() if "-i" in words else ""
    connection.sendall(json.dumps([words, text]).encode() + b"\\n")
    status, text = json.loads(connection.makefile().read())
print(text, end="", file=sys.stderr if status else sys.stdout)
sys.exit(status)
"""


class Kubectl:
    """The commands, from entering until leaving."""

    def __init__(self, cluster: Cluster, overlay: str, folder: Path) -> None:
        self._cluster, self._overlay = cluster, overlay
        self._rolls: dict[str, Future[object]] = {}
        self._roller = ThreadPoolExecutor(1, "roll")
        self._clients: set[str] = set()
        path = str(folder / "kubectl.sock")
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable, socket=path))
        program.chmod(0o755)
        answer = self._answer

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(json.dumps(answer(*json.loads(self.rfile.readline()))).encode())

        self._server = socketserver.ThreadingUnixStreamServer(path, Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="kubectl").start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._roller.shutdown()
        for name in self._clients:
            podman("rm", "--force", "--time", "0", "--ignore", name)

    def _answer(self, words: list[str], text: str) -> tuple[int, str]:
        if words[0] == "--namespace":
            words = words[2:]
        try:
            return 0, self._run(words, text)
        except (ProgramFailed, TimeoutError) as error:
            return 1, f"{error}\n"

    def _run(self, words: list[str], text: str) -> str:
        match words:
            case ["apply", "-k", overlay] if overlay == self._overlay:
                return ""
            case ["get", *asked]:
                return "".join(f"{line}\n" for line in self._get(asked))
            case ["rollout", "restart", name]:
                self._roll(_last(name))
            case ["rollout", "status", name, "--timeout", limit]:
                self._wait_for_rollout(_last(name), _seconds(limit))
            case ["scale", name, "--replicas", number]:
                self._cluster.scale(_last(name), int(number))
            case ["run", name, "--image", image, "--restart", "Never", "--command", "--", *command]:
                self._clients.add(name)
                podman("run", "--detach", "--name", name, "--network", NETWORK, image, *command)
            case ["wait", "--for", "condition=Ready", *_]:
                pass  # it runs since `podman run` has ended
            case ["wait", "--for", "delete", "pod", *_]:
                pass  # `scale` returns once they have ended
            case ["exec", "-i", name, "--", *command]:
                return podman("exec", "-i", name, *command, text=text)
            case ["exec", name, "--", *command]:
                return self._cluster.pods_of(_last(name))[0].execute(command)
            case ["delete", "pod", name, "--grace-period", "0", "--force"]:
                self._cluster.kill(name)
            case ["delete", "pod", name, "--ignore-not-found", "--wait=false"]:
                podman("rm", "--force", "--time", "0", "--ignore", name)
            case _:
                raise ProgramFailed(f"kubectl is not asked that here: {shlex.join(words)}")
        return ""

    def _get(self, asked: list[str]) -> list[str]:
        pods, workloads = self._cluster.pods, self._cluster.workloads
        match asked:
            case ["nodes", "--output", _]:
                return ["pods of podman on one machine"]
            case ["pods", "--no-headers"]:
                return [pod.name for pod in pods]
            case ["pods", "--selector", selector, "--output", _]:
                return [pod.name for pod in self._cluster.pods_of(_named_by(selector))][:1]
            case ["pods", "--output", _]:
                return [pod.workload.image for pod in pods]
            case ["deployments,statefulsets", "--output", "name"]:
                return [f"{each.document.kind.lower()}.apps/{name}" for name, each in workloads.items()]
            case ["deployment", name, "--output", path] if path.endswith(".image}"):
                return [workloads[name].image]
            case ["deployment", name, "--output", "jsonpath={.spec.replicas}"]:
                return [str(len(self._cluster.pods_of(name)))]
        raise ProgramFailed(f"kubectl is not asked that here: get {shlex.join(asked)}")

    def _roll(self, name: str) -> None:
        self._rolls[name] = self._roller.submit(self._cluster.roll, name)

    def _wait_for_rollout(self, name: str, timeout_s: float) -> None:
        if name in self._rolls:
            self._rolls.pop(name).result(timeout_s)
        self._cluster.wait_until_ready(timeout_s)


def run_script(script: Path, folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script in the repository's root whose kubectl is the folder's."""
    environ = {**environ, "PATH": f"{folder}:{environ['PATH']}"}
    return subprocess.run([script], env=environ, cwd=ROOT, capture_output=True, text=True, check=False)


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _named_by(selector: str) -> str:
    return selector.removeprefix("app.kubernetes.io/name=")


def _seconds(limit: str) -> float:
    return float(limit.removesuffix("s"))
