"""Minutes 10 to 22: steps of target and draft relative to their floor, and one layer's attention (suite `gpu`)."""

import sys

from bench.gpu_first_half_hour.results import results_folder, run_into

if __name__ == "__main__":
    folder = results_folder()
    sys.exit(
        run_into(folder, "step4_engine", "bench", "gpu", "--rows", "attention", "engine", "--quick",
                 "--json", str(folder / "step4_engine.json"))
    )  # fmt: skip
