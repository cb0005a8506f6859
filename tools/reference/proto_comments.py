"""The comments of the protocol files, by the name of what they describe: generated descriptors do not carry them."""

from __future__ import annotations

import re
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[2] / "protos"
_BLOCK = re.compile(r"^(service|message|enum|oneof)\s+(?P<name>\w+)\s*\{")
_RPC = re.compile(r"^rpc\s+(?P<name>\w+)")
_FIELD = re.compile(r"^[\w.<>, ]*?\b(?P<name>\w+)\s*=\s*\d+\s*;")


def read_comments(file_name: str) -> dict[str, str]:
    """Return the comment of every service, method, message, field, enum and enum value of a file.

    Args:
        file_name: path of the file relative to `protos`, as descriptors name it.

    Returns:
        Comments by the full name without the package, such as `SamplingParams.seed`. A oneof is not part of the name.
    """
    comments: dict[str, str] = {}
    above: list[str] = []
    blocks: list[str] = []
    for line in (PROTOS / file_name).read_text(encoding="utf-8").splitlines():
        text, _, beside = (part.strip() for part in line.partition("//"))
        if not text:
            above = [*above, beside] if beside else []
            continue
        name = _name(text)
        scope = [block for block in blocks if block]
        if name and not text.startswith("oneof"):
            comments[".".join([*scope, name])] = " ".join([*above, beside] if beside else above)
        above = []
        if block := _BLOCK.match(text):
            blocks.append("" if text.startswith("oneof") else block["name"])
        for _ in range(text.count("}")):
            blocks.pop()
    return comments


def _name(text: str) -> str:
    for pattern in (_BLOCK, _RPC, _FIELD):
        if found := pattern.match(text):
            return found["name"]
    return ""
