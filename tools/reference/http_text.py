"""Texts of the HTTP page that the OpenAPI document lacks. A field of an answer without a meaning fails the page."""

from __future__ import annotations

INTRODUCTION = """The gateway answers in the form of OpenAI's API and, under `/v1/messages`, of Anthropic's. Guides show
it with [OpenAI's clients](../how-to/openai-clients.md) and [beyond OpenAI's API](../how-to/http-api.md).
`/openapi.json` describes the same routes for programs, and `/` is the [playground](../how-to/playground.md)."""

BODIES = (
    """A body is a JSON object in UTF-8. Numbers and flags are strict: the text `"1"` is refused as a number. `2.0` is
    the integer 2, and `2.5` is refused as an integer. `null` means the same as leaving a field out, also in the objects
    of a request; variables of a chat template, JSON schemas and the arguments of tool calls may hold `null`. Objects
    and lists are nested at most {max_depth} levels deep, and an integer has at most {max_digits} digits.""",
    """Fields that are not on this page are ignored, as OpenAI does, unless they would constrain the output, such as
    `grammar`, `json_schema`, `regex`, `pattern`, `choice` and all others that begin with `guided_`, or, on a route that
    generates, change its text in another way, such as `typical_p`, `no_repeat_ngram_size` and `max_new_tokens`. So is a
    field that is not on this page within `response_format` and its like. They are refused with the code `unsupported`,
    also within {carriers}. Their names are compared without case, dashes and underscores. A sampler's field with the
    value at which it is off is ignored.""",
    """A body may be compressed with gzip (`Content-Encoding: gzip`); another encoding is refused with status 415. A
    larger body than `--max-body-bytes`, before or after it is unpacked, is refused, and so is a body that takes longer
    than `--body-timeout-s`.""",
)

ROUTES = (
    """Where the gateway has API keys, a request to a route that is marked with yes must send a key. `POST` requests
    and resumed streams count towards the limits of a key.""",
    """`HEAD` is answered wherever `GET` is, and resumes no stream. Slashes at the end of a path are ignored; no request
    is redirected. Behind a proxy, `--forwarded-allow-ips` names the proxies whose `X-Forwarded-For` is believed. The
    connection speaks HTTP/1.1; a stream to a client of HTTP/1.0 has no chunks and ends with its connection.""",
)

SHARED = """These fields have the same meaning for `/v1/chat/completions`, `/v1/completions`, `/v1/responses` and
`/v1/messages`."""

DEFAULTS = """Unless `--generation-config off` is set, an absent field has the value of the model's
`generation_config.json`: {names}. `/v1/models` shows these values as `default_sampling`. Without such a value the
temperature is 1.0 and nothing is filtered or penalised. `speculation.gamma` is at most `max_gamma` of `/v1/models`."""

REFUSED = """The gateway knows these fields and refuses them with status 400, the code `unsupported` and the reason:"""

REFUSED_HERE = "Refused here:"

PATHS = """The model's chat template renders every conversation. Without one, only `/v1/completions` works; the other
routes answer `no_chat_template`. A list of content parts may have parts of type `text` alone."""

LIMIT = """Without a limit on output tokens, the output of a chat or a response may fill the context (`max_model_len` of
`/v1/models`), or be as long as the model recommends. A completion then has at most 16 tokens, and a message must give a
limit."""

CHUNKS = """Every event is a chunk, and the last one is `[DONE]`. The first chunk of a chat has the role, and the last
chunk of a choice its `finish_reason`. With `stream_options.include_usage`, one more chunk has the usage and no choices.
A chunk with `return_provenance`:"""

RESPONSE_END = "The last event is `response.incomplete` if the output reached its limit, else `response.completed`."

SESSION = """Query parameters of a stream ([Resume a stream](#resume-a-stream)); the session's record has none:"""

ANSWER = """An answer has the fields of the API whose route was called, and some of ours: `session_id`, in every answer
and choice, and the following two on request. `system_fingerprint` is the fingerprint of the target model. If keywords
of a JSON schema are ignored, `specdec.constraint_warnings` of the answer names them, in a stream that of the last
chunk (the event `message_delta` of a message)."""

METRICS = """`return_metrics` (or `stream_options.include_metrics`) adds `metrics`. A stream has it in the chunk of the
usage, or without that in the last one. `metrics.speculative_decoding` has the fields of vLLM, which tools such as
aiperf read; it is null if the request has several outputs."""

STATISTICS = "`metrics.specdec` has our statistics, summed over the outputs of the request."

PROVENANCE = """`return_provenance` adds `specdec`: the source of every token of the choice, and in a stream also the
round that made the chunk. Tokens of one chunk come from one round."""

STREAMS = """`stream: true` sends server-sent events. The status is sent with the first event, so an error before the
first token has its HTTP status. After `--keep-alive-s` without an event comes a comment, `: keep-alive`, so that
proxies keep the connection. Every event is one line of data: the line ends of Unicode in it are escaped. If the client
closes the connection, the generation is cancelled. The text does not depend
on how it was divided into events."""

