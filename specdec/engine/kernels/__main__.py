"""Compile the kernels before a replica starts: `python -m specdec.engine.kernels DIRECTORY`. Called by Dockerfiles.

`--prebuild` compiles them for this machine alone, where its replicas look for them; `make setup` calls it. `--load`
loads the kernels as a replica does at its start, which `specdec doctor` checks.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from specdec.checkpoints.artifact_cache import cache_directory
from specdec.contract.errors import SpecdecError
from specdec.engine.kernels.compiler import prebuild, prebuild_for_this_machine
from specdec.engine.kernels.library import load_library


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m specdec.engine.kernels",
        description="Compile the kernels for each kind of processor that images support, and print the library paths.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "directory", nargs="?", type=Path, help="directory for the libraries; created if it does not exist"
    )
    what.add_argument("--prebuild", action="store_true", help="compile for this machine, into specdec's folder")
    what.add_argument("--load", action="store_true", help="load the kernels of this machine from the user's cache")
    args = parser.parse_args(arguments)
    try:
        if args.load:
            paths = [Path(load_library(cache_directory(os.environ) / "compiled")._name)]
        elif args.prebuild:
            paths = prebuild_for_this_machine()
        else:
            paths = prebuild(args.directory)
    except (SpecdecError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
