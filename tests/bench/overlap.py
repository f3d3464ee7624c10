#!/usr/bin/env python3
"""Measures the overlap modes: step times of none, forward and backward (clip 0) in interleaved
rounds on a random model of 206 million parameters with its state on NVMe.

    tests/bench/overlap.py [--rounds 5] [--steps 4] [--seq-len T] [--commit-every N]
                           [--drive-limit BYTES_PER_S] [--device-threads N] [--threads N]

With --drive-limit the kernel holds the drive to that rate, reading and writing each (control group
blkio or io; needs root): where disk and compute share a few cores and one slow memory, they are
independent resources only while the disk does not saturate those. Without --seq-len the rows'
length is chosen so that compute and NVMe time of a serial step are as close as possible. From the
traces:

  compute, update  the serial step's compute time, and the span of its update phase
  bound of forward design's: backward + max(forward, what the update needs beyond what its slots
                   hold)
  bound of backward  the larger of two steps of the same program: with the tasks of compute and Adam
                   ending at once, and with those of NVMe (null_lanes.c; make bench-tools)
  together         time with a compute and an NVMe task running at the same instant, over the busy
                   time of the shorter one

How much of this a machine admits at all, tests/bench/cores_beside_drive.c measures: arithmetic that
touches no memory beside a store that moves bytes, and nothing else.

The first step is left out: its chunks are virgin and nothing is read. Prints a JSON object.
"""
import argparse
import json
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

SEQ_STEP = 8
NULL_LANES = f"{t.ROOT}/build/release/tests/bench/null_lanes"


def limit_drive(rate):
    """Puts this process, and so every run, into a control group with a limit on the drive below the
    repository."""
    device = os.stat(t.ROOT).st_dev
    drive = f"{os.major(device)}:{os.minor(device)}"
    if os.path.isdir("/sys/fs/cgroup/blkio"):
        group = "/sys/fs/cgroup/blkio/spillway-bench"
        limits = {"blkio.throttle.read_bps_device": f"{drive} {rate}",
                  "blkio.throttle.write_bps_device": f"{drive} {rate}"}
    else:
        group = "/sys/fs/cgroup/spillway-bench"
        limits = {"io.max": f"{drive} rbps={rate} wbps={rate}"}
    os.makedirs(group, exist_ok=True)
    for name, text in {**limits, "cgroup.procs": str(os.getpid())}.items():
        with open(f"{group}/{name}", "w", encoding="ascii") as file:
            file.write(text)


def spans(events, lanes, step=None):
    found = sorted((e["ts"], e["ts"] + e["dur"]) for e in events
                   if e["args"]["lane"] in lanes and (step is None or e["args"]["step"] == step))
    merged = []
    for first, last in found:
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def length(merged):
    return sum(last - first for first, last in merged) * 1e-6


def common(a, b):
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        first, last = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        total += max(0.0, last - first)
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total * 1e-6


class Trained:
    commit_every, more = 1, ()

    def __init__(self, tmp, model, mode, seq_len, steps, name, without=None):
        log, trace = f"{tmp}/{name}.jsonl", f"{tmp}/{name}.json"
        other = {"program": NULL_LANES, "env": {"NULL_LANES": without}} if without else {}
        run = t.train(f"{tmp}/{name}", "--optimizer", "nvme", "--overlap", mode, "--clip",
                      1 if mode == "forward" else 0, "--steps", steps, "--seq-len", seq_len,
                      "--commit-every", self.commit_every, *self.more, "--log", log,
                      "--trace", trace, model=model, timeout_s=1800, **other)
        # A run whose tasks did nothing may find so when it saves.
        t.equal(run.rc if not without else 0, 0, name, run)
        self.steps = t.read_log(log)[0][1:]
        t.equal(len(self.steps), steps - 1, f"{name}: steps", run)
        with open(trace, encoding="utf-8") as file:
            self.events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        self.step_s = statistics.median(s["step_s"] for s in self.steps)
        self.run = run
        for path in (f"{tmp}/{name}", trace):
            os.system(f"rm -rf '{path}'")

    def kinds_s(self, prefix):
        """Seconds of tasks of a kind per step, the median over steps."""
        return statistics.median(
            sum(e["dur"] for e in self.events
                if e["name"].startswith(prefix) and e["args"]["step"] == s["step"]) * 1e-6
            for s in self.steps)

    def update_span_s(self):
        """From the first read of a serial step's update to its last write."""
        values = []
        for s in self.steps:
            mine = spans(self.events, ("nvme_read", "nvme_write", "adam", "h2d"), s["step"])
            mine = [m for m in mine if m[1] - m[0] > 1000] or mine
            values.append((mine[-1][1] - mine[0][0]) * 1e-6)
        return statistics.median(values)

    def together(self):
        """Over the steps after the first, by time: the share of the shorter busy time."""
        start = min(e["ts"] for e in self.events
                    if e["args"]["step"] == 2 and e["args"]["lane"] == "compute")
        late = [e for e in self.events if e["ts"] >= start]
        compute, nvme = spans(late, ("compute",)), spans(late, ("nvme_read", "nvme_write"))
        return common(compute, nvme) / min(length(compute), length(nvme))


