"""Draft and target services in this process, most of table models, and their tokenizer: real gRPC and real engines.

Called by `coordinator_rig`, and by tests that add services to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from coordinator.replicas.replica import DRAFT
from draft_service.fan_out_policy import Predraft
from draft_service.proposer import DraftOptions, Proposer
from draft_service.servicer import DraftServicer
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.sessions.calls import DEFAULT_MAX_RUN
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.client import open_link
from specdec.rpc.service_server import DRAFT_SERVICE, TARGET_SERVICE, ServiceServer
from specdec.structured.known_constraints import KnownConstraints
from target_service.servicer import TargetServicer
from target_service.verifier import Verifier
from tests.support.table_worker import TableWorker

VOCABULARY = 24
EOS = 1
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def write_tokenizer(directory: Path, chat_template: str | None = None) -> None:
    """Words w0, w2..w23 for the ids of the table model, and `</s>` as its EOS."""
    words = {"</s>": EOS} | {f"w{token_id}": token_id for token_id in range(VOCABULARY) if token_id != EOS}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


#: Writes a tokenizer whose chats have the text of their messages.
write_chat_tokenizer = partial(write_tokenizer, chat_template=CHAT_TEMPLATE)


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(f"w{token_id}" for token_id in token_ids if token_id != EOS)


@dataclass
class Service:
    """One draft or target service and what is behind it."""

    role: str
    engine: Any
    worker: TableWorker
    server: ServiceServer
    servicer: Any
    metrics: EngineMetrics

    @property
    def address(self) -> str:
        return self.server.address

    async def kill(self) -> None:
        """Ends it without grace: calls in flight break."""
        await self.server.stop(None)
        await self.engine.close()


async def start_service(
    role: str,
    *,
    salt: int,
    listen: str = "127.0.0.1:0",
    pool: str = "default",
    vocabulary: str = "table",
    context: int = 512,
    max_gamma: int = 8,
    between: Callable[[Any], Any] = lambda engine: engine,
    predraft: Predraft = Predraft.OFF,
    local_drafts: Mapping[str, int] = MappingProxyType({}),
    local_gammas: tuple[int, ...] = (),
    shadow: bool = False,
    check_caller: Callable[[str, Any], None] | None = None,
    num_blocks: int = 256,
    eos_token_ids: tuple[int, ...] = (EOS,),
    constraints: KnownConstraints | None = None,
    max_run: int = DEFAULT_MAX_RUN,
) -> Service:
    """`between` may put something of its own between the engine and its servicer. `constraints`: those that it
    follows; None: none."""
    worker = TableWorker(vocabulary_size=VOCABULARY, num_blocks=num_blocks, context=context, salt=salt,
                         vocabulary=vocabulary, local_drafts=local_drafts, local_gammas=local_gammas,
                         eos_token_ids=eos_token_ids)  # fmt: skip
    options = ReplicaOptions(replica_id=f"{role}-{salt}", model="table", pool=pool, max_gamma=max_gamma, shadow=shadow,
                             max_run=max_run)  # fmt: skip
    metrics = EngineMetrics("table", role=role, pool=pool)
    engine = (
        Proposer(worker, options, DraftOptions(predraft=predraft), observer=metrics, constraints=constraints)
        if role == DRAFT
        else Verifier(worker, options, observer=metrics, constraints=constraints)
    )
    metrics.watch_engine(engine.stats, engine.info)
    return await serve_engine(role, engine, metrics, worker, between=between, listen=listen, check_caller=check_caller)


async def serve_engine(
    role: str,
    engine: Any,
    metrics: EngineMetrics | None = None,
    worker: Any = None,
    *,
    servicer_type: Callable[..., Any] | None = None,
    between: Callable[[Any], Any] = lambda engine: engine,
    listen: str = "127.0.0.1:0",
    check_caller: Callable[[str, Any], None] | None = None,
) -> Service:
    """Serve an engine as a draft or target service does."""
    metrics = metrics or EngineMetrics("table", role=role)
    servicer = (servicer_type or (DraftServicer if role == DRAFT else TargetServicer))(between(engine), metrics)
    name = DRAFT_SERVICE if role == DRAFT else TARGET_SERVICE
    server = ServiceServer(listen, service_names=(name,), check_caller=check_caller)
    servicer.add_to(server.grpc_server)
    await server.start()
    await server.set_serving()
    return Service(role, engine, worker, server, servicer, metrics)


@asynccontextmanager
async def linked(role: str, engine: Any, servicer_type: Callable[..., Any] | None = None) -> AsyncIterator[Any]:
    """Serve an engine, and give a link to it. The caller closes the engine."""
    service = await serve_engine(role, engine, servicer_type=servicer_type)
    link = open_link(role, service.address)
    try:
        yield link
    finally:
        await link.close()
        await service.server.stop(None)
