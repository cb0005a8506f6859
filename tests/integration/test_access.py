"""A locked system: what a client without credentials, another tenant and an operator may do at each port.

Each door was open before keys existed: sessions of others by their id, promotions, inner addresses, replicas that
compute for any caller and let it free and lock sessions.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.front.access import open_access, open_admin_port
from specdec.access.callers import Callers
from specdec.access.guards import replica_guard
from specdec.access.service_key import ServiceKey
from specdec.client import AsyncClient
from specdec.contract.errors import SpecdecError, Unauthenticated
from specdec.contract.tenant import TENANT_KEY
from specdec.rpc.client import open_link
from specdec.rpc.status_mapping import from_rpc_error
from specdec.settings.coordinator import CoordinatorSettings
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from specdec.v1 import coordinator_pb2 as pb
from specdec.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from tests.support.coordinator_rig import PROMPT, Coordinator, Rig, request
from tests.support.gateway_rig import running_gateway
from tests.support.key_files import key_line, write_private
from tests.support.output import Output, read_rest, read_until

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share services

METHODS = pb.DESCRIPTOR.services_by_name["CoordinatorService"].methods_by_name
SERVICE_KEY = "a-service-key-of-32-characters-or-more"
ISSUER, AUDIENCE = "https://issuer.example", "specdec"
KEYS = (
    key_line("key-of-acme", "acme generate"),
    key_line("key-of-other", "other generate tpm=1000,sessions=5"),
    key_line("key-of-ops", "ops operate"),
    key_line("key-of-the-last", "last generate"),
)

Metadata = tuple[tuple[str, str], ...]


def bearer(key: str, tenant: str = "") -> Metadata:
    return (("authorization", f"Bearer {key}"), *(((TENANT_KEY, tenant),) if tenant else ()))


ACME, OTHER, OPERATOR, SERVICE = map(bearer, ("key-of-acme", "key-of-other", "key-of-ops", SERVICE_KEY))


@dataclass
class Locked:
    """A system with keys."""

    rig: Rig
    coordinator: Coordinator
    admin: CoordinatorServiceStub
    admin_address: str
    key_file: Path
    signing_key: ec.EllipticCurvePrivateKey

    async def generate(self, metadata: Metadata, session_id: str = "", **options: Any) -> Output:
        output = Output()
        async for response in self.coordinator.stub.Generate(
            request(session_id=session_id, **options), metadata=metadata
        ):
            output.add(response)
        return output

    async def call(self, method: str, metadata: Metadata, stub: Any = None, **fields: Any) -> Any:
        """Return the answer of a call, or the error it ended with."""
        message = getattr(pb, METHODS[method].input_type.name)(**fields)
        answer = getattr(stub or self.coordinator.stub, method)(message, metadata=metadata)
        try:
            return await (answer.read() if METHODS[method].server_streaming else answer)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    def token(self, **claims: Any) -> str:
        usual = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 3600, "tenant": "acme"}
        return jwt.encode({**usual, **claims}, self.signing_key, algorithm="ES256", headers={"kid": "k1"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Locked]:
    folder = tmp_path_factory.mktemp("keys")
    signing_key = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(signing_key.public_key()))
    (folder / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "k1"}]}))
    settings = CoordinatorSettings(
        tokenizer="any",
        api_keys=write_private(folder / "keys", "".join(KEYS)),
        jwt_jwks=str(folder / "jwks.json"),
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        service_key="env:KEY",
    )
    access = open_access(settings, {"KEY": SERVICE_KEY}, is_loopback=True)
    guard = replica_guard(Callers(service_key=ServiceKey(SERVICE_KEY)))
    async with AsyncExitStack() as ending:
        rig = await ending.enter_async_context(Rig(check_caller=guard.check))
        coordinator = await rig.coordinator(access=access, routes=True)
        assert coordinator.servicer is not None
        address = await open_admin_port("127.0.0.1:0", coordinator.servicer, access.admin, ending)
        coordinator.servicer.admin_address = address
        channel = await ending.enter_async_context(grpc.aio.insecure_channel(address))
        assert access.limits_of("other").max_tokens_per_minute == 1000
        yield Locked(rig, coordinator, CoordinatorServiceStub(channel), address, settings.api_keys, signing_key)


def reason(answer: Any) -> str:
    return answer.reason if isinstance(answer, SpecdecError) else "OK"


@pytest.mark.parametrize("method", METHODS)
async def test_a_caller_without_a_valid_key_is_refused_at_both_ports(
    locked: Locked, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for metadata in ((), bearer("a-guessed-key"), (("authorization", "Basic key-of-acme"),), bearer("a.b.c")):
        for stub in (locked.coordinator.stub, locked.admin):
            error = await locked.call(method, metadata, stub)
            assert (error.code, error.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    assert "guessed" not in caplog.text


async def test_health_needs_no_key(locked: Locked) -> None:
    health = health_pb2_grpc.HealthStub(locked.coordinator.channel)
    await health.Check(health_pb2.HealthCheckRequest())


async def test_a_session_of_another_tenant_is_as_an_unknown_one(locked: Locked) -> None:
    first = await locked.generate(ACME, "secret", prompt=(9, 8, 7, 6, 5))
    told: list[list[str]] = []
    for session_id in ("secret", "absent"):
        read = await locked.call("GetSession", OTHER, session_id=session_id)
        replayed = await locked.call("Generate", OTHER, session_id=session_id, resume_from=0)
        continued = await locked.call(
            "Generate", OTHER, session_id=session_id, prompt_token_ids=pb.TokenIds(ids=[5]), expected_session_tokens=29
        )
        answers = (read, replayed, continued)
        assert [reason(answer) for answer in answers] == ["SESSION_NOT_FOUND", "SESSION_NOT_FOUND", "SESSION_LOST"]
        told.append([answer.message.replace(session_id, "ID") for answer in answers])
    assert told[0] == told[1]  # neither its request id nor its number of tokens
    assert reason(await locked.call("DeleteSession", OTHER, session_id="secret")) == "OK"
    record = await locked.call("GetSession", ACME, session_id="secret", include_token_ids=True)
    assert list(record.token_ids) == [9, 8, 7, 6, 5, *first.token_ids]


async def test_another_tenant_neither_ends_a_running_request_nor_learns_its_cached_prefix(locked: Locked) -> None:
    prompt = tuple(2 + (5 * index + index // 7) % 20 for index in range(128))
    await locked.generate(ACME, "known", prompt=(*prompt, 4), max_new_tokens=2)
    stream = locked.coordinator.stub.Generate(request(session_id="running", max_new_tokens=300), metadata=ACME)
    output = await read_until(stream, 1)
    await locked.call("DeleteSession", OTHER, session_id="running")
    theirs = await locked.generate(OTHER, prompt=(*prompt, 5), max_new_tokens=2)
    ours = await locked.generate(ACME, prompt=(*prompt, 5), max_new_tokens=2)
    await read_rest(stream, output)
    assert output.token_ids == locked.rig.target.worker.greedy_continuation(PROMPT, 300)
    assert theirs.finished is not None
    assert ours.finished is not None
    assert (theirs.finished.usage.num_cached_prompt_tokens, ours.finished.usage.num_cached_prompt_tokens) == (0, 128)


async def test_only_the_service_right_names_tenants(locked: Locked) -> None:
    assert reason(await locked.call("GetSession", bearer("key-of-acme", "other"), session_id="s")) == "FORBIDDEN"
    assert reason(await locked.call("GetSession", bearer("key-of-acme", "acme"), session_id="s")) == "SESSION_NOT_FOUND"
    await locked.generate(bearer(SERVICE_KEY, "acme"), "through-a-gateway")
    assert reason(await locked.call("GetSession", ACME, session_id="through-a-gateway")) == "OK"
    assert reason(await locked.call("GetSession", OPERATOR, session_id="through-a-gateway")) == "FORBIDDEN"


@pytest.mark.parametrize(
    ("method", "wanted"),
    [("Promote", {"draft_pool": "default", "share": 1.0}), ("Drain", {"replica_id": "draft-1", "undo": True})],
)
async def test_operator_calls_are_answered_at_the_admin_port_with_the_right_alone(
    locked: Locked, method: str, wanted: dict[str, object]
) -> None:
    public = [await locked.call(method, metadata, **wanted) for metadata in (ACME, OPERATOR, SERVICE)]
    admin = [await locked.call(method, metadata, locked.admin, **wanted) for metadata in (ACME, SERVICE, OPERATOR)]
    assert [reason(answer) for answer in public] == ["FORBIDDEN"] * 3
    assert "--admin" in public[1].message
    assert [reason(answer) for answer in admin] == ["FORBIDDEN", "FORBIDDEN", "OK"]
    assert reason(await locked.call("GetSession", ACME, locked.admin, session_id="s")) == "FORBIDDEN"


async def test_inner_names_are_told_to_operators_and_services_alone(locked: Locked) -> None:
    ours = await locked.call("GetInfo", ACME)
    assert {replica.address for pool in ours.pools for replica in pool.replicas} == {""}
    assert (ours.admin_address, ours.HasField("promotion")) == ("", False)
    assert not any(pool.routes for pool in ours.pools)
    for metadata in (OPERATOR, SERVICE):
        told = await locked.call("GetInfo", metadata)
        addresses = {replica.address for pool in told.pools for replica in pool.replicas}
        assert addresses == {service.address for service in locked.rig.services}
        assert told.admin_address == locked.admin_address
    assert reason(await locked.call("GetInfo", OPERATOR, locked.admin)) == "OK"


async def test_a_replica_answers_coordinators_alone(locked: Locked) -> None:
    await locked.generate(ACME, "held", max_new_tokens=4)
    target = locked.rig.target
    num_held = target.engine.info().num_sessions
    locking = target_pb2.VerifyRequest(
        call_id=1, round=common_pb2.Round(session_id="{acme}held", epoch=1 << 60, round_id=1, token_ids=[5])
    )
    async with grpc.aio.insecure_channel(target.address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        for metadata in ((), ACME):  # a tenant's key opens no replica
            for call in (
                stub.GetEngineInfo(common_pb2.GetEngineInfoRequest(), metadata=metadata),
                stub.Release(common_pb2.ReleaseRequest(session_ids=["held"], tenant="acme"), metadata=metadata),
                stub.Score(common_pb2.ScoreRequest(), metadata=metadata),
                stub.Verify(iter([target_pb2.VerifyFrame(requests=[locking])]), metadata=metadata).read(),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert from_rpc_error(refused.value).reason == "UNAUTHENTICATED"
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert target.engine.info().num_sessions == num_held
    assert len((await locked.generate(ACME, "held", max_new_tokens=4)).token_ids) == 4
    link = open_link("target", target.address, metadata=ServiceKey(SERVICE_KEY).metadata)
    assert (await link.info()).role == "target"
    await link.close()


async def test_a_token_gives_its_tenant_and_rights_and_a_bad_one_nothing(locked: Locked) -> None:
    await locked.generate(bearer(locked.token()), "of-a-token", max_new_tokens=2)
    assert reason(await locked.call("GetSession", ACME, session_id="of-a-token")) == "OK"
    operator = bearer(locked.token(rights=["operate"], tenant="ops"))
    assert reason(await locked.call("Promote", operator, locked.admin, draft_pool="default", share=0.0)) == "OK"
    assert reason(await locked.call("GetSession", operator, session_id="of-a-token")) == "FORBIDDEN"
    other_key = ec.generate_private_key(ec.SECP256R1())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "exp": time.time() + 3600, "tenant": "acme"}
    for token in (
        locked.token(exp=time.time() - 60),
        locked.token(aud="another"),
        locked.token(iss="https://elsewhere"),
        locked.token(tenant=None),
        locked.token(tenant="x" * 5000),
        jwt.encode(claims, None, algorithm="none"),
        jwt.encode(claims, "a secret of more than 32 characters, shared", algorithm="HS256", headers={"kid": "k1"}),
        jwt.encode(claims, other_key, algorithm="ES256", headers={"kid": "k1"}),
        jwt.encode(claims, other_key, algorithm="ES256", headers={"kid": "k2"}),
    ):
        error = await locked.call("GetInfo", bearer(token))
        assert reason(error) == "UNAUTHENTICATED"
        assert token not in error.message


async def test_a_gateway_with_the_service_key_serves_the_tenant_of_each_of_its_keys(
    locked: Locked, tmp_path: Path
) -> None:
    from gateway.auth import ApiKeys

    keys = ApiKeys(locked.key_file, allow_anonymous=False)
    body = {"model": "table", "prompt": list(PROMPT), "max_tokens": 4, "session_id": "of-the-gateway"}
    headers = {"authorization": "Bearer key-of-acme"}
    address = locked.coordinator.server.address
    async with running_gateway(address, keys=keys, service_key=ServiceKey(SERVICE_KEY)) as running:
        assert (await running.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert reason(await locked.call("GetSession", ACME, session_id="of-the-gateway")) == "OK"
    async with running_gateway(address, keys=keys) as running:
        refused = await running.http.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 503
        assert "--service-key" in refused.json()["error"]["message"]


async def test_a_revoked_key_opens_nothing_and_the_sdk_says_so(locked: Locked) -> None:
    async with AsyncClient(locked.coordinator.server.address, api_key="key-of-the-last") as client:
        assert (await client.info()).admin_address == ""
        write_private(locked.key_file, "".join(KEYS[:-1]))
        for _ in range(600):  # the file is looked at once a second
            if reason(await locked.call("GetInfo", bearer("key-of-the-last"))) != "OK":
                break
            await asyncio.sleep(0.1)
        with pytest.raises(Unauthenticated, match="the API key is unknown"):
            await client.info()


@pytest.mark.parametrize(("is_loopback", "answered"), [(True, ["OK", "OK"]), (False, ["FORBIDDEN", "OK"])])
async def test_without_keys_operator_calls_stay_open_to_this_machine(is_loopback: bool, answered: list[str]) -> None:
    access = open_access(CoordinatorSettings(tokenizer="any"), {}, is_loopback=is_loopback)
    async with AsyncExitStack() as ending:
        rig = await ending.enter_async_context(Rig())
        coordinator = await rig.coordinator(access=access, routes=True)
        assert coordinator.servicer is not None
        address = await open_admin_port("127.0.0.1:0", coordinator.servicer, access.admin, ending)
        admin = await ending.enter_async_context(grpc.aio.insecure_channel(address))
        system = Locked(rig, coordinator, CoordinatorServiceStub(admin), address, Path(), None)  # type: ignore[arg-type]
        assert len((await system.generate(bearer("sk-anything"))).token_ids) == 24
        wanted = {"draft_pool": "default", "share": 1.0}
        answers = [await system.call("Promote", (), stub, **wanted) for stub in (None, system.admin)]
        assert [reason(answer) for answer in answers] == answered
        told = await system.call("GetInfo", ())
        assert any(replica.address for pool in told.pools for replica in pool.replicas) is is_loopback
