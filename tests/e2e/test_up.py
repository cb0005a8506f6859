"""`specdec up`: what it says and refuses, what its children get of its flags, and that it keeps them running."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.systems.models import DEMO
from specdec.client import Client, Completion
from specdec.contract.errors import InvalidRequest
from specdec.rpc.client import TargetLink
from tests.support.process_rig import greedy, ranks_of
from tests.support.stack import free_port
from tests.support.tiny_models import build_tiny_model
from tests.support.trace_collector import TraceCollector
from tests.support.up_rig import child_running, children_of, complaints, specdec, start_up, wait_until_gone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@contextlib.contextmanager
def running(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    up, endpoint = start_up(*flags)
    try:
        yield up, endpoint
    finally:
        up.send_signal(signal.SIGTERM)
        with contextlib.suppress(ValueError):  # a test that has read all of it
            up.communicate()


def no_folder(model: Path, folder: Path) -> Path:
    return folder / "nowhere"


def no_checkpoint(model: Path, folder: Path) -> Path:
    return model / "model.safetensors"


def no_tokenizer(model: Path, folder: Path) -> Path:
    for file in model.iterdir():
        if "token" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def encoder(model: Path, folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    return folder


def unknown(model: Path, folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama9"}')
    return folder


@pytest.mark.full
def test_up_divides_targets_and_drafts_and_says_the_same(model: Path) -> None:
    prompt = (5, 17, 99, 42, 3, 8)
    expected = greedy(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), prompt, 48)
    models = ("--target", str(model), "--draft", str(model), "--dtype", "float32")
    with running(*models, "--tensor-parallel", "2", "--tensor-parallel-draft", "2") as (up, endpoint):
        with Client(endpoint) as client:
            answer = client.generate(
                prompt_token_ids=prompt, max_new_tokens=48, temperature=0.0, ignore_eos=True, gamma=3
            )
        assert list(answer.token_ids) == expected
        assert answer.stats.num_accepted_tokens == answer.stats.num_draft_tokens > 0
        replicas = [pid for pid in children_of(up) if "_service" in Path(f"/proc/{pid}/cmdline").read_text()]
        pids = [rank for pid in replicas for rank in ranks_of(pid)]
        assert len(pids) == 4
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("flag", "fault"),
    [
        *(("--target", fault) for fault in (no_folder, no_checkpoint, no_tokenizer, encoder, unknown)),
        ("--draft", no_folder),
        *(
            pytest.param("--draft", fault, marks=pytest.mark.full)
            for fault in (no_checkpoint, no_tokenizer, encoder, unknown)
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_its_flag_before_anything_is_loaded(
    model: Path, tmp_path: Path, flag: str, fault: Callable[[Path, Path], Path]
) -> None:
    wrong = str(fault(model, tmp_path))
    models = {"--target": str(model), "--draft": str(model)} | {flag: wrong}
    result = specdec("up", "--listen", "127.0.0.1:0", *(word for pair in models.items() for word in pair))
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = complaints(result.stderr).splitlines()
    assert re.match(rf"error: {flag}: model '{re.escape(wrong)}' ", line), line
    assert "target-0" not in result.stderr


_FIRST_START = (
    r"loading weights of /.* to cpu\n"
    r"loaded weights in \d+\.\d s\n"
    r"KV cache of \d+ blocks: \d+ tokens in all, sessions of up to \d+\n"
    r"self-check: .*\n"
    r"native kernels read \d+ MB of weights a step\n"
    r"self-check passed in \d+\.\d s\n"
    r"kept packed weights in \d+\.\d s: .*\n"
    r"(read packed weights in \d+\.\d s\n)?"  # unless another replica is writing them
)
#: Another test, or an earlier run, may have served the model.
_LATER_START = r"read packed weights in \d+\.\d s\nself-check passed in \d+\.\d s\n"


@dataclass
class Recorded:
    """What is left of a system that answered one request with drafts and one without, and was stopped."""

    stderr: str
    completion: Completion
    spans: TraceCollector


@pytest.fixture(scope="module")
def recorded(model: Path) -> Recorded:
    spans = TraceCollector()
    models = ("--target", str(model), "--draft", str(model))
    with spans, running(*models, "--otlp-endpoint", spans.endpoint) as (up, endpoint):
        with Client(endpoint) as client:
            ask = {"prompt_token_ids": [5, 6, 7], "ignore_eos": True, "temperature": 0, "max_new_tokens": 24}
            completion = client.generate(gamma=2, **ask)
            client.generate(mode="off", **ask)
        up.send_signal(signal.SIGTERM)
        _, stderr = up.communicate()  # the last spans are exported by then
    return Recorded(stderr, completion, spans)


def test_up_says_what_it_checks_and_what_each_service_loads_and_at_the_end_that_it_stops(
    model: Path, recorded: Recorded
) -> None:
    lines = recorded.stderr.splitlines()
    assert re.fullmatch(rf"starting \(\d+ s\): checking {model} and {model}", lines[0])
    lines = [line for line in lines if not line.startswith("starting (")]
    for name in ("target-0", "draft-0"):
        told = [line.removeprefix(f"[{name}] ") for line in lines if line.startswith(f"[{name}] ")]
        assert re.fullmatch(rf"loading /.*\n({_FIRST_START}|{_LATER_START})warming up\nlistening", "\n".join(told)), (
            told
        )
    assert lines[-2:] == ["stopping", "stopped"]
    assert complaints(recorded.stderr) == "[coordinator] recording traces\n"


def test_a_target_alone_is_served_without_speculation_over_a_unix_socket_and_a_note_says_so(model: Path) -> None:
    async def unix_socket_of(address: str) -> str:
        link = TargetLink(address)
        try:
            return (await link.info()).unix_socket
        finally:
            await link.close()

    with running("--target", str(model)) as (up, endpoint):
        assert len(children_of(up)) == 2
        target = child_running(up, "target_service")
        words, variables = (Path(f"/proc/{target}/{file}").read_text().split("\0") for file in ("cmdline", "environ"))
        assert "SPECDEC_TARGET__GPU_MEMORY_UTILIZATION=0.9" in variables
        name = asyncio.run(unix_socket_of(words[words.index("--listen") + 1]))
        with Client(endpoint) as client:
            completion = client.generate(prompt_token_ids=[5, 6, 7], max_new_tokens=8, ignore_eos=True, temperature=0)
        assert (len(completion.token_ids), completion.stats.num_draft_tokens) == (8, 0)
        # The kernel lists a name once for the listener and once for every accepted connection.
        ends = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
        assert (name[:14], ends.count(name)) == ("@specdec-lane-", 2)
        up.send_signal(signal.SIGTERM)
        _, stderr = up.communicate()
    (note,) = complaints(stderr).splitlines()
    assert note == "note: no --draft was given: target-only, every token takes a step of the target"


def test_drafts_found_in_text_need_no_draft_model(model: Path) -> None:
    with running("--target", str(model), "--draft", "suffix", "--draft", "ngram") as (_, endpoint):
        with Client(endpoint) as client:
            greedy = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "gamma": 4}
            first, again = (client.generate(prompt_token_ids=[5, 6, 7, 5, 6], **greedy) for _ in range(2))
            assert first.token_ids == again.token_ids
            assert again.stats.num_accepted_tokens > 0
        status = specdec("status", "--endpoint", endpoint)
        assert [line.split()[:2] for line in status.stdout.splitlines() if line.startswith("draft")] == [
            ["draft", "ngram"], ["draft", "suffix"],
        ]  # fmt: skip


def test_metrics_threads_context_a_tier_and_log_level_reach_every_service(model: Path, tmp_path: Path) -> None:
    first_port = free_port()
    flags = ["--metrics", f"127.0.0.1:{first_port}", "--num-threads-target", "2", "--num-threads-draft", "1"]
    flags += ["--max-context-tokens", "48", "--log-level", "info", "--kv-tier-url", f"unix://{tmp_path}/nobody.sock"]
    with running("--target", str(model), "--draft", str(model), *flags) as (up, endpoint):
        pages = [scraped(first_port + offset) for offset in range(3)]
        assert "specdec:num_requests_running" in pages[0]
        assert 'role="target"' in pages[1]
        assert 'role="draft"' in pages[2]
        assert ["specdec:kv_tier_choices_total" in page for page in pages] == [False, True, True]
        with Client(endpoint) as client:
            assert client.info().max_context_tokens == 48
            with pytest.raises(InvalidRequest, match="context is 48"):
                client.generate(prompt_token_ids=[5] * 49, max_new_tokens=1)
        frame = json.loads(specdec("top", "--json", "--endpoint", endpoint).stdout)
        assert frame["metrics"] == {"num_services": 3, "unreachable": []}
        assert frame["requests"]["running"] == 0
        assert [(pool["role"], pool["num_waiting"], len(pool["replicas"])) for pool in frame["pools"]] == [
            ("draft", 0, 1), ("target", 0, 1),
        ]  # fmt: skip
        assert "0 of" in specdec("top", "--endpoint", endpoint).stdout  # without a terminal: one frame
        threads = {}
        for role in ("target", "draft"):
            words = Path(f"/proc/{child_running(up, f'{role}_service')}/cmdline").read_text().split("\0")
            threads[role] = words[words.index("--num-threads") + 1]
        assert threads == {"target": "2", "draft": "1"}
        os.kill(child_running(up, "draft_service"), signal.SIGTERM)
        assert up.stderr is not None
        for line in up.stderr:  # an info record of a service that has started
            if re.fullmatch(r"\[draft-0\] draining replica_id=draft-\w+ grace_s=3\.0\n", line):
                break


def test_its_rounds_become_spans_of_a_collector(recorded: Recorded) -> None:
    rounds = recorded.spans.named("round")
    assert len(rounds) == recorded.completion.stats.num_rounds + 24
    for each in rounds:
        names = [call.name for call in recorded.spans.children(each)]
        assert names == (["propose", "verify"] if each.attributes["specdec.round.gamma"] else ["verify"])


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A system of the demo pair, whose services tests kill; its end is the last one's."""
    with running() as demo:
        yield demo


