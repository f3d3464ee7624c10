#!/usr/bin/env python3
"""The tests of the CUDA device once more, with the CPU stand-in in its other moods.

Threads in reverse and in random order, with strict rules of who may miss a barrier; one warp as far
as it can go before the next; cp.async at once; device memory that the host cannot touch; other
seeds of late streams. Results are the same, or a kernel relies on what nobody promises.
"""
import os
import subprocess

import support as t

CONFIG = os.environ.get("CONFIG") or "release"
FOLDER = os.path.join("build", CONFIG, "tests")
PROGRAMS = ["test_cuda_operators", "test_cuda_attention", "test_cuda_adam"]
MODES = {
    "reverse": {"STANDIN_SCHED": "rev", "STANDIN_STRICT": "1", "STANDIN_STREAMS": "late:1"},
    "random": {"STANDIN_SCHED": "rand:1", "STANDIN_STRICT": "1", "STANDIN_STREAMS": "late:2"},
    "random, early copies": {"STANDIN_SCHED": "rand:2", "STANDIN_COPY": "early"},
    "warps ahead, early copies": {"STANDIN_SCHED": "ahead", "STANDIN_COPY": "early"},
    "guarded": {"STANDIN_GUARD": "1", "STANDIN_STREAMS": "late:3"},
}
if t.SANITIZED:  # each test takes long, and the sanitizers have seen the order that is usual
    MODES = {"reverse": MODES["reverse"]}
    PROGRAMS = ["test_cuda_adam"]


@t.test
def every_mood_gives_the_same_results():
    for name, settings in MODES.items():
        for program in PROGRAMS:
            run = subprocess.run([os.path.join(FOLDER, program)], env={**os.environ, **settings},
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 timeout=140, check=False)
            t.check(run.returncode == 0, f"{program}, {name}: {run.stdout[-3000:]}")
            t.check("[  SKIPPED ]" not in run.stdout, f"{program}, {name} skips: {run.stdout}")


if __name__ == "__main__":
    t.main()
