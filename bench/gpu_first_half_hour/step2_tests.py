"""Minutes 2 to 6: the tests that need a device. Run a failed test again under `compute-sanitizer`."""

import sys

from bench.gpu_first_half_hour.results import results_folder, run_into

if __name__ == "__main__":
    sys.exit(
        run_into(
            results_folder(), "step2_tests", "pytest", "tests/gpu", "-m", "gpu", "-s", "-q", "-p", "no:cacheprovider"
        )
    )
