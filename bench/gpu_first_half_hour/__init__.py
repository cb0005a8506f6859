"""What to run when a GPU is at hand for half an hour: one command a step, each writing into the folder it is given.

    for step in 1_versions 2_tests 3_rows 4_engine 5_kernels 6_one_stream 7_drafts; do
        python -m bench.gpu_first_half_hour.step$step results
    done

Without a device steps 1, 3, 5 and 7 run small, 2 skips its tests, and 4 and 6 measure nothing.
"""
