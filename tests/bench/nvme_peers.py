#!/usr/bin/env python3
"""The store's speed beside its peers', on the same file, in interleaved rounds.

    tests/bench/nvme_peers.py [--folder DIR] [--size 1024] [--rounds 9] [--seconds 1]
                              [--dir DIR] [--without deepspeed] [--json FILE] [--check]

  spillway   the library's queues (nvme_rounds.c); and once more with the default block size and
             depth for all patterns
  fio        io_uring, direct, registered buffers and file; and once more with its buffers on huge
             pages, for which a few are reserved meanwhile (as root, where the kernel has them free)
  referee    disk_referee.c: a plain io_uring loop on huge pages
  deepspeed  DeepSpeed's aio operator, on its own page-locked tensors

Each has its best block size and depth for each pattern, found by a sweep first. mixed is a
training step's: a thread reads one half of the file while another writes the other. A ratio is the
median over rounds of spillway's rate / a peer's; of fio and the referee the faster one counts, the
one with the smaller ratio. (The best of several noisy peers in each single round would be the
luckiest one.)

Also runs nvme_frame.c: what the store itself costs, on a device that completes at once.

With --check the exit status is 1 unless the ratio is 0.95 at least in every pattern, and DeepSpeed
slower in all of them, and the frame drives 25 GB/s on a core.

--size is in MiB. fio comes from the distribution, and so does libaio-dev (apt-get, when missing);
torch, deepspeed and ninja come from PyPI, into DIR/venv (default: LONG_DIR or
/var/tmp/spillway-long), several GB.
"""
import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time

from adam_peers import machine, python_with_peers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = os.path.join(ROOT, "build", "release", "tests", "bench")
PATTERNS = ("read", "write", "mixed")
DEFAULT = (1 << 20, 8)
MIB = 1 << 20
FIO_HUGE_PAGES = 48
GRID = [(block << 10, (in_flight * MIB) // (block << 10))
        for block in (512, 1024, 2048) for in_flight in (4, 8, 16)]
DEEPSPEED_GRID = [(block << 10, depth, parallel)
                  for block, depth in ((256, 32), (1024, 16), (4096, 8)) for parallel in (1, 2)]


# ---- what has to be there ----------------------------------------------------------------------

def package(name, there):
    if not there:
        subprocess.run(["apt-get", "-q", "install", "-y", name], check=True,
                       stdout=subprocess.DEVNULL)


def enter(args):
    """Builds our programs and goes on under an interpreter that has DeepSpeed."""
    if os.environ.get("NVME_PEERS_INSIDE"):
        return
    subprocess.run(["make", "-s", "bench-tools"], cwd=ROOT, check=True)
    package("fio", shutil.which("fio"))
    python, env = sys.executable, {**os.environ, "NVME_PEERS_INSIDE": "1"}
    if "deepspeed" not in args.without:
        folder = os.path.abspath(args.dir)
        os.makedirs(folder, exist_ok=True)
        package("libaio-dev", os.path.exists("/usr/include/libaio.h"))
        python = python_with_peers(folder)
        env.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="",
                   TORCH_EXTENSIONS_DIR=os.path.join(folder, "extensions"),
                   PATH=os.path.dirname(python) + os.pathsep + os.environ["PATH"])
    os.execve(python, [python, os.path.abspath(__file__), *sys.argv[1:]], env)


# ---- the contestants: rate(pattern, setting, seconds) in bytes per second, (read, write) --------

