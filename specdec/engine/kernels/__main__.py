"""Compile the kernels for a container image: `python -m specdec.engine.kernels DIRECTORY`. Called by Dockerfiles."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specdec.engine.kernels.prebuilt import prebuild
from specdec.errors import SpecdecError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specdec.engine.kernels",
        description="Compile the kernels for each kind of processor that images support, and print the library paths.",
    )
    parser.add_argument("directory", type=Path, help="directory for the libraries; created if it does not exist")
    try:
        paths = prebuild(parser.parse_args(arguments).directory)
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