RESUME = (
    """A stream has event ids, `SESSION:INDEX`, if its request has the header `Accept: text/event-stream`. INDEX is the
    number of output tokens up to the event. Chat and text completions have ids; responses and messages have none.""",
    """To go on after a lost connection, send `GET /v1/sessions/SESSION` with the headers `Accept: text/event-stream`
    and `Last-Event-ID: SESSION:INDEX`. Without `Last-Event-ID` the output is sent from its beginning. The answer is a
    stream of chunks without a repeated or a missing token; an output that was interrupted is generated to its end. A
    session is kept for `--session-ttl-s` of the coordinator after its last turn. The loss of a coordinator needs no
    such request: the gateway resumes the stream at another one by itself, for up to `--resume-s`.""",
    """Tokens that are sent again have `source`, `p` and `q` null in their provenance, because these are not stored.""",
)

ERRORS = """An error of OpenAI's routes is an object `error` with `message`, `type`, `param` (the field at fault, or
null) and `code` (the [reason](errors.md) in lower case). An error of `/v1/messages` has `type` and `message` alone.
A context that is too long has OpenAI's code `context_length_exceeded` and begins with OpenAI's sentence (`This model's
maximum context length is N tokens. However, you requested …`), or with Anthropic's under `/v1/messages` (`prompt is too
long`), because clients act on these words."""

ERROR_ENDS = (
    """After the first event the status cannot change. A chat or text completion then ends with an event of the error
    object and `[DONE]`, a response with `response.failed`, and a message with the event `error`.""",
    """Headers that take longer than `--header-timeout-s` end in status 408, headers above 64 KiB in 431, and a gRPC
    client that calls this port gets 505 with the place where gRPC is served. Each closes the connection.""",
)

REQUEST_HEADERS = {
    "Authorization": "`Bearer KEY`, with the API key.",
    "x-api-key": "The API key, as Anthropic's clients send it; `Authorization` wins.",
    "Content-Type": "`application/json`, with every body.",
    "Accept": "`text/event-stream` asks for event ids, and for the stream of a session.",
    "Last-Event-ID": "`SESSION:INDEX`, the last event that a client has of a session's stream.",
    "x-request-id": "Id of the request, of which 128 of A-Z a-z 0-9 . _ : @ / + = - are kept; absent: a new one.",
    "traceparent": "W3C trace context, which the [trace](../how-to/trace.md) of the request continues.",
}
ANSWER_HEADERS = {
    "Retry-After": "Seconds after which another attempt may succeed, at least 1. With the codes {retried}.",
    "x-request-id": "Id of the request. Records and traces of all services that concern it have it as `x_request_id`.",
    "WWW-Authenticate": "`Bearer`, with status 401.",
    "Allow": "The methods of the path, with status 405.",
}

#: Fields of short answers, by their routes.
SHORT_ANSWERS = {
    "POST /tokenize": "`count`, `max_model_len` and `tokens`, the ids.",
    "POST /detokenize": "`prompt`, the text.",
    "POST /v1/messages/count_tokens": "`input_tokens`.",
    "GET /v1/models": "`data`, a list of models in the form below.",
    "DELETE": "`id`, `object` and `deleted`.",
    "GET /ready": "`status` and `num_targets`, the number of target replicas.",
}

#: Routes that the document leaves out: path and description.
OTHER_ROUTES = {"GET /openapi.json": "This interface for programs", "GET /": "The playground"}

#: Meaning of each field of ours in answers, by the object and the field.
MEANINGS = {
    "metrics": {
        "mean_acceptance_length": "tokens of a round with a draft, the target's own token included",
        "draft_acceptance_rate": "accepted draft tokens divided by draft tokens",
        "acceptance_histogram": "rounds with a draft by the number of draft tokens that they accepted, from 0 on",
        "num_spec_steps": "rounds that had a draft",
        "num_accepted_draft_tokens": "draft tokens that the target accepted",
        "num_draft_tokens": "draft tokens that were verified",
        "num_spec_tokens": "draft tokens of the longest draft",
    },
    "statistics": {
        "num_rounds": "all rounds",
        "num_draft_tokens": "draft tokens that were verified",
        "num_accepted_tokens": "draft tokens that the target accepted",
        "accepted_per_position": "rounds that accepted the draft token at each position",
        "num_target_only_steps": "rounds without a draft",
        "ttft_s": "seconds from arrival to the first token, of the slowest output",
        "e2el_s": "seconds from arrival to the last token, of the slowest output",
        "draft_s": "seconds in which rounds waited for drafts",
        "verify_s": "seconds in which rounds waited for verifications",
        "wire_bytes": "bytes between coordinator, draft and target",
    },
    "token": {
        "token_id": "id of the token",
        "text": "text that the token completed",
        "source": "`accepted`, `corrected`, `bonus` or `target` ([meaning](../how-to/playground.md#read-the-output))",
        "p": "the target's probability after the sampling filters",
        "q": "the draft's probability; 0 without a draft token",
        "draft_pool": "pool that drafted",
    },
    "round": {
        "index": "index in the output of the round's first token",
        "num_tokens": "tokens that the round gave",
        "num_draft_tokens": "draft tokens that were verified",
        "num_accepted_tokens": "draft tokens that were accepted",
    },
    "session": {
        "id": "id of the session",
        "object": "`session`",
        "status": "`running` or `idle`",
        "num_tokens": "tokens of the session, prompts included",
        "turn": "number of its last turn, from 0",
        "expires_in_s": "seconds until it expires if nothing continues it",
        "stats": "counters and times of its last turn",
    },
}
