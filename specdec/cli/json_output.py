"""The `--json` flag of subcommands, and the object that they print with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any


def add_json_flag(parser: argparse.ArgumentParser, instead_of: str) -> None:
    """Add `--json`. `command_parser` prints errors as JSON objects too then."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON object instead of {instead_of}")


def print_json(fields: Mapping[str, Any]) -> None:
    """Print a JSON object on one line."""
    print(json.dumps(fields, ensure_ascii=False), flush=True)
