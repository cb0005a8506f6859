"""The Python SDK: `AsyncClient`, `Client`, and streams that resume after an interruption.

It speaks the public gRPC interface only and loads neither torch nor numpy. Programs and the `specdec` command line use
it.

    from specdec import Client

    with Client() as client:  # SPECDEC_ENDPOINT, or 127.0.0.1:50051
        print(client.generate("def fibonacci(n):", temperature=0, max_new_tokens=64).text)
        for chunk in client.generate("import os", stream=True, provenance=True):
            print(chunk.text, end="")
"""

from specdec.access.tls import Tls
from specdec.client.async_client import AsyncClient
from specdec.client.async_stream import AsyncStream
from specdec.client.messages import ChatMessage, TextPart
from specdec.client.recovery import Budgets
from specdec.client.request import GenerateOptions
from specdec.client.results import (
    Chunk,
    Completion,
    GenerationStats,
    Session,
    TokenDetail,
    TopLogprob,
    Usage,
)
from specdec.client.server_info import (
    Adapter,
    Drained,
    LostReplica,
    Pool,
    Promotion,
    Replica,
    Route,
    ServerInfo,
    TargetModel,
)
from specdec.client.sync_client import Client
from specdec.client.sync_stream import Stream
from specdec.client.tools import ToolCall
from specdec.contract.constraint import Constraint
from specdec.contract.errors import (
    ClientClosed,
    DeadlineExceeded,
    Forbidden,
    Internal,
    InvalidRequest,
    NotFound,
    ResourceExhausted,
    SessionBusy,
    SessionLost,
    SpecdecError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from specdec.contract.tools import AnswerText, ReasoningText, ToolCallDelta

__all__ = [
    "Adapter",
    "AnswerText",
    "AsyncClient",
    "AsyncStream",
    "Budgets",
    "ChatMessage",
    "Chunk",
    "Client",
    "ClientClosed",
    "Completion",
    "Constraint",
    "DeadlineExceeded",
    "Drained",
    "Forbidden",
    "GenerateOptions",
    "GenerationStats",
    "Internal",
    "InvalidRequest",
    "LostReplica",
    "NotFound",
    "Pool",
    "Promotion",
    "ReasoningText",
    "Replica",
    "ResourceExhausted",
    "Route",
    "ServerInfo",
    "Session",
    "SessionBusy",
    "SessionLost",
    "SpecdecError",
    "Stream",
    "TargetModel",
    "TextPart",
    "Tls",
    "TokenDetail",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Usage",
]
