#!/usr/bin/env python3
"""Private memory over 1,000 steps and 100 saves (STEPS=N: N steps, a save every tenth).

Reads the process's anonymous pages (smaps_rollup) while a small model trains, and compares the
median of every 50 steps from step 50 on: all lie within 1% of one another, with the optimizer on
NVMe, in memory and on the device. The guard stops the run at an allocation inside
a step.
"""
import os
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

STEPS = int(os.environ.get("STEPS", "1000"))
WINDOW = 50


def last_step(log):
    """The last whole line's step, or 0."""
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 4096))
    lines = log.read().split(b"\n")
    for line in reversed(lines[:-1]):
        if line.startswith(b'{"step":'):
            return int(line[len(b'{"step":'):line.index(b",")])
    return 0


def private_bytes(pid):
    """Anonymous pages. Those of files, private or not, come and go with the page cache."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Anonymous:"):
                return int(line.split()[1]) * 1024
    return 0


def watch(process, path):
    """{window: [bytes]} of the samples taken."""
    windows = {}
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as log:
        while True:
            try:
                now = private_bytes(process.pid)
            except (FileNotFoundError, ProcessLookupError):
                break
            if not now:  # a zombie has none
                break
            windows.setdefault(last_step(log) // WINDOW, []).append(now)
            time.sleep(0.005)
    return windows


@t.test
def memory_is_flat_over_a_long_run():
    for tier in ("nvme", "host", "device"):
        with t.folder("flat-") as tmp:
            log = tmp + "/log"
            process = t.Process(
                ["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin", "--out",
                 tmp + "/out", "--steps", STEPS, "--save-every", 10, "--seq-len", 64,
                 "--optimizer", tier, "--log", log],
                env={} if t.SANITIZED else {"SPILLWAY_ALLOC_GUARD": "stop"})
            windows = watch(process, os.path.join(t.ROOT, log))
            run = process.finish(timeout_s=600)
            t.equal(run.rc, 0, tier, run)
            _, events = t.read_log(os.path.join(t.ROOT, log))
            saves = [o for o in events if o["event"] == "saved"]
            t.equal(len(saves), STEPS // 10, f"{tier}: saves", run)
            # The last window is the end of the run: its final save, and memory given back.
            medians = {w: statistics.median(samples) for w, samples in sorted(windows.items())
                       if 1 <= w < STEPS // WINDOW}
            t.check(len(medians) >= STEPS // WINDOW - 2, f"{tier}: only {len(medians)} windows")
            low, high = min(medians.values()), max(medians.values())
            first, last = medians[min(medians)], medians[max(medians)]
            print(f"{tier}: {low / 1e6:.2f} to {high / 1e6:.2f} MB of private memory, "
                  f"{first / 1e6:.2f} first, {last / 1e6:.2f} last", flush=True)
            t.check(high <= 1.01 * low, f"{tier}: from {low} to {high} bytes: {medians}", run)


if __name__ == "__main__":
    t.main()
