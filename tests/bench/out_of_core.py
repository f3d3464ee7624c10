#!/usr/bin/env python3
"""Measures what the NVMe tier saves: peak private memory (RssAnon + RssShmem, sampled every 3 ms)
of the same training with the optimizer state in host memory and on NVMe, on a random model of 206
million parameters.

    tests/bench/out_of_core.py [--steps N]

Prints a JSON object. `saved_share` is the difference over 12 bytes per parameter.
"""
import argparse
import json
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    os.chdir(t.ROOT)
    result = {"schema": 1, "steps": steps, "peak_private_bytes": {}}
    with t.folder("bench-") as tmp:
        t.spillway("init", "--config", "tests/bench/model200m.json", "--seed", 1, "--out",
                   tmp + "/model", rc=0)
        for tier in ("host", "nvme"):
            run = t.train(f"{tmp}/{tier}", "--optimizer", tier, "--steps", steps, "--seq-len", 64,
                          model=tmp + "/model", sample=True, timeout_s=900)
            t.equal(run.rc, 0, tier, run)
            result["peak_private_bytes"][tier] = run.peak_private_bytes
            result["parameters"] = int(re.search(r"^(\d+) parameters", run.stdout, re.M).group(1))
    peaks = result["peak_private_bytes"]
    result["saved_share"] = (peaks["host"] - peaks["nvme"]) / (12 * result["parameters"])
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
