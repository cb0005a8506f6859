"""Processes of services for tests, from templates of their imports (`specdec.supervision.process_template`).

    process = start_like("target_service", ["--model", "..."], environ, Streams(nothing, log, log))
    process.send_signal(signal.SIGKILL)
    process.wait()

Tests of `specdec up` and of the commands in Compose start their services as users do.

Called by `tests.support.stack`, `tests.support.rank_rig`, and tests of single services.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile

from specdec.supervision.forked_process import ForkedProcess
from specdec.supervision.process_template import Command, Streams, TemplateFailed, shared_template

__all__ = ["ENVIRON", "ForkedProcess", "Streams", "run_like", "start_like", "start_process"]

#: Modules that the process of a service imports by the time it serves; those of replicas import torch.
_REPLICA = (
    "specdec.engine.loader", "specdec.engine.loop.replica_engine", "draft_service.__main__", "draft_service.proposer",
    "specdec.service.rank", "specdec.engine.parallel.rank_loader", "target_service.__main__",
    "target_service.verifier", "transformers.models.llama.modeling_llama",
)  # fmt: skip
_FRONT = (
    "coordinator.__main__", "gateway.__main__", "fakeredis", "lupa.lua51", "encodings.idna",
    "transformers.tokenization_utils_tokenizers", "transformers.utils.chat_template_utils",
)  # fmt: skip
_PRELOADED = {
    "draft_service": _REPLICA, "target_service": _REPLICA, "tests.support.rank_rig": _REPLICA,
    "tests.support.injured_service": _REPLICA, "coordinator": _FRONT, "gateway": _FRONT,
}  # fmt: skip

#: Added to the environment of services by the tests that start them: the same everywhere, so that they share templates.
ENVIRON = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start_like(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], streams: Streams
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start `python -m MODULE ARGUMENTS` from a template of its service.

    It is a plain process where no template is like it (an unknown module, or another environment for the imports) and
    where the template has ended.

    Args:
        module: the service.
        arguments: its flags.
        environ: its whole environment.
        streams: its stdin, stdout and stderr.
    """
    preloaded = _PRELOADED.get(module)
    template = shared_template(preloaded, environ, options=()) if preloaded else None
    if template is not None:
        with contextlib.suppress(TemplateFailed):  # a test may have killed it just now
            return template.start(Command(module, arguments, environ), streams)
    return start_process([sys.executable, "-m", module, *arguments], environ, streams)


def run_like(module: str, *arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` from a template of its service until it ends, and return what it wrote.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time; it is killed.
    """
    environ = {**os.environ, **ENVIRON}
    with open(os.devnull, "rb") as nothing, TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = start_like(module, arguments, environ, Streams(nothing, stdout, stderr))
        try:
            exit_code = process.wait(timeout_s)
        finally:
            process.kill()
        written = []
        for file in (stdout, stderr):
            file.seek(0)
            written.append(file.read().decode())
    return subprocess.CompletedProcess([module, *arguments], exit_code, *written)


def start_process(command: Sequence[str], environ: Mapping[str, str], streams: Streams) -> subprocess.Popen[bytes]:
    """Start a plain process."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, env=dict(environ))
