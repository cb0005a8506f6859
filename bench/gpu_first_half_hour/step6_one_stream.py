"""Minutes 22 to 28: one stream through all three services, target-only, and Hugging Face's assisted generation."""

import sys

from bench.gpu_first_half_hour.results import results_folder, run_into

if __name__ == "__main__":
    folder = results_folder()
    sys.exit(
        run_into(folder, "step6_one_stream", "bench", "gpu", "--rows", "one_stream", "--quick",
                 "--json", str(folder / "step6_one_stream.json"))
    )  # fmt: skip
