"""A `g++` on the PATH that compiles the native kernels once for all processes of the tests.

Most tests load models without a cache directory, so that each of their processes would compile for ten seconds. As a
program, `kept_compiler.py COMPILER FOLDER ARGUMENTS...`, it copies the library that the same compilation made before.
Called by `tests.conftest`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def keep_compilations(folder: Path) -> None:
    """Put the `g++` that keeps libraries in `folder` first on the PATH, for this process and those that it starts."""
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or Path(compiler).parent == folder:
        return
    folder.mkdir(parents=True, exist_ok=True)
    kept = f'exec {sys.executable} -IS {Path(__file__).resolve()} {compiler} {folder} "$@"'
    program = f'#!/bin/sh\ncase "$*" in *kernels/step.cpp*) {kept};; *) exec {compiler} "$@";; esac\n'
    part = folder / f"g++.{os.getpid()}"
    part.write_text(program)
    part.chmod(0o755)
    part.rename(folder / "g++")
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def main(compiler: str, folder: str, *arguments: str) -> int:
    output = Path(arguments[arguments.index("-o") + 1])
    (source,) = (Path(argument) for argument in arguments if argument.endswith("step.cpp"))
    others = [argument for argument in arguments if argument not in (str(output), str(source))]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    processor = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")}
    digest = hashlib.sha256("\0".join((*others, *processor)).encode() + version)
    for path in sorted(source.parent.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    library = Path(folder, f"{digest.hexdigest()[:16]}.so")
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            done = subprocess.run([compiler, *arguments], check=False)
            if done.returncode:
                return done.returncode
            shutil.copy(output, library.with_suffix(".part"))
            library.with_suffix(".part").rename(library)
    shutil.copy(library, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
