"""specdec's draft pool inside a real vLLM: `make test-engines`.

The oracle of greedy text is the vLLM server without speculation.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.engines.conftest import DEMO, ROOT, VllmServer
from tests.engines.rig import PROMPTS, token_ids_of
from tests.support.stack import free_port

NUM_TOKENS = 64
SPECULATION = {
    "method": "custom_class",
    "model": "specdec.integrations.vllm.DraftPoolProposer",
    "num_speculative_tokens": 4,
}


class DraftProcess:
    """`python -m draft_service` with the demo draft."""

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "draft_service", "--model", str(DEMO / "draft"), "--listen", self.address]
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--redis-url", "memory://"], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if '"listening"' in line:
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    draft = DraftProcess()
    yield draft
    draft.process.kill()
    draft.process.wait()


@pytest.fixture(scope="module")
def speculating(vllm: VllmServer, draft: DraftProcess) -> Iterator[VllmServer]:
    environ = {"PYTHONPATH": str(ROOT), "SPECDEC_DRAFT_ENDPOINT": draft.address, "SPECDEC_DRAFT_DEADLINE_MS": "500"}
    server = VllmServer(DEMO / "target", ("--speculative-config", json.dumps(SPECULATION)), environ)
    server.start()
    yield server
    server.kill()


def num_accepted(server: VllmServer) -> float:
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
    )


@pytest.mark.parametrize("prompt", PROMPTS[:8])
def test_greedy_text_with_our_drafts_is_that_without_speculation(
    speculating: VllmServer, vllm: VllmServer, prompt: str
) -> None:
    tokens, before = token_ids_of(DEMO / "target", prompt), num_accepted(speculating)
    assert speculating.greedy_continuation(tokens, NUM_TOKENS) == vllm.greedy_continuation(tokens, NUM_TOKENS)
    assert num_accepted(speculating) > before


def test_while_the_draft_service_hangs_the_text_goes_on_and_its_drafts_are_used_again_afterwards(
    speculating: VllmServer, vllm: VllmServer, draft: DraftProcess
) -> None:
    tokens = token_ids_of(DEMO / "target", PROMPTS[0])
    expected = vllm.greedy_continuation(tokens, 200)
    draft.process.send_signal(signal.SIGSTOP)
    try:
        began_s, before = time.monotonic(), num_accepted(speculating)
        assert speculating.greedy_continuation(tokens, 200) == expected
        print(f"200 tokens without drafts took {time.monotonic() - began_s:.2f} s")
        assert num_accepted(speculating) == before
    finally:
        draft.process.send_signal(signal.SIGCONT)
    while num_accepted(speculating) == before:
        assert speculating.greedy_continuation(tokens, 20) == expected[:20]
