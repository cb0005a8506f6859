"""Hostile text costs one error and no more: endless templates, oversized texts, tokenizers that panic."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.front.servicer import CoordinatorServicer
from coordinator.front.tenants import CallTenants
from coordinator.replicas.replica import TARGET
from coordinator.replicas.target_models import TargetModels
from coordinator.round.draft_source_factory import DraftSourceFactory
from coordinator.text import text_process
from coordinator.text.prompt import encode_prompt
from coordinator.text.text_process import GivenUp
from coordinator.text.tokenizer import ServedTokenizer
from specdec.contract.errors import InvalidRequest
from specdec.contract.types import Mode
from specdec.rpc.service_server import COORDINATOR_SERVICE, ServiceServer
from specdec.rpc.status_mapping import from_rpc_error
from specdec.supervision.process_template import ProcessTemplate
from specdec.v1 import coordinator_pb2
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.coordinator_rig import Rig
from tests.support.table_services import start_service
from tests.unit.coordinator.test_prompt import NOTHING, ask, chat
from tests.unit.coordinator.test_tokenizer import save

HELLO = [{"role": "user", "content": "hello"}]
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"

ENDLESS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
HOSTILE_TEMPLATES = {
    "a loop without end": ENDLESS,
    "one without end in C": "{% set n = messages | length + 8 %}{{ n ** (n ** (n ** n)) }}",
    "a loop without end at compile time": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "gigabytes": "{{ 'a' * 10 ** 10 }}",
    "gigabytes by a filter": "{{ 'a' | center(10 ** 10) }}",
    "gigabytes by a format": "{{ '%10000000000d' % 1 }}",
    "gigabytes by doubling": (
        "{% set n = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
    ),
    "far too much text": "{{ 'hello ' * 20000000 }}",
    "division by zero": "{{ 1 / 0 }}",
    "a wrong type": "{{ 1 + messages }}",
    "a recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "what is not there": "{{ messages[7].content.x }}",
    "bad syntax": "{% for %}",
    "half a character": "{{ '\\ud800' }}",
    "a way out of the sandbox": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates without an end use their whole limit."""
    monkeypatch.setattr(text_process, "TEMPLATE_CPU_S", 1.0)


@pytest.mark.parametrize("name", HOSTILE_TEMPLATES)
def test_a_hostile_template_gives_one_error(tmp_path: Path, request: pytest.FixtureRequest, name: str) -> None:
    if "without end" in name:  # the others must end before the whole limit is used
        request.getfixturevalue("short_limit")
    tokenizer = ServedTokenizer(save(tmp_path, chat_template=HOSTILE_TEMPLATES[name]))
    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.encode_chat(HELLO)
    assert refusal.value.field == "messages"
    assert "\n" not in refusal.value.message
    assert len(refusal.value.message) < 1000


@pytest.mark.usefixtures("short_limit")
def test_conversations_are_served_after_one_whose_template_never_ends(tmp_path: Path) -> None:
    endless_for_world = "{% if messages[0].content == 'world' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
    tokenizer = ServedTokenizer(save(tmp_path, chat_template=endless_for_world))
    for _ in range(2):
        assert tokenizer.encode_chat(HELLO) == [4]
        with pytest.raises(InvalidRequest, match="took more than 1 s"):
            tokenizer.encode_chat([{"role": "user", "content": "world"}])
    assert tokenizer.encode_chat(HELLO) == [4]


def test_a_template_sees_the_special_tokens_and_renders_as_transformers_does(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content | trim }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    save(tmp_path, chat_template=template)
    conversation = [*HELLO, {"role": "assistant", "content": "  world "}]
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert ServedTokenizer(tmp_path).encode_chat(conversation) == expected == [0, 2, 4, 3, 5, 3]