@pytest.mark.full
def test_replicas_of_models_that_were_packed_before_share_no_import_of_transformers(
    demo: tuple[subprocess.Popen[str], str],
) -> None:
    """The start of `demo` packs the pair, if no earlier one has. A head on the target needs transformers."""
    with running("--draft", str(DEMO / "draft")) as (up, endpoint):
        (template,) = Path(f"/proc/{up.pid}/task").glob(f"{up.pid}/children")
        commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in template.read_text().split()]
        (imported,) = [command[-3:] for command in commands if "specdec.supervision.process_template" in command]
        assert "specdec.service.preloaded_kernels" in imported
        assert specdec("generate", "Once", "--max-new-tokens", "4", "--endpoint", endpoint).returncode == 0


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        page: bytes = response.read()
    return page.decode()


@pytest.mark.parametrize(
    "service",
    [
        "target_service",
        pytest.param("draft_service", marks=pytest.mark.full),
        pytest.param("coordinator", marks=pytest.mark.full),
    ],
)
def test_a_killed_service_restarts_at_its_address_and_a_running_stream_continues(
    demo: tuple[subprocess.Popen[str], str], service: str
) -> None:
    up, endpoint = demo
    name = service.replace("_service", "-0")
    ask = {"temperature": 0, "max_new_tokens": 300, "mode": "rejection", "gamma": 3, "ignore_eos": True}
    with Client(endpoint) as client:
        expected = list(client.generate("import os\n", **ask).token_ids)
        with client.generate("import os\n", stream=True, **ask) as stream:
            token_ids = list(next(stream).token_ids)
            os.kill(child_running(up, service), signal.SIGKILL)
            for chunk in stream:
                token_ids += chunk.token_ids
        assert token_ids == expected
        assert up.stderr is not None
        told = []
        for line in up.stderr:
            told.append(line)
            if line == f"[{name}] serving again\n":
                break
        assert f"[{name}] ended (signal 9), restarting in 1 s\n" in told
        assert list(client.generate("import os\n", **ask).token_ids) == expected


def test_up_that_stops_while_a_child_is_down_leaves_nothing(demo: tuple[subprocess.Popen[str], str]) -> None:
    up, _ = demo
    os.kill(child_running(up, "target_service"), signal.SIGKILL)
    assert up.stderr is not None
    while "restarting" not in up.stderr.readline():
        pass
    children = children_of(up)
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


def test_help_shows_a_flag_for_each_address_and_limit() -> None:
    shown = specdec("up", "--help").stdout
    for flag in (
        "--http HOST:PORT",
        "--api-keys FILE",
        "--metrics HOST:PORT",
        "--num-threads-target N",
        "--max-context-tokens N",
        "--log-level {",
    ):
        assert flag in shown
