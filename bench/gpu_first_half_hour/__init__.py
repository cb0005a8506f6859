"""Checks to run on a GPU that is available for half an hour: one command per step, each writing into a given folder.

    for step in 1_versions 2_tests 3_rows 4_engine 5_kernels 6_one_stream 7_drafts; do
        python -m bench.gpu_first_half_hour.step$step results
    done

Without a device steps 1, 3, 5 and 7 run small, step 2 skips its tests, and steps 4 and 6 measure nothing.
"""
