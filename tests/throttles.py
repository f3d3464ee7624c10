#!/usr/bin/env python3
"""Another machine's clock: lanes held to rates change no bit, take the time that the bytes need,
and a run that leaves computation out says so and leaves no model."""
import os
import re
import signal

import support as t

COMMON = ("--optimizer", "nvme", "--seq-len", 64, "--steps", 3)
RATES = ("--sim-pcie", "200M,100M", "--sim-nvme", "50M,40M", "--sim-adam", "300M")


def digest(run):
    return re.findall(r"^digest: .*$", run.stdout, re.M)


@t.test
def throttled_lanes_change_no_bit_and_are_never_faster():
    with t.folder() as tmp:
        plain = t.train(f"{tmp}/plain", *COMMON, "--digest", rc=0)
        slow = t.train(f"{tmp}/slow", *COMMON, *RATES, "--digest", "--log", f"{tmp}/log", rc=0)
        t.equal(digest(slow), digest(plain), "bits", slow)
        t.check(digest(plain), "no digest", plain)
        steps, others = t.read_log(f"{tmp}/log")
        state = 12 * 262144  # at least: the records of 260k parameters
        for step in steps[1:]:
            t.check(step["lane_busy_s"]["nvme_write"] >= 0.9 * state / 40e6,
                    f"step {step['step']} wrote faster than 40 MB/s: {step}", slow)
        options = others[0]["options"]
        t.equal(options["sim_pcie"], [200000000, 100000000], "in the log")
        t.equal(options["sim_adam"], 300000000, "in the log")
        t.equal(options["sim_flops"], None, "in the log")


@t.test
def what_ranks_send_is_held_to_a_rate():
    with t.folder() as tmp:
        common = (*COMMON, "--ranks", 2, "--device-threads", 1, "--digest")
        plain = t.train(f"{tmp}/plain", *common, rc=0)
        slow = t.train(f"{tmp}/slow", *common, "--sim-comm", "20M", "--log", f"{tmp}/log", rc=0)
        t.equal(digest(slow), digest(plain), "bits", slow)
        for step in t.read_log(f"{tmp}/log")[0]:  # all ranks' bytes, and the slowest rank's time
            least_s = step["bytes"]["comm"] / 2 / 20e6
            t.check(step["lane_busy_s"]["comm"] >= 0.9 * least_s, f"faster than its rate: {step}")
        run = t.train(f"{tmp}/one", *COMMON, "--sim-comm", "20M", rc=2)
        t.contains(run.stderr, "no effect with one rank", "one rank", run)


@t.test
def one_rate_stands_for_both_directions():
    with t.folder() as tmp:
        run = t.train(f"{tmp}/out", *COMMON, "--sim-nvme", "60M", "--dry-run", rc=0)
        t.check(re.search(r"^  sim-nvme +60000000,60000000$", run.stdout, re.M), "options", run)


@t.test
def without_computation_nothing_is_trained_and_no_model_is_left():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        run = t.train(out, *COMMON, "--sim-flops", "100G", rc=0)
        t.contains(run.stdout, "nothing was trained (--sim-flops)", "the end", run)
        t.check(not os.path.exists(out) or not os.listdir(out), "something is left", run)
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", out, *COMMON[:-2], "--steps", 100000, "--max-skips", 100000,
                             "--sim-flops", "100G"])  # memory that nobody computed may hold NaN
        process.wait_for(r"^step 1/")
        process.signal(signal.SIGINT)
        stopped = process.finish()
        t.equal(stopped.rc, 130, "exit status", stopped)
        t.contains(stopped.stdout, "nothing was trained", "the end", stopped)
        t.contains(stopped.stderr, "finishing the step; nothing is saved (--sim-flops)",
                   "what is said at once", stopped)
        t.check(not os.path.exists(out) or not os.listdir(out), "something is left", stopped)


@t.test
def a_real_run_never_goes_on_from_one_that_computed_nothing():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        killed = t.train(out, *COMMON, "--sim-flops", "100G", rc=-signal.SIGKILL,
                         env=t.kill_at("pwrite:.commit:3:before"))
        refused = t.train(out, *COMMON, "--resume", rc=1)
        t.contains(refused.stderr, "--sim-flops", "what differs", killed)


@t.test
def rates_without_effect_or_sense_are_refused():
    with t.folder() as tmp:
        for args, words in ((("--sim-nvme", "1G"), ("placement on nvme",)),
                            (("--sim-adam", "1G", "--optimizer", "device"), ("--sim-adam",)),
                            (("--sim-flops", "1T", "--save-every", "1"), ("--sim-flops",)),
                            (("--sim-flops", "1T", "--digest"), ("--sim-flops",)),
                            (("--sim-pcie", "fast"), ("--sim-pcie", "fast")),
                            (("--sim-pcie", "1G,"), ("--sim-pcie",)),
                            (("--sim-pcie", "1G,2G,3G"), ("--sim-pcie",)),
                            (("--sim-pcie", "0"), ("--sim-pcie",)),
                            (("--sim-flops", "1G,2G"), ("--sim-flops",))):
            run = t.train(f"{tmp}/out", *args, rc=2)
            for word in words:
                t.contains(run.stderr, word, f"{args}", run)


if __name__ == "__main__":
    t.main()
