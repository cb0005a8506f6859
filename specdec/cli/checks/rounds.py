"""Real rounds: a generation through the coordinator and each draft pool, and a call of each replica by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from specdec.cli.checks.comparisons import named
from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.cli.checks.system import Connect, System
from specdec.client import Client, Completion, ServerInfo
from specdec.contract.engine_api import EngineInfo
from specdec.contract.errors import (
    DeadlineExceeded,
    Forbidden,
    ResourceExhausted,
    SpecdecError,
    Unauthenticated,
    error_line,
)

#: Output tokens of a probe, and draft tokens a round.
_NUM_TOKENS, _GAMMA = 16, 2
#: Tries until a pool counts as one that makes no drafts: it reads the prompt first, so its first answers may be late.
_NUM_TRIES = 4
#: Longest wait for the answer of one replica.
_CALL_S = 15.0
_LOAD_ADVICE = "add targets or raise --max-queue and --max-running; see specdec top"


def check_rounds(system: System, connect: Connect) -> Iterator[Finding]:
    """Call each replica that answers this caller, then generate without drafts and by each draft pool.

    Args:
        system: the parts that were found.
        connect: returns a client whose calls may wait for an output.
    """
    info = system.info
    if info is None or not any(pool.role == "target" and pool.replicas for pool in info.pools):
        return
    yield from asyncio.run(_call_replicas(system))
    with connect(system.addresses.endpoint) as client:
        first = _generation(client, info)
        yield first
        if first.advice:  # the pools would fail for the same reason
            return
        for pool in info.pools:
            if pool.role == "draft" and (pool.replicas or pool.dtype):  # drafts that are found in text may find none
                yield _pool_generation(client, info, pool.name)


def _generation(client: Client, info: ServerInfo) -> Finding:
    try:
        done = _generate(client, info, mode="off")
    except ResourceExhausted as error:
        refused = warn if error.reason == "QUOTA_EXCEEDED" else fail
        return refused("round", f"a request is refused: {error.message}", _LOAD_ADVICE)
    except (Unauthenticated, Forbidden) as error:
        return warn("round", f"not tried: {error.message}", "give --api-key of a key that may generate")
    except SpecdecError as error:
        return fail("round", f"a request fails: {error_line(error).removeprefix('error: ')}",
                    "see the checks above, and the coordinator's log")  # fmt: skip
    return ok("round", f"a request made {done.usage.num_output_tokens} tokens in {done.stats.e2el_s:.2g} s")


def _pool_generation(client: Client, info: ServerInfo, pool: str) -> Finding:
    """Return whether drafts of a pool reach the target in time."""
    tested = accepted = 0
    try:
        for _ in range(_NUM_TRIES):
            stats = _generate(client, info, gamma=_GAMMA, draft_pool=pool).stats
            tested, accepted = tested + stats.num_draft_tokens, accepted + stats.num_accepted_tokens
            if tested:
                return ok("round", f"draft pool {pool}: {accepted} of {tested} draft tokens accepted")
    except SpecdecError as error:
        return fail("round", f"draft pool {pool}: {error_line(error).removeprefix('error: ')}",
                    "look at the logs of its drafts")  # fmt: skip
    return fail("round", f"draft pool {pool}: no draft came in time, in {_NUM_TRIES} requests of {_NUM_TOKENS} tokens",
                "look at the load and the logs of its drafts, and at the network to them")  # fmt: skip


def _generate(client: Client, info: ServerInfo, *, mode: str | None = None, gamma: int | None = None,
              draft_pool: str | None = None) -> Completion:  # fmt: skip
    """Return a generation from a prompt that every tokenizer has, in a session that is deleted."""
    size = info.vocabulary_size
    done = client.generate(
        prompt_token_ids=[size // 2, size // 3, size // 4, size // 5],
        temperature=0.0,
        max_new_tokens=min(_NUM_TOKENS, max(1, info.max_context_tokens // 2)),
        ignore_eos=True,
        mode=mode,
        gamma=gamma,
        draft_pool=draft_pool,
    )
    client.delete_session(done.session_id)
    return done


async def _call_replicas(system: System) -> list[Finding]:
    """Return a failure for each replica that describes itself and does not compute, and a line for the others."""
    called = {address: engine for address, engine in system.engines.items() if not engine.draining}
    outcomes = await asyncio.gather(*(_call(system, address, engine) for address, engine in called.items()))
    findings = []
    num_computing = 0
    for (address, engine), error in zip(called.items(), outcomes, strict=True):
        if error is None or isinstance(error, ResourceExhausted):  # busy with sessions of others
            num_computing += 1
        elif not isinstance(error, Unauthenticated | Forbidden):  # a replica that answers services alone
            findings.append(fail("round", f"{named(address, engine)} does not compute: {error.message}",
                                 "look at its log; end the process if its device hangs"))  # fmt: skip
    if num_computing:
        findings.append(ok("round", f"{num_computing} of {len(called)} replicas computed a round by themselves"))
    return findings


async def _call(system: System, address: str, engine: EngineInfo) -> SpecdecError | None:
    from specdec.rpc.client import open_link
    from specdec.rpc.probe import run_probe

    tls = None if address in system.plaintext else system.addresses.tls
    link = open_link(engine.role, address, metadata=system.addresses.metadata, tls=tls)
    try:
        async with asyncio.timeout(_CALL_S):
            await run_probe(link, engine.vocabulary_size)
    except SpecdecError as error:
        return error
    except TimeoutError:
        return DeadlineExceeded(f"no answer within {_CALL_S:g} s")
    finally:
        await link.close()
    return None
