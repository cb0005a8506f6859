"""Where the steps of the first half hour on a GPU leave what they found: one JSON or text file each, in one folder."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch


def results_folder() -> Path:
    """The folder that the command line names, made where it is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def device_name() -> str:
    """A GPU where there is one: elsewhere a step shows that it runs, and its figures say nothing."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def write(folder: Path, name: str, found: object) -> None:
    """Writes `found` as JSON and shows it."""
    text = json.dumps(found, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    print(text)


def run_into(folder: Path, name: str, *command: str) -> int:
    """Runs a Python module, showing what it says and keeping it; its exit status."""
    with (folder / f"{name}.txt").open("w") as kept:
        child = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            kept.write(line)
        return child.wait()
