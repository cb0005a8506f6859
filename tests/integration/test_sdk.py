"""The SDK against whole coordinators on real services: what resumption promises, held end to end."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from specdec.client import AsyncClient, Client
from specdec.contract.errors import InvalidRequest, NotFound, SpecdecError
from specdec.contract.types import TokenSource
from tests.support.coordinator_rig import MESSAGE_LIMIT_BYTES, PROMPT, Rig, started_coordinator
from tests.support.table_services import text_of

GREEDY = {"prompt_token_ids": PROMPT, "temperature": 0.0, "ignore_eos": True, "gamma": 3}


@pytest.mark.parametrize("mode", ["rejection", "block", "coupled", "off"])
async def test_a_stream_whose_coordinator_stops_is_finished_by_another_without_a_gap_or_a_repeat(mode: str) -> None:
    options = GREEDY | {"temperature": 0.9, "seed": 7, "mode": mode, "max_new_tokens": 96}
    async with Rig(drafts=1) as rig:
        first, second = await rig.coordinator(), await rig.coordinator()
        endpoint = f"ipv4:{first.server.address},{second.server.address}"
        async with AsyncClient(endpoint) as client:
            whole = await client.generate(**options)
            async with client.generate(stream=True, **options) as stream:
                chunks = [await anext(stream), await anext(stream)]
                await next(each for each in (first, second) if each.generations.num_running).stop()
                chunks += [chunk async for chunk in stream]
                completion = await stream.result()
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(completion.token_ids)
    assert len(completion.token_ids) == 96
    assert completion.text == text_of(completion.token_ids)
    if mode in ("coupled", "off"):  # promised whatever the rounds are
        assert completion.token_ids == whole.token_ids


async def test_a_stream_left_early_leaves_its_session_free_for_the_next_turn_at_once() -> None:
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        for _ in range(10):
            async with client.generate(stream=True, session_id="s", max_new_tokens=200, **GREEDY) as stream:
                await anext(stream)
        session = await client.get_session("s", include_token_ids=True)
        assert session.turn == 9
        assert len(session.token_ids) == session.num_tokens
        await client.delete_session("s")
        with pytest.raises(NotFound):
            await client.get_session("s")


async def test_the_next_turn_may_be_asked_for_before_the_stream_that_it_follows_is_left() -> None:
    """However the two calls' news reach the server: one call's end and another's beginning have no order in gRPC."""
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        async with client.generate(stream=True, session_id="s", max_new_tokens=200, **GREEDY) as left:
            await anext(left)
            next_turn = asyncio.ensure_future(client.generate(session_id="s", max_new_tokens=3, **GREEDY))
            await asyncio.sleep(0)  # it is on its way
        assert len((await next_turn).token_ids) == 3


