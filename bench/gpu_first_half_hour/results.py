"""The results folder of the first half hour on a GPU: one JSON or text file per step."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch


def results_folder() -> Path:
    """Return the folder that the command line names; create it if it is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def device_name() -> str:
    """Return the GPU's name, or the CPU's, on which a step only shows that it runs and its numbers mean nothing."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def write(folder: Path, name: str, found: object) -> None:
    """Write `found` as JSON and print it."""
    text = json.dumps(found, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    print(text)


def run_into(folder: Path, name: str, *command: str) -> int:
    """Run a Python module, print and keep its output, and return its exit status."""
    with (folder / f"{name}.txt").open("w") as kept:
        child = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            kept.write(line)
        return child.wait()
