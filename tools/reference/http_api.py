"""The HTTP page: routes, headers, fields, answers, streams and errors of the gateway, from its application."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import openai

from gateway.app import build_app
from gateway.auth import ApiKeys
from gateway.bodies import MAX_DEPTH
from gateway.context import Gateway
from gateway.http_errors import anthropic_error_object, code_of, error_headers, error_object, status_of, type_of
from gateway.metrics import GatewayMetrics
from gateway.middleware import _GUARDED
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.foreign_fields import CARRIERS
from gateway.schemas.messages import CountTokensRequest, MessagesRequest
from gateway.schemas.responses import ResponseRequest
from gateway.upstream import Upstream
from specdec.contract.errors import InvalidRequest, SpecdecError
from specdec.contract.types import RECOMMENDED_FILTERS
from specdec.settings.gateway import GatewaySettings
from specdec.state.stored_responses import RedisResponses
from tools.reference import errors, http_examples, http_text
from tools.reference.http_examples import SentEvent, shown
from tools.reference.http_fields import Body, field_items, refusal_items, refusals, shared_names
from tools.reference.markdown import code, document, item, items, paragraph, sentence

_MESSAGES = [{"role": "user", "content": "x"}]
#: Requests of the routes that generate.
_BODIES = {
    "/v1/chat/completions": Body(ChatRequest, {"messages": _MESSAGES}),
    "/v1/completions": Body(CompletionRequest, {"prompt": "x"}),
    "/v1/responses": Body(ResponseRequest, {"input": "x"}),
    "/v1/messages": Body(MessagesRequest, {"messages": _MESSAGES, "max_tokens": 1}),
}
_SESSION = "/v1/sessions/{session_id}"
_COUNT_TOKENS = "/v1/messages/count_tokens"

#: Reasons that no HTTP answer has: they stay within the system, or belong to other programs.
_INNER_REASONS = {
    "ADDRESS_IN_USE", "CLIENT_CLOSED", "KV_MISS", "REPLICA_BUSY", "STALE_EPOCH", "VOCABULARY_MISMATCH",
}  # fmt: skip
#: Status of the reasons that have another one than their class.
_STATUS_BY_REASON = {"REQUEST_TOO_LARGE": 413, "METHOD_NOT_ALLOWED": 405}
_METHOD_NOT_ALLOWED = "The path has other methods; `Allow` lists them."


def page() -> str:
    """Return the page as it should be."""
    api = api_document()
    blocks = [paragraph(http_text.INTRODUCTION), *_bodies()]
    blocks += ["## Routes", *map(paragraph, http_text.ROUTES), _routes(api["paths"])]
    blocks += ["## Headers", *_headers(), "## Request fields", *_request_fields(api)]
    blocks += ["## Answers", *_answers(), "## Streams", *_streams()]
    blocks += ["## Resume a stream", *map(paragraph, http_text.RESUME), "## Errors", *_errors(api)]
    return document("HTTP API", *blocks)


def api_document() -> dict[str, Any]:
    """Return the OpenAPI document of a gateway that is not started."""
    settings = GatewaySettings(coordinator=("127.0.0.1:1",), redis_url="memory://")
    parts = (Upstream(settings), ApiKeys(), GatewayMetrics(), RedisResponses(settings.redis_url))
    return build_app(Gateway(settings, *parts)).openapi()


def _bodies() -> Iterator[str]:
    carriers = ", ".join(map(code, CARRIERS[:-1])) + f" or {code(CARRIERS[-1])}"
    for text in http_text.BODIES:
        yield paragraph(
            text.format(max_depth=MAX_DEPTH, max_digits=f"{sys.get_int_max_str_digits():,}", carriers=carriers)
        )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _routes(paths: Mapping[str, Any]) -> str:
    rows = []
    for path, methods in paths.items():
        for method, operation in methods.items():
            text = operation["description"].partition("\n\n")[0]
            needs_key = "yes" if path.startswith(_GUARDED) else ""
            rows.append(
                (code(f"{method.upper()} {path.replace(':path', '')}"), sentence(text).removesuffix("."), needs_key)
            )
    rows += [(code(route), text, "") for route, text in http_text.OTHER_ROUTES.items()]
    return _table(("Route", "What it does", "Key"), rows)


def _headers() -> Iterator[str]:
    retried = [code(code_of(reason)) for each, reason in _reasons() if "retry-after" in error_headers(each(""))]
    yield "Of requests:"
    yield items([item(code(name), text) for name, text in http_text.REQUEST_HEADERS.items()])
    yield "Of answers:"
    yield items(
        [item(code(name), text.format(retried=", ".join(retried))) for name, text in http_text.ANSWER_HEADERS.items()]
    )


def _request_fields(api: Mapping[str, Any]) -> Iterator[str]:
    schemas = api["components"]["schemas"]
    shared = shared_names([*_BODIES.values()], schemas)
    told = [refusals(body, shared, schemas[body.model.__name__]) for body in _BODIES.values()]
    taken = [name for name in shared if not all(name in each for each in told)]
    refused = {name: told[0][name] for name in told[0] if all(each.get(name) == told[0][name] for each in told)}
    yield "### Fields of every route that generates"
    yield paragraph(http_text.SHARED)
    yield items([*field_items(schemas[ChatRequest.__name__], schemas, taken)])
    yield paragraph(http_text.DEFAULTS.format(names=", ".join(map(code, RECOMMENDED_FILTERS))))
    yield paragraph(http_text.REFUSED)
    yield items(refusal_items(refused))
    yield paragraph(http_text.PATHS)
    yield paragraph(http_text.LIMIT)
    for path, body in _BODIES.items():
        yield f"### POST {path}"
        yield from _own_fields(body, schemas, shared=taken, refused=refused)
    yield f"### POST {_COUNT_TOKENS}"
    yield from _own_fields(Body(CountTokensRequest, {"messages": _MESSAGES}), schemas)
    for path in ("/tokenize", "/detokenize"):
        own = _schema_of(api, path)
        yield f"### POST {path}"
        yield items([*field_items(own, schemas, [*own["properties"]])])
    yield f"### GET {_SESSION}"
    yield paragraph(http_text.SESSION)
    parameters = {each["name"]: each["schema"] for each in _query_parameters(api, _SESSION)}
    yield items([*field_items({"properties": parameters}, schemas, [*parameters])])


def _own_fields(
    body: Body, schemas: Mapping[str, Any], *, shared: Iterable[str] = (), refused: Iterable[str] = ()
) -> Iterator[str]:
    """Yield the fields and the refusals of a route beside those that it shares with others."""
    schema = schemas[body.model.__name__]
    names = [name for name in schema["properties"] if name not in {*refused}]
    own = refusals(body, names, schema)
    yield items([*field_items(schema, schemas, [name for name in names if name not in {*shared, *own}])])
    if own:
        yield http_text.REFUSED_HERE
        yield items(refusal_items(own))


def _schema_of(api: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    content = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    found: Mapping[str, Any] = api["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    return found


def _query_parameters(api: Mapping[str, Any], path: str) -> list[Mapping[str, Any]]:
    return [each for each in api["paths"][path]["get"]["parameters"] if each["in"] == "query"]


def _answers() -> Iterator[str]:
    answer = http_examples.chat_answer()
    provenance = answer["choices"][0]["specdec"]
    yield paragraph(http_text.ANSWER)
    yield _json(answer)
    yield paragraph(http_text.METRICS)
    yield _meanings("metrics", answer["metrics"]["speculative_decoding"])
    yield paragraph(http_text.STATISTICS)
    yield _meanings("statistics", answer["metrics"]["specdec"])
    yield paragraph(http_text.PROVENANCE)
    yield _meanings("token", provenance["tokens"][0])
    yield "Of a round:"
    yield _meanings("round", http_examples.chat_chunk()["specdec"]["round"])
    for title, example in (
        ("A choice of `/v1/completions` has `text` in place of `message`:", http_examples.completion_choice()),
        ("`/v1/responses`:", http_examples.response_answer()),
        ("`/v1/messages`:", http_examples.message_answer()),
        ("`/v1/models/{model}`:", http_examples.model_answer()),
    ):
        yield title
        yield _json(example)
    yield "The record of `/v1/sessions/{session_id}`:"
    yield _meanings("session", http_examples.session_answer())
    yield "Short answers:"
    yield items([item(code(route), text) for route, text in http_text.SHORT_ANSWERS.items()])


def _streams() -> Iterator[str]:
    yield paragraph(http_text.STREAMS)
    yield "### Chat and text completions"
    yield paragraph(http_text.CHUNKS)
    yield _json(http_examples.chat_chunk())
    yield paragraph("A chunk of `/v1/completions`:")
    yield _json(http_examples.completion_chunk())
    yield "### Responses"
    yield items([*_event_items(http_examples.response_events())])
    yield paragraph(http_text.RESPONSE_END)
    yield "### Messages"
    yield items([*_event_items(http_examples.message_events())])


def _event_items(events: Iterable[SentEvent]) -> Iterator[str]:
    for event in events:
        names = [code(name) for name in event.data if name != "type"]
        yield item(code(event.name), ", ".join(names))


def _errors(api: Mapping[str, Any]) -> Iterator[str]:
    example = InvalidRequest("sampling.top_p must be in (0, 1], got 2", field="sampling.top_p")
    described = {int(status): text for status, text in _described_statuses(api).items()} | {405: _METHOD_NOT_ALLOWED}
    codes: dict[int, list[str]] = {status: [] for status in sorted(described)}
    for each, reason in _reasons():
        if code(code_of(reason)) not in codes[_status(each, reason)]:
            codes[_status(each, reason)].append(code(code_of(reason)))
    for status in (408, 415):
        codes[status].append(code(example.reason.lower()))
    yield paragraph(http_text.ERRORS)
    yield _json(error_object(example))
    heads = ("Status", "`type`", "`type` of `/v1/messages`", "Class of OpenAI's client")
    yield _table(heads, [_error_row(status) for status in codes])
    yield items([item(" ".join([str(status), *([f"({', '.join(codes[status])})"] if codes[status] else [])]), text)
                 for status, text in sorted(described.items())])  # fmt: skip
    yield from map(paragraph, http_text.ERROR_ENDS)


def _described_statuses(api: Mapping[str, Any]) -> dict[str, str]:
    answers = api["paths"]["/v1/chat/completions"]["post"]["responses"]
    # 422 is the framework's; the gateway answers 400 instead.
    return {status: answer["description"] for status, answer in answers.items() if status not in ("200", "422")}


def _error_row(status: int) -> tuple[str, str, str, str]:
    kind = anthropic_error_object(InvalidRequest(""), status)["error"]["type"]
    return str(status), code(type_of(status)), code(kind), code(_client_class(status))


def _client_class(status: int) -> str:
    """Return the name of the class that OpenAI's client raises for a status."""
    for each in openai.APIStatusError.__subclasses__():
        if getattr(each, "status_code", None) == status:
            return each.__name__
    return (openai.InternalServerError if status >= 500 else openai.APIStatusError).__name__


def _reasons() -> list[tuple[type[SpecdecError], str]]:
    """Return the class and the reason of every error that an HTTP answer may have."""
    return [
        (each, reason)
        for each in errors.error_classes()
        for reason in errors._reasons_of(each)
        if reason not in _INNER_REASONS
    ]


def _status(each: type[SpecdecError], reason: str) -> int:
    return _STATUS_BY_REASON.get(reason, status_of(each("")))


def _meanings(name: str, example: Mapping[str, Any]) -> str:
    """Return an item for each field of an example, with its meaning. Raises KeyError for a field without one."""
    texts = http_text.MEANINGS[name]
    return items([item(code(field), texts[field]) for field in example])


def _json(value: Any) -> str:
    return f"```json\n{shown(value)}\n```"
