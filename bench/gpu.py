"""Suite `gpu`: our engine and the whole stack on one CUDA device. Without one it says so and gives no row.

Not here yet: the measurements themselves; nothing is estimated for a device that is not there.
"""

import argparse
import sys

from bench.rows import Row

SUITE = "gpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beyond what every suite takes."""


def run(arguments: argparse.Namespace) -> list[Row]:
    """Returns no row where there is no CUDA device.

    Raises:
        NotImplementedError: there is one.
    """
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing is measured and no row is written", file=sys.stderr)
        return []
    raise NotImplementedError("the suite for a CUDA device is not written yet")
