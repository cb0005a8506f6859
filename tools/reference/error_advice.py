"""What a user does about each error reason, for the errors page. A new reason without a line fails the page."""

from __future__ import annotations

ADVICE = {
    "ADDRESS_IN_USE": "Another program listens at the address, or a `specdec up` of yours is running or starting "
    "there. Stop that one with `specdec down`, or choose another address with the flag that the message names. "
    "Raised by `specdec up` only.",
    "CLIENT_CLOSED": "The program closed the client before the call ended. Raised by the Python client only.",
    "CONSTRAINT_INVALID": "The constraint cannot be compiled, or takes too long. The message has the sentence of "
    "llguidance, or the limit.",
    "CONSTRAINT_MISS": "The replica lacks the text of a constraint, and the caller sends it. Internal to the target "
    "link.",
    "CONTEXT_TOO_LONG": "Shorten the prompt or lower `max_new_tokens`. The message has the limit.",
    "COORDINATOR_UNAVAILABLE": "No coordinator answers at the endpoint. Start `specdec up`, or name another endpoint "
    "with `--endpoint` or `SPECDEC_ENDPOINT`. `specdec generate --verbose` prints the text of gRPC, too. Raised by "
    "the Python client only.",
    "DEADLINE_EXCEEDED": "The `timeout` of the call has passed. Raised by the Python client only.",
    "DRAINING": "The process is shutting down. Try again: another process answers the call.",
    "FORBIDDEN": "The API key lacks a right, or belongs to another tenant than the call names. Operator calls are "
    "answered at the coordinator's `--admin` address alone.",
    "INTERNAL": "A fault of specdec. The log has the traceback under the request id.",
    "INVALID_REQUEST": "The request cannot succeed as it is. The message names the field, the value and the limit.",
    "KV_EXHAUSTED": "Give replicas more memory for KV (`--kv-cache-bytes`, `--gpu-memory-utilization`; under "
    "`specdec up` the same flags with `-target` or `-draft`), or start more replicas.",
    "KV_MISS": "The replica lacks tokens of the session, and the caller sends them. Internal to the draft and target "
    "links.",
    "LEASE_LOST": "Another coordinator owns the session now. The Python client resumes there.",
    "METHOD_NOT_ALLOWED": "The path exists for another HTTP method. `/openapi.json` lists both. Over HTTP only.",
    "MODEL_NOT_FOUND": "The request names a model or an adapter that this system does not serve. `/v1/models` and "
    "`specdec status` list the names. `--served-model-name` sets those of the model. Adapters come from the server "
    "of the targets (`--backend vllm`, `--adapter`).",
    "NOT_FOUND": "Nothing is served at this path. `/openapi.json` lists the paths; the API's begin with `/v1`. "
    "Over HTTP only.",
    "NO_CHAT_TEMPLATE": "The tokenizer has no chat template. Send a prompt instead of messages.",
    "NO_LEGAL_TOKEN": "At some position the model gives no probability to any token that the constraint allows. Loosen "
    "the constraint.",
    "POOL_NOT_FOUND": "No draft pool has this name. `specdec pools` lists the names.",
    "QUEUE_FULL": "The request would wait too long or miss its deadline, the coordinator has `--max-queue` requests, "
    "or the reader of a stream fell 2,048 tokens behind and was cut off. Try again after the time of `RetryInfo`; "
    "resume a stream with `resume_from` after the last token that was read.",
    "QUOTA_EXCEEDED": "The API key or the tenant has reached one of its limits, or the Ray cluster has no room for a "
    "replica. The message has the limit, or what is needed and what is free.",
    "REPLICA_BUSY": "The draft replica serves sessions and does not score now. Internal to the draft link.",
    "REPLICA_NOT_FOUND": "No draft or target replica that this coordinator knows has the id or address of the drain. "
    "`specdec status` lists them.",
    "REPLICA_UNAVAILABLE": "No target replica answers, or its device hangs. Look at `specdec status`, then at the "
    "health and the log of the target replicas.",
    "REQUEST_TOO_LARGE": "The body of the request is larger than `--max-body-bytes` of the gateway. Over HTTP only.",
    "RESPONSE_NOT_FOUND": "The response expired with its session, was deleted, or was not stored (`store: false`). "
    "Send the whole conversation instead of `previous_response_id`. Over HTTP only.",
    "SCHEMA_TOO_NEW": "A newer version stored the session. Clients find a coordinator of that version by themselves, "
    "if there is one; otherwise upgrade, or delete the session.",
    "SESSION_BUSY": "A session runs one request at a time. Wait, or join the running request with its `request_id`. "
    "The lease of a coordinator that died ends after `--lease-ttl-s`.",
    "SESSION_LOST": "The session holds other tokens than the caller expects: it expired, it was deleted, or Redis lost "
    "writes. Resume its last request, send the whole conversation, or begin a new session with "
    "`expected_session_tokens` 0.",
    "SESSION_NOT_FOUND": "The session does not exist: it expired, it was deleted, or the id is wrong.",
    "STALE_EPOCH": "The call is older than one that the replica has seen. Internal to the draft and target links.",
    "STORE_UNAVAILABLE": "Redis does not answer at `--redis-url`.",
    "UNAUTHENTICATED": "An API key or token is needed, or it is unknown or expired: send `authorization: Bearer KEY`, "
    "over HTTP or as gRPC metadata. Replicas need the key of `--service-key`.",
    "UNSUPPORTED": "This build or this model cannot do what was asked. The message says what can.",
    "VOCABULARY_MISMATCH": "Target and tokenizer must share one id-to-token map. A draft must share it, too, unless it "
    "is started with `--for-tokenizer` and has tokens in common. The message has the fingerprints.",
}
