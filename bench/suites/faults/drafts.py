"""What is left of the speed when every draft is gone, and how soon a draft that returns is used again.

One coordinator, one target and two drafts. Streams without any draft alternate with streams that ask for none. Then one
draft is started in the middle of a stream. Part of the suite `faults`, which calls this.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from bench.harness.pairs import ratio_row, take_turns
from bench.harness.rows import Row
from bench.suites.faults.outages import PROMPT, model_replicas
from bench.systems.models import DEMO
from bench.systems.simulated import ProcessSystem
from specdec.cli.health import is_serving
from specdec.client import Client
from specdec.contract.types import TokenSource
from specdec.rpc.channels import dial_blocking

NUM_PAIRS, NUM_QUICK_PAIRS = 15, 2
NUM_TOKENS = 200
LEAST_RATIO = 0.95
MOST_RETURN_S = 2.0

_POLL_S = 0.01
#: Tokens of one output while the draft starts; it takes seconds, so there are many outputs.
_NUM_AWAITED_TOKENS = 400


def measure_drafts_gone(row: Callable[..., Row], quick: bool) -> list[Row]:
    """Return the ratio to target-only streams, and the time until drafts are used again."""
    of_case = partial(row, case="demo pair, all drafts gone", system="specdec")
    with ProcessSystem(DEMO / "target", model_replicas(1, 2)) as system, Client(system.endpoint) as client:
        drafts = system.addresses[1:]
        _tokens_per_s(client, "rejection")
        for address in drafts:
            os.kill(system.child(address).pid, signal.SIGKILL)
        pairs = range(NUM_QUICK_PAIRS if quick else NUM_PAIRS)
        modes = {"specdec": "rejection", "target-only": "off"}
        systems = {name: lambda _, mode=mode: _tokens_per_s(client, mode) for name, mode in modes.items()}
        found = take_turns("all drafts gone", systems, pairs)
        return_s = _return_s(system, client, drafts)
    return [
        ratio_row(of_case, found, "specdec", "target-only", required=LEAST_RATIO),
        of_case(
            metric="speculating_again", value=return_s, unit="s", at_most=MOST_RETURN_S,
            note="from the first draft's SERVING to the first accepted draft token at the client",
        ),
    ]  # fmt: skip


def _tokens_per_s(client: Client, mode: str) -> float:
    began_s = time.perf_counter()
    output = client.generate(
        prompt_token_ids=PROMPT, temperature=0, ignore_eos=True, max_new_tokens=NUM_TOKENS, mode=mode
    )
    took_s = time.perf_counter() - began_s
    client.delete_session(output.session_id)
    return NUM_TOKENS / took_s


def _return_s(system: ProcessSystem, client: Client, drafts: list[str]) -> float:
    """Start the drafts again; return the time from the first one's health to the first accepted token."""
    starting = threading.Thread(target=system.start_again, args=(drafts,), daemon=True)
    starting.start()
    served: list[float] = []
    watching = [threading.Thread(target=_note_serving, args=(address, served), daemon=True) for address in drafts]
    for thread in watching:
        thread.start()
    accepted_s = 0.0
    while not accepted_s:
        with client.generate(
            prompt_token_ids=PROMPT, temperature=0, ignore_eos=True, max_new_tokens=_NUM_AWAITED_TOKENS, stream=True,
            provenance=True,
        ) as stream:  # fmt: skip
            for chunk in stream:
                if any(detail.source is TokenSource.ACCEPTED for detail in chunk.details):
                    accepted_s = time.monotonic()
                    break
        client.delete_session(stream.session_id)
    for thread in (starting, *watching):
        thread.join()
    return max(0.0, accepted_s - min(served))


def _note_serving(address: str, served: list[float]) -> None:
    with dial_blocking(address) as channel:
        while not is_serving(channel):
            time.sleep(_POLL_S)
    served.append(time.monotonic())
