"""The gRPC page: services, messages and enums, from the descriptors with the comments of the protocol files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.v1 import common_pb2, coordinator_pb2, draft_pb2, target_pb2
from tools.reference.markdown import code, document, item, items, paragraph, sentence
from tools.reference.proto_comments import read_comments

_PUBLIC = coordinator_pb2.DESCRIPTOR
_INTERNAL = (draft_pb2.DESCRIPTOR, target_pb2.DESCRIPTOR, common_pb2.DESCRIPTOR)
_TYPES = {
    1: "double", 2: "float", 4: "uint64", 5: "int32", 6: "fixed64", 8: "bool", 9: "string", 12: "bytes", 13: "uint32",
}  # fmt: skip

_INTRODUCTION = """Clients call `specdec.v1.CoordinatorService` only. The protocol files are in `protos/specdec/v1`.
Every service also has `grpc.health.v1` and server reflection. Errors are on the [errors](errors.md) page."""
_INTERNAL_TEXT = """Coordinators call these services. They may change between versions; [protocol](../protocol.md) is
their specification."""


def page() -> str:
    """Return the page as it should be."""
    blocks = [paragraph(_INTRODUCTION), "## Public service", *_file(_PUBLIC)]
    blocks += ["## Internal services", paragraph(_INTERNAL_TEXT)]
    for descriptor in _INTERNAL:
        blocks += _file(descriptor)
    return document("gRPC API", *blocks)


def _file(descriptor: Any) -> list[str]:
    comments = read_comments(descriptor.name)
    blocks: list[str] = []
    for service in descriptor.services_by_name.values():
        blocks.append(f"### {service.name}")
        blocks += _comment(comments, service.name)
        blocks.append(items([_method(method, comments) for method in service.methods]))
    for message in _in_file_order(descriptor.message_types_by_name.values(), comments):
        blocks.append(f"### {message.name}")
        blocks += _comment(comments, message.name)
        fields = [_field(field, comments) for field in message.fields]
        blocks.append(items(fields) if fields else "No fields.")
    for enum in _in_file_order(descriptor.enum_types_by_name.values(), comments):
        blocks.append(f"### {enum.name}")
        blocks += _comment(comments, enum.name)
        values = [(value, comments.get(f"{enum.name}.{value.name}", "")) for value in enum.values]
        blocks.append(items([item(f"{code(value.name)} ({value.number})", text) for value, text in values]))
    return blocks


def _in_file_order(found: Iterable[Any], comments: dict[str, str]) -> list[Any]:
    order = list(comments)
    return sorted(found, key=lambda each: order.index(each.name))


def _comment(comments: dict[str, str], name: str) -> list[str]:
    return [paragraph(comments[name])] if comments.get(name) else []


def _method(method: Any, comments: dict[str, str]) -> str:
    asked = ("stream " if method.client_streaming else "") + method.input_type.name
    answered = ("stream " if method.server_streaming else "") + method.output_type.name
    name = f"{method.containing_service.name}.{method.name}"
    return item(code(f"{method.name}({asked}) returns ({answered})"), comments.get(name, ""))


def _field(field: Any, comments: dict[str, str]) -> str:
    notes = [code(_type(field)), str(field.number)]
    oneof = field.containing_oneof
    if oneof is not None and not oneof.name.startswith("_"):
        notes.append(f"one of {code(oneof.name)}")
    text = comments.get(f"{field.containing_type.name}.{field.name}", "")
    return item(f"{code(field.name)} ({', '.join(notes)})", sentence(text) if text else "")


def _type(field: Any) -> str:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return f"map<{_name(message.fields_by_name['key'])}, {_name(message.fields_by_name['value'])}>"
    oneof = field.containing_oneof
    label = "repeated " if field.is_repeated else ""
    return ("optional " if oneof is not None and oneof.name.startswith("_") else label) + _name(field)


def _name(field: Any) -> str:
    if field.message_type is not None:
        return str(field.message_type.name)
    return str(field.enum_type.name) if field.enum_type is not None else _TYPES[field.type]