def row(run, tier, what):
    """Bytes of a row of the byte table."""
    found = re.search(rf"^\s+{tier}\s+{what}\s+([\d.]+) (\w+)$", run.stdout, re.M)
    return float(found.group(1)) * {"kB": 1e3, "MB": 1e6, "GB": 1e9}[found.group(2)]


def slots_share(run):
    """Chunk slots over chunks: what may be read ahead or written behind."""
    homes = 2 if "two homes" in run.stdout else 1
    return homes * row(run, "host", "optimizer state slots") / row(run, "nvme", "in all")


def pick_seq_len(tmp, model):
    probe = Trained(tmp, model, "none", 128, 3, "probe")
    compute, update = probe.kinds_s("forward") + probe.kinds_s("backward"), probe.update_span_s()
    return max(SEQ_STEP, round(128 * update / compute / SEQ_STEP) * SEQ_STEP)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=0)
    parser.add_argument("--commit-every", type=int, default=1)
    parser.add_argument("--device-threads", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--drive-limit", type=int, default=0, metavar="BYTES_PER_S")
    args = parser.parse_args()
    os.chdir(t.ROOT)
    if args.drive_limit:
        limit_drive(args.drive_limit)
    modes = ("none", "forward", "backward")
    runs, bounds, ratios = {mode: [] for mode in modes}, [], []
    with t.folder("bench-") as tmp:
        model = tmp + "/model"
        t.spillway("init", "--config", "tests/bench/model200m.json", "--seed", 1, "--out", model,
                   rc=0)
        Trained.commit_every = args.commit_every
        for name in ("threads", "device_threads"):
            if getattr(args, name):
                Trained.more += ("--" + name.replace("_", "-"), getattr(args, name))
        seq_len = args.seq_len or pick_seq_len(tmp, model)
        for i in range(args.rounds):
            for mode in modes:
                runs[mode].append(Trained(tmp, model, mode, seq_len, args.steps, f"{mode}-{i}"))
                print(f"round {i + 1}: {mode} {runs[mode][-1].step_s:.2f} s/step", file=sys.stderr,
                      flush=True)
            alone = {lanes: Trained(tmp, model, "backward", seq_len, args.steps, f"no-{lanes}-{i}",
                                    lanes).step_s for lanes in ("cpu", "nvme")}
            bounds.append(max(alone.values()))
            ratios.append(runs["backward"][-1].step_s / bounds[-1])
            print(f"round {i + 1}: backward {ratios[-1]:.3f} of its bound; NVMe alone "
                  f"{alone['cpu']:.2f}, CPU alone {alone['nvme']:.2f} s/step", file=sys.stderr,
                  flush=True)
    median = {mode: statistics.median(r.step_s for r in runs[mode]) for mode in modes}
    forward = statistics.median(r.kinds_s("forward") for r in runs["none"])
    backward = statistics.median(r.kinds_s("backward") for r in runs["none"])
    update = statistics.median(r.update_span_s() for r in runs["none"])
    bound = backward + max(forward, update * (1 - slots_share(runs["none"][0].run)))
    print(json.dumps({
        "schema": 1, "seq_len": seq_len, "commit_every": args.commit_every,
        "drive_limit": args.drive_limit, "options": Trained.more,
        "rounds": args.rounds, "steps": args.steps,
        "serial_compute_s": round(forward + backward, 3), "serial_update_s": round(update, 3),
        "step_s": {mode: round(value, 3) for mode, value in median.items()},
        "backward_over_none": round(median["backward"] / median["none"], 3),
        "backward_bound_s": round(statistics.median(bounds), 3),
        "backward_over_bound": round(statistics.median(ratios), 3),
        "forward_bound_s": round(bound, 3),
        "forward_over_bound": round(median["forward"] / bound, 3),
        "together_backward": round(statistics.median(r.together() for r in runs["backward"]), 3),
        "together_forward": round(statistics.median(r.together() for r in runs["forward"]), 3),
    }, indent=1))


if __name__ == "__main__":
    main()