def test_a_text_process_killed_from_outside_is_restarted_without_an_error(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    expected = tokenizer.encode_chat(HELLO)
    process = tokenizer._templates._process
    assert process is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert tokenizer.encode_chat(HELLO) == expected


def test_text_is_processed_after_the_template_of_text_processes_was_killed(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    expected = tokenizer.encode_chat(HELLO)
    others = [child for child in psutil.Process().children() if "process_template" in " ".join(child.cmdline())]
    assert others
    for other in others:
        other.kill()
    assert tokenizer.encode_chat(HELLO) == expected  # the child outlives it
    tokenizer._templates.close()
    assert tokenizer.encode_chat(HELLO) == expected


def test_text_is_processed_while_the_template_of_text_processes_hangs_in_its_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_process, "_PRELOADED", ("json.tool",))  # a template that no other test uses
    monkeypatch.setattr(text_process, "_IMPORT_PATIENCE_S", 0.5)
    monkeypatch.setattr(ProcessTemplate, "is_ready", False)
    tokenizer = ServedTokenizer(save(tmp_path))
    assert tokenizer.encode_chat(HELLO)


def test_the_text_process_ends_with_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    tokenizer.encode_chat(HELLO)
    process = tokenizer._templates._process
    assert process is not None
    del tokenizer
    assert process.returncode is not None


def test_a_text_far_beyond_the_context_is_refused_before_any_of_it_is_encoded() -> None:
    """The last character cannot be encoded, so encoding the text would give another error."""
    tokenizer = ServedTokenizer(DEMO)
    text = "a" * 3_900_000 + "\ud800"
    with pytest.raises(InvalidRequest, match="characters") as refusal:
        encode_prompt(ask(text=text), NOTHING, tokenizer, 512)
    assert (refusal.value.reason, refusal.value.field) == ("CONTEXT_TOO_LONG", "prompt")


def test_a_conversation_far_beyond_the_context_is_refused_after_rendering(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    tokenizer = ServedTokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="characters") as refusal:
        encode_prompt(ask(messages=chat("a" * 3_900_000)), NOTHING, tokenizer, 512)
    assert (refusal.value.reason, refusal.value.field) == ("CONTEXT_TOO_LONG", "messages")
    with pytest.raises(InvalidRequest, match="would be missing from the prompt") as refusal:
        encode_prompt(ask(messages=chat("a" * 3_900_000, "hello")), NOTHING, tokenizer, 512)
    assert refusal.value.field == "messages[0]"


@pytest.mark.parametrize("length", [1000, 200_000])
def test_a_long_text_is_encoded_like_a_short_one(length: int) -> None:
    """A text beyond a length is encoded in another process."""
    tokenizer, text = ServedTokenizer(DEMO), ("Once upon a time, é ü 猫 🦊 " * length)[:length]
    expected = PreTrainedTokenizerFast.from_pretrained(DEMO).encode(text, add_special_tokens=True)
    assert tokenizer.encode(text, add_special_tokens=True) == expected


@pytest.mark.parametrize("asked", ["text", "messages"])
def test_work_that_the_caller_gives_up_stops_and_its_process_ends(tmp_path: Path, asked: str) -> None:
    tokenizer = ServedTokenizer(save(tmp_path, chat_template=ENDLESS) if asked == "messages" else DEMO)
    given_up, raised = threading.Event(), []

    def work() -> None:
        try:
            if asked == "text":
                tokenizer.encode("x" * 3_900_000, add_special_tokens=False, given_up=given_up)
            else:
                tokenizer.encode_chat(HELLO, given_up=given_up)
        except GivenUp as error:
            raised.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    asked_of = tokenizer._long_texts if asked == "text" else tokenizer._templates
    while asked_of._process is None:
        pass
    child = asked_of._process.pid
    given_up.set()
    worker.join()
    assert len(raised) == 1
    assert not Path(f"/proc/{child}").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def byte_level(**changes: object) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for length in (2, 4, 8):
        vocabulary["a" * length] = len(vocabulary)
        merges.append(("a" * (length // 2), "a" * (length // 2)))
    if changes.get("lacks_a_byte"):
        del vocabulary["b"]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = changes.get("pre_tokenizer") or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if "normalizer" in changes:
        backend.normalizer = changes["normalizer"]
    if "added" in changes:
        backend.add_tokens([changes["added"]])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


#: Tokenizers, each with a text of far fewer tokens than its number of characters suggests.
SWALLOWING = {
    "strip": ({"normalizer": normalizers.Strip()}, " " * 5000 + "a"),
    "a pattern left out": ({"normalizer": normalizers.Replace(Regex("b+"), "")}, "b" * 5000 + "a"),
    "a long pattern made short": ({"normalizer": normalizers.Replace("b" * 100, "b")}, "b" * 5000),
    "accents left out": (
        {"normalizer": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])}, "\u0301" * 5000 + "a",
    ),
    "spaces between words": (
        {"pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)])}, " " * 5000 + "a",
    ),
    "a removing split": (
        {"pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split("b", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)])},
        "b" * 5000 + "a",
    ),
    "an added token that takes the space before it": ({"added": AddedToken("<x>", lstrip=True)}, " " * 5000 + "<x>"),
    "an added token that takes the space after it": ({"added": AddedToken("<x>", rstrip=True)}, "<x>" + " " * 5000),
    "a byte that is not there": ({"lacks_a_byte": True}, "b" * 5000 + "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", SWALLOWING)
def test_a_text_is_never_refused_for_characters_that_the_tokenizer_drops(tmp_path: Path, name: str) -> None:
    changes, text = SWALLOWING[name]
    byte_level(**changes).save_pretrained(tmp_path)
    prompt = encode_prompt(ask(text=text), NOTHING, ServedTokenizer(tmp_path), 100)
    assert prompt.num_tokens < 100


def unbounded(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a longest token: a word or a run of unknown text of any length is one token."""
    if kind == "word pieces":
        backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        backend = Tokenizer(models.Unigram([("[UNK]", 0.0), ("a", -1.0)], unk_id=0))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


LONG = 3_900_000
STRIPPING = AddedToken("<x>", lstrip=True, rstrip=True)
#: Tokenizers without a longest token, or that remove white space, each with a text far beyond the context.
WITHOUT_A_LONGEST_TOKEN = {
    "a token that takes space, and words": (lambda: byte_level(added=STRIPPING), "a" * LONG),
    "a token that takes space, and space that it does not take": (
        lambda: byte_level(added=STRIPPING), "<x> a" + " " * LONG + "a <x>",
    ),
    "a token of normalized text, and space": (
        lambda: byte_level(added=AddedToken("<x>", lstrip=True, normalized=True), normalizer=normalizers.Lowercase()),
        " " * LONG + "<X>",
    ),
    "word pieces, and one word": (lambda: unbounded("word pieces"), "b" * LONG),
    "word pieces, and space": (lambda: unbounded("word pieces"), " " * LONG),
    "unigram, and what is unknown": (lambda: unbounded("unigram"), "b" * LONG),
    "strip, and space": (lambda: byte_level(normalizer=normalizers.Strip()), "a" + " " * LONG + "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_LONGEST_TOKEN)
def test_every_tokenizer_refuses_a_text_far_beyond_the_context_before_encoding(tmp_path: Path, name: str) -> None:
    """The last character cannot be encoded, so encoding the text would give another error."""
    make, text = WITHOUT_A_LONGEST_TOKEN[name]
    make().save_pretrained(tmp_path)
    with pytest.raises(InvalidRequest, match=r"characters, and .* hold .* at most") as refusal:
        encode_prompt(ask(text=text + "\ud800"), NOTHING, ServedTokenizer(tmp_path), 2048)
    assert (refusal.value.reason, refusal.value.field) == ("CONTEXT_TOO_LONG", "prompt")


@pytest.mark.parametrize("kind", ["word pieces", "unigram"])
def test_a_short_text_is_encoded_however_small_the_context_is(tmp_path: Path, kind: str) -> None:
    unbounded(kind).save_pretrained(tmp_path)
    prompt = encode_prompt(ask(text="b" * 50_000), NOTHING, ServedTokenizer(tmp_path), 2)
    assert prompt.num_tokens == 1


@pytest.mark.parametrize("text", [" " * 500_000 + "<x>", "<x>" + " \n" * 250_000, "a <x>" + " " * 500_000 + "<x> a"])
def test_white_space_that_an_added_token_absorbs_is_not_counted(tmp_path: Path, text: str) -> None:
    byte_level(added=STRIPPING).save_pretrained(tmp_path)
    prompt = encode_prompt(ask(text=text), NOTHING, ServedTokenizer(tmp_path), 100)
    assert prompt.num_tokens < 100


@pytest.mark.parametrize(
    "changes", [{}, {"normalizer": normalizers.NFC()}, {"added": AddedToken("<" + "x" * 50 + ">")}]
)
def test_the_bound_holds_for_texts_with_the_fewest_tokens(tmp_path: Path, changes: dict[str, object]) -> None:
    byte_level(**changes).save_pretrained(tmp_path)
    tokenizer = ServedTokenizer(tmp_path)
    for text in ("a" * 8000, ("<" + "x" * 50 + ">") * 100, "\u03b1\u0313\u0300\u0345" * 1000):
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        assert len(tokenizer.encode(text, add_special_tokens=False, max_tokens=num_tokens)) == num_tokens
    with pytest.raises(InvalidRequest, match="characters"):
        tokenizer.encode("b" * 1_000_000, add_special_tokens=False, max_tokens=100)


def test_text_that_makes_the_tokenizer_panic_gives_one_error(tmp_path: Path) -> None:
    tokenizer = ServedTokenizer(save(tmp_path))
    with pytest.raises(InvalidRequest) as refusal:
        tokenizer.encode("hello \ud800", add_special_tokens=False)
    assert refusal.value.field == "prompt"


@asynccontextmanager
async def served(tokenizer: ServedTokenizer, context: int) -> AsyncIterator[CoordinatorServiceStub]:
    """A coordinator with that tokenizer, whose only target has a context of `context` tokens."""
    server = ServiceServer("127.0.0.1:0", service_names=(COORDINATOR_SERVICE,))
    async with Rig(targets=0) as rig:
        rig.services.append(await start_service(TARGET, salt=0, context=context))
        coordinator = await rig.coordinator()
        servicer = CoordinatorServicer(
            generations=coordinator.generations,
            store=rig.store,
            pools=coordinator.pools,
            target_models=TargetModels(coordinator.pools, rig.store.target_shares()),
            draft_sources=DraftSourceFactory(coordinator.pools, None),
            tokenizer=tokenizer,
            default_mode=Mode.REJECTION,
            tenants=CallTenants(),
        )
        servicer.add_to(server.grpc_server)
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield CoordinatorServiceStub(channel)
        await server.stop(0)


@pytest.mark.parametrize("kind", ["text", "messages"])
async def test_tokenize_refuses_a_text_far_beyond_the_context_before_encoding(tmp_path: Path, kind: str) -> None:
    """A text somewhat beyond the context is encoded, because the call exists to count tokens."""
    byte_level().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")

    def asked(text: str) -> coordinator_pb2.TokenizeRequest:
        if kind == "text":
            return coordinator_pb2.TokenizeRequest(text=text)
        turn = coordinator_pb2.ChatMessage(role="user", content=text)
        return coordinator_pb2.TokenizeRequest(messages=coordinator_pb2.ChatMessages(messages=[turn]))

    async with served(ServedTokenizer(tmp_path), 512) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Tokenize(asked("b" * 3_900_000), timeout=60.0)
        assert from_rpc_error(refusal.value).reason == "CONTEXT_TOO_LONG"
        assert from_rpc_error(refusal.value).field == kind
        assert len((await stub.Tokenize(asked("b" * 1000), timeout=60.0)).token_ids) == 1000


async def test_a_call_past_its_deadline_stops_its_work() -> None:
    others = children_of(os.getpid())  # tokenizers of earlier tests that are not collected yet
    async with served(ServedTokenizer(DEMO), 1 << 20) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Tokenize(coordinator_pb2.TokenizeRequest(text="x" * 3_900_000), timeout=1.0)
        assert refusal.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(30):
            while children_of(os.getpid()) - others:
                await stub.GetInfo(coordinator_pb2.GetInfoRequest())  # other calls are answered in the meantime
        response = await stub.Tokenize(coordinator_pb2.TokenizeRequest(text="once"), timeout=60.0)
        assert len(response.token_ids) > 0


def children_of(pid: int) -> set[str]:
    """Return the ids of running children that process text."""
    pids = {pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()}
    return {pid for pid in pids if "text_child" in Path(f"/proc/{pid}/cmdline").read_text()}