async def test_many_streams_of_one_client_each_get_their_own_output() -> None:
    async with started_coordinator() as (rig, coordinator), AsyncClient(coordinator.server.address) as client:
        prompts = [tuple(range(2, 4 + index)) for index in range(12)]
        outputs = await asyncio.gather(
            *(
                client.generate(
                    prompt_token_ids=prompt, temperature=0.0, ignore_eos=True, gamma=1 + index % 4, max_new_tokens=20
                )
                for index, prompt in enumerate(prompts)
            )
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            assert list(output.token_ids) == rig.target.worker.greedy_continuation(prompt, 20)


async def test_the_blocking_client_streams_with_provenance_and_text_per_token() -> None:
    async with started_coordinator() as (_, coordinator):

        def read() -> None:
            with Client(coordinator.server.address) as client:
                with client.generate(stream=True, provenance=True, max_new_tokens=40, **GREEDY) as stream:
                    for chunk in stream:
                        assert "".join(detail.text for detail in chunk.details) == chunk.text
                    details = stream.result().details
                assert len(details) == 40
                assert {TokenSource.ACCEPTED, TokenSource.CORRECTED} <= {detail.source for detail in details}
                assert client.tokenize("w5 w6") == (5, 6)
                assert {pool.role for pool in client.info().pools} == {"draft", "target"}

        await asyncio.to_thread(read)


async def test_a_session_is_resumed_by_id_from_any_of_its_tokens() -> None:
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        whole = await client.generate(session_id="s", max_new_tokens=20, **GREEDY)
        rest = await client.resume("s", 13).result()
        assert rest.token_ids == whole.token_ids[13:]
        assert whole.text.endswith(rest.text)
        assert rest.request_id == whole.request_id
        with pytest.raises(InvalidRequest, match="at most the 20 tokens") as caught:
            await client.resume("s", 21).result()
        assert caught.value.field == "resume_from"


async def test_errors_arrive_as_the_tree_with_reason_and_field() -> None:
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("w5", top_p=1.5)
        assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", "sampling.top_p")
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(messages=[{"role": "user", "content": "w5"}])
        assert caught.value.reason == "NO_CHAT_TEMPLATE"


async def test_a_message_over_the_servers_limit_is_refused_in_one_sentence_that_has_the_limit() -> None:
    text = "w5 " * 1_000_000
    async with started_coordinator() as (_, coordinator), AsyncClient(coordinator.server.address) as client:
        sync_client = Client(coordinator.server.address)
        for call in (
            client.generate(text),
            client.tokenize(text),
            asyncio.to_thread(sync_client.generate, text),
            client.generate(text, stream=True).result(),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await call
            assert not caught.value.retryable
            assert caught.value.reason == "INVALID_REQUEST"
            assert re.fullmatch(
                rf"the request has 3000\d\d\d bytes; the limit of {coordinator.server.address} is "
                rf"{MESSAGE_LIMIT_BYTES} \(its --max-message-bytes\)",
                caught.value.message,
            )
        sync_client.close()


#: Forks processes that call, with clients of their own or with their parent's, and prints how each of them ended.
FORKS = """
import multiprocessing, os, sys
from specdec.client import Client
from specdec.contract.errors import SpecdecError

def call(answers, client=None):
    try:
        with client or Client(sys.argv[1]) as used:
            answers.put(used.info().max_gamma > 0)
    except SpecdecError as error:
        answers.put(error_line(error))

def ask_in_a_fork(client=None):
    answers = context.SimpleQueue()
    process = context.Process(target=call, args=(answers, client))
    process.start()
    process.join(60)
    if process.is_alive():
        process.kill()
        sys.exit("a forked process hangs")
    if process.exitcode:
        sys.exit(f"a forked process ended with {process.exitcode}")
    print(answers.get())

from specdec.contract.errors import error_line
context = multiprocessing.get_context("fork")
unused = Client(sys.argv[1])
for _ in range(3):
    ask_in_a_fork()
    ask_in_a_fork(unused)
for _ in range(40):
    with Client(sys.argv[1]) as client:
        client.info()
    ask_in_a_fork()
    with Client(sys.argv[1]) as client:
        client.info()
        ask_in_a_fork(client)
        threads = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
        ask_in_a_fork(client)
        print(bool(threads & set(os.listdir("/proc/self/task"))))
"""


async def test_forked_processes_call_by_themselves_or_are_told_in_one_line_how_to_start() -> None:
    async with started_coordinator() as (_, coordinator):
        forking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FORKS, coordinator.server.address, stdout=asyncio.subprocess.PIPE
        )
        written, _ = await forking.communicate()
    assert forking.returncode == 0
    before, after = written.decode().splitlines()[:6], written.decode().splitlines()[6:]
    assert before == ["True"] * 6  # nothing had been called when they were forked
    assert set(after[3::4]) == {"True"}  # gRPC kept its threads: stopping them can take for ever
    del after[3::4]
    assert len(after) == 120
    (line,) = set(after)
    assert "forked" in line
    assert "spawn" in line
    assert line.endswith("(UNSUPPORTED)")


async def test_an_async_client_that_was_made_before_its_event_loop_works_in_one_loop_only() -> None:
    async with started_coordinator() as (_, coordinator):
        client = AsyncClient(coordinator.server.address)

        async def ask() -> int:
            return (await client.info()).max_gamma

        def ask_in_loops() -> SpecdecError:
            with asyncio.Runner() as runner:
                assert runner.run(ask()) > 0
                with pytest.raises(SpecdecError) as caught:
                    asyncio.run(ask())
                runner.run(client.close())
            return caught.value

        made_before = await asyncio.to_thread(lambda: AsyncClient(coordinator.server.address))
        assert (await made_before.info()).max_gamma > 0
        await made_before.close()
        error = await asyncio.to_thread(ask_in_loops)
    assert error.reason == "UNSUPPORTED"
    assert "make one in each loop" in error.message
