"""Compiles the kernels for an image: `python -m specdec.engine.kernels DIRECTORY`. Called by Dockerfiles."""

from __future__ import annotations

import sys
from pathlib import Path

from specdec.engine.kernels.prebuilt import prebuild
from specdec.errors import SpecdecError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m specdec.engine.kernels DIRECTORY", file=sys.stderr)
        return 2
    try:
        paths = prebuild(Path(arguments[0]))
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