def printed(command):
    ran = subprocess.run([str(c) for c in command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


class Spillway:
    grid = GRID

    def __init__(self, folder, size):
        self.base = [os.path.join(TOOLS, "nvme_rounds"), folder, size]
        self.path = os.path.join(folder, "peers.0.state")
        printed(self.base + ["fill", 0, 0, 0])

    def rate(self, pattern, setting, seconds):
        got = printed(self.base + [pattern, *setting, seconds])
        return got["read"], got["write"]


class Referee:
    grid = GRID

    def __init__(self, path):
        self.path = path

    def rate(self, pattern, setting, seconds):
        got = printed([os.path.join(TOOLS, "disk_referee"), self.path, pattern, *setting, seconds])
        return got["read"], got["write"]


class Fio:
    grid = GRID

    def __init__(self, path, *memory):
        self.path, self.half, self.memory = path, os.path.getsize(path) // 2, memory
        self.version = subprocess.run(["fio", "--version"], check=True, stdout=subprocess.PIPE,
                                      text=True).stdout.strip()

    def rate(self, pattern, setting, seconds):
        block, depth = setting
        command = ["fio", "--output-format=json", "--ioengine=io_uring", "--direct=1",
                   "--fixedbufs=1", "--registerfiles=1", "--thread", "--time_based",
                   *self.memory, "--allow_file_create=0", f"--runtime={int(1000 * seconds)}ms",
                   f"--filename={self.path}", f"--bs={block}", f"--iodepth={depth}"]
        for i, rw in enumerate(("read", "write")):
            if pattern in (rw, "mixed"):
                command += [f"--name={rw}", f"--rw={rw}"]
                if pattern == "mixed":
                    command += [f"--offset={i * self.half}", f"--size={self.half}"]
        # fio says on the first lines of its output what it thinks of the command.
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        jobs = json.loads(text[text.index("{"):])["jobs"]
        return tuple(sum(job[rw]["bw_bytes"] for job in jobs) for rw in ("read", "write"))


@contextlib.contextmanager
def reserved_huge_pages(count):
    """Whether so many could be reserved, for the length of the block."""
    path = "/proc/sys/vm/nr_hugepages"
    try:
        with open(path, "r+", encoding="ascii") as file:
            before = int(file.read())
            file.seek(0)
            file.write(f"{before + count}\n")
    except OSError:
        yield False
        return
    try:
        with open(path, encoding="ascii") as file:
            yield int(file.read()) == before + count
    finally:
        with open(path, "w", encoding="ascii") as file:
            file.write(f"{before}\n")


class DeepSpeed:
    grid = DEEPSPEED_GRID

    def __init__(self, path):
        import torch
        import deepspeed
        from deepspeed.ops.op_builder import AsyncIOBuilder
        builder = AsyncIOBuilder()
        self.version, self.flags = deepspeed.__version__, " ".join(builder.cxx_args())
        self.op = builder.load(verbose=False)
        self.path, self.half = path, os.path.getsize(path) // 2
        self.owner = self.op.aio_handle(*self.handle_args(self.grid[0]))
        self.buffers = [self.owner.new_cpu_locked_tensor(self.half, torch.empty(0).to(torch.uint8))
                        for _ in range(2)]
        for b in self.buffers:
            b.random_(0, 256)

    @staticmethod
    def handle_args(setting):
        block, depth, parallel = setting
        return block, depth, False, True, parallel  # not one by one; events overlap

    def loop(self, write, setting, seconds, out):
        handle, moved = self.op.aio_handle(*self.handle_args(setting)), 0
        go = handle.sync_pwrite if write else handle.sync_pread
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            go(self.buffers[write], self.path, write * self.half)
            moved += self.half
        out[write] = moved / (time.perf_counter() - start)

    def rate(self, pattern, setting, seconds):
        out = [0, 0]
        sides = {"read": [0], "write": [1], "mixed": [0, 1]}[pattern]
        threads = [threading.Thread(target=self.loop, args=(s, setting, seconds, out))
                   for s in sides]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tuple(out)


# ---- the run -----------------------------------------------------------------------------------

def sweep(sides, seconds):
    """{side: {pattern: setting}}, each the fastest of two looks at every setting."""
    best = {name: {} for name in sides}
    for pattern in PATTERNS:
        seen = {}
        for _ in range(2):
            for name, side in sides.items():
                print(f"sweep: {pattern}, {name}", file=sys.stderr)
                for setting in side.grid:
                    rate = sum(side.rate(pattern, setting, seconds))
                    seen[name, setting] = max(rate, seen.get((name, setting), 0))
        for name in {name for name, _ in seen}:
            best[name][pattern] = max((s for n, s in seen if n == name),
                                      key=lambda s, n=name: seen[n, s])
    return best


def measure(sides, best, rounds, seconds):
    """{pattern: {side: [rate by round]}}, and the parts of mixed."""
    runs = [(name, side, best[name]) for name, side in sides.items()]
    runs.append(("spillway default", sides["spillway"], dict.fromkeys(PATTERNS, DEFAULT)))
    rates = {pattern: {name: [] for name, _, _ in runs} for pattern in PATTERNS}
    for r in range(rounds):
        print(f"round {r + 1} of {rounds}", file=sys.stderr)
        for pattern in PATTERNS:
            for i in range(len(runs)):
                name, side, settings = runs[(i + r) % len(runs)]  # each goes first in its turn
                rates[pattern][name].append(sum(side.rate(pattern, settings[pattern], seconds)))
    return rates


def ratios(rates, own, peers):
    """Of the rounds, sorted, against the peer that is the fastest over all rounds."""
    against = [sorted(a / b for a, b in zip(rates[own], rates[p])) for p in peers]
    return min(against, key=statistics.median)


def quartiles(values):
    n = len(values)
    return values[n // 4], values[(3 * n) // 4]


def make_report(args, sides, best, rates):
    referees = [name for name in ("fio", "fio, huge pages", "referee") if name in sides]
    report = {"schema": 1, "machine": machine(), "size_mib": args.size, "rounds": args.rounds,
              "seconds": args.seconds, "load": os.getloadavg()[0],
              "settings": best, "gb_per_s": {}, "ratio": {}, "ratio_quartiles": {},
              "default_ratio": {}, "deepspeed_slower": {}}
    for pattern in PATTERNS:
        of = rates[pattern]
        report["gb_per_s"][pattern] = {n: 1e-9 * statistics.median(v) for n, v in of.items()}
        got = ratios(of, "spillway", referees)
        report["ratio"][pattern] = statistics.median(got)
        report["ratio_quartiles"][pattern] = quartiles(got)
        report["default_ratio"][pattern] = statistics.median(
            ratios(of, "spillway default", referees))
        if "deepspeed" in sides:
            report["deepspeed_slower"][pattern] = statistics.median(
                ratios(of, "spillway", ["deepspeed"]))
    report["frame"] = printed([os.path.join(TOOLS, "nvme_frame")])
    for name in ("fio", "deepspeed"):
        if name in sides:
            report[name] = sides[name].version
    return report


def print_report(report):
    print(f"{report['machine']}; {report['size_mib']} MiB, {report['rounds']} interleaved rounds "
          f"of {report['seconds']} s; load {report['load']:.1f}\n")
    print("| GB/s, median | " + " | ".join(PATTERNS) + " | settings |\n"
          "| --- |" + " ---: |" * len(PATTERNS) + " --- |")
    for name in report["gb_per_s"]["read"]:
        settings = report["settings"].get(name, dict.fromkeys(PATTERNS, DEFAULT))
        text = [f"{s[0] >> 10} KiB x {s[1]}" + (f" x {s[2]} threads" if len(s) > 2 else "")
                for s in settings.values()]
        text = text[:1] if len(set(text)) == 1 else text
        print(f"| {name} | " + " | ".join(f"{report['gb_per_s'][p][name]:.2f}" for p in PATTERNS)
              + " | " + ", ".join(text) + " |")
    for key, what in (("ratio", "spillway / best of fio and referee"),
                      ("default_ratio", "the same, default setting"),
                      ("deepspeed_slower", "spillway / deepspeed")):
        if report[key]:
            print(f"| {what} | " + " | ".join(f"{report[key][p]:.3f}" for p in PATTERNS) + " | |")
    print("\nquartiles of the ratio: " + ", ".join(
        f"{p} {q[0]:.2f} to {q[1]:.2f}" for p, q in report["ratio_quartiles"].items()))
    frame = report["frame"]
    print(f"frame, null device: {frame['frame_ns_per_gb'] / 1000:.0f} us of CPU per GB; with the "
          f"checksum {frame['with_crc_ns_per_gb'] / 1e6:.0f} ms, "
          f"{frame['with_crc_gb_per_s_per_core']:.1f} GB/s on a core")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=os.path.join(ROOT, "build"))
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1)
    parser.add_argument("--sweep-seconds", type=float, default=0.3)
    parser.add_argument("--without", action="append", default=[],
                        choices=["fio", "referee", "deepspeed"])
    parser.add_argument("--dir", default=os.environ.get("LONG_DIR", "/var/tmp/spillway-long"))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    enter(args)
    ours = Spillway(args.folder, args.size * MIB)
    try:
        with reserved_huge_pages(FIO_HUGE_PAGES) as huge:
            sides = {"spillway": ours}
            for name, kind in (("fio", Fio), ("referee", Referee), ("deepspeed", DeepSpeed)):
                if name not in args.without:
                    sides[name] = kind(ours.path)
            if "fio" in sides and huge:
                sides["fio, huge pages"] = Fio(ours.path, "--iomem=mmaphuge")
            best = sweep(sides, args.sweep_seconds)
            rates = measure(sides, best, args.rounds, args.seconds)
    finally:
        os.unlink(ours.path)
    report = make_report(args, sides, best, rates)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({**report, "rounds_gb_per_s": {p: {n: [1e-9 * x for x in v]
                                                         for n, v in of.items()}
                                                     for p, of in rates.items()}}, file, indent=2)
    print_report(report)
    good = (all(r >= 0.95 for r in report["ratio"].values())
            and all(r > 1 for r in report["deepspeed_slower"].values())
            and report["frame"]["frame_gb_per_s_per_core"] > 25)
    return 1 if args.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
