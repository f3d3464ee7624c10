#!/usr/bin/env python3
"""The CPU Adam beside its peers: DeepSpeed's CPU Adam, built with its own flags, and torch's AdamW.

    tests/bench/adam_peers.py [--dir DIR] [--params 67108864] [--rounds 9] [--threads 1,2]
                              [--json FILE] [--check]

One process, the same cores, the same huge pages and the same arrays for all; rounds interleave, and
each side has the best of the thread counts. Two jobs:

  step   what a training step needs: BF16 gradient, unscaled and clipped, FP32 update, BF16 weight.
         Spillway makes one pass. DeepSpeed makes four: gradient to FP32, times the factor, update,
         weight to BF16; "no clip" leaves out the second.
  bare   FP32 gradient, no weight: Spillway, DeepSpeed, torch fused and foreach.

With --check the exit status is 1 unless the step is at least 2.0 times as fast as DeepSpeed's (1.7
times without the clip pass), the bare update no slower, and torch's fused one slower.

torch, deepspeed and ninja are installed from PyPI into DIR/venv (default: LONG_DIR or
/var/tmp/spillway-long), several GB; DeepSpeed's kernel is compiled there once, for minutes.
"""
import argparse
import ctypes
import json
import math
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HYPER = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FACTOR = 0.5  # of unscaling and clipping
STEP = 100
SKEW = 5 * 4096 + 1024  # arrays must not agree in their low address bits
HUGE = 2 << 20


# ---- what has to be there ----------------------------------------------------------------------

def python_with_peers(folder):
    """The interpreter of DIR/venv, with torch and deepspeed in it."""
    python = os.path.join(folder, "venv", "bin", "python")
    probe = [python, "-c", "import torch, deepspeed, ninja"]
    if not os.path.exists(python):
        subprocess.run([sys.executable, "-m", "venv", os.path.join(folder, "venv")], check=True)
    if subprocess.run(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                      check=False).returncode:
        print("installing torch and deepspeed from PyPI (several GB)", file=sys.stderr)
        pip = [python, "-m", "pip", "-q", "install"]
        subprocess.run(pip + ["numpy", "ninja", "setuptools", "torch"], check=True)
        subprocess.run(pip + ["deepspeed"], check=True)
        subprocess.run(probe, check=True, stdout=subprocess.DEVNULL)
    return python


def enter(folder):
    """Goes on under that interpreter, in an environment that is fair to all: no CUDA, no thread
    that spins while another's turn is on."""
    if os.environ.get("ADAM_PEERS_INSIDE"):
        return
    os.makedirs(folder, exist_ok=True)
    python = python_with_peers(folder)
    env = {**os.environ, "ADAM_PEERS_INSIDE": "1", "DS_ACCELERATOR": "cpu",
           "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": "",
           "TORCH_EXTENSIONS_DIR": os.path.join(folder, "extensions"),
           "PATH": os.path.dirname(python) + os.pathsep + os.environ["PATH"]}
    os.execve(python, [python, os.path.abspath(__file__), *sys.argv[1:]], env)


def build_ours(folder):
    """base/ and cpu_adam/ with the flags that `make` gives them, as a shared library."""
    def printed(name):
        ran = subprocess.run(["make", "-s", "--no-print-directory", "-f", "-", "PROBE=0", "said"],
                             cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                             input=f"include Makefile\nsaid:\n\t@echo '$({name})'\n")
        return ran.stdout.split()

    flags = [f for f in printed("cflags") if f not in ("-Werror", "-MMD", "-MP")]
    objects = []
    sources = [os.path.join(d, n) for d in ("base", "cpu_adam")
               for n in sorted(os.listdir(os.path.join(ROOT, d))) if n.endswith(".c")]
    for source in sources + ["tests/bench/adam_peer.c"]:
        own = []
        stem = os.path.splitext(os.path.basename(source))[0]
        if stem in ("adam_avx2", "adam_avx512", "adam_scalar"):
            own = ["-O3"] + printed("isa_" + stem.split("_")[1])
        objects.append(os.path.join(folder, stem + ".o"))
        subprocess.run(["gcc", *flags, "-fPIC", *own, "-c", source, "-o", objects[-1]], cwd=ROOT,
                       check=True)
    library = os.path.join(folder, "adam_peer.so")
    subprocess.run(["gcc", "-shared", "-fopenmp", *objects, "-lisal", "-lm", "-o", library],
                   check=True)
    ours = ctypes.CDLL(library)
    ours.peer_variant.restype = ctypes.c_char_p
    pointer, real = ctypes.c_void_p, ctypes.c_double
    ours.peer_update.argtypes = ([pointer] * 4 + [ctypes.c_int, pointer, ctypes.c_uint64,
                                 ctypes.c_int, ctypes.c_uint64] + [real] * 5 + [ctypes.c_float])
    return ours


# ---- arrays and jobs ---------------------------------------------------------------------------

class Arrays:
    """State, gradients and weight as torch tensors on one mapping of huge pages."""

    def __init__(self, torch, count):
        kinds = {"master": torch.float32, "momentum": torch.float32, "variance": torch.float32,
                 "grad": torch.float32, "grad16": torch.bfloat16, "weight": torch.bfloat16}
        size = sum(count * k.itemsize + HUGE for k in kinds.values()) + HUGE
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        at = -base % HUGE
        for i, (name, kind) in enumerate(kinds.items()):
            setattr(self, name, torch.frombuffer(self.map, dtype=kind, count=count,
                                                 offset=at + i * SKEW))
            at += (count * kind.itemsize + i * SKEW + 63) // 64 * 64
        self.fill(torch)

    def fill(self, torch):
        torch.manual_seed(1)
        self.master.uniform_(-1, 1)
        self.grad.normal_(0, 1e-3)
        self.grad16.copy_(self.grad)
        self.momentum.normal_(0, 1e-4)
        self.variance.uniform_(1e-8, 1e-6)
        self.weight.zero_()


class Ours:
    def __init__(self, library, arrays):
        self.library, self.arrays, self.threads = library, arrays, 1

    def update(self, grad, weight, scale):
        a = self.arrays
        ret = self.library.peer_update(
            a.master.data_ptr(), a.momentum.data_ptr(), a.variance.data_ptr(), grad.data_ptr(),
            int(grad.dtype.itemsize == 4), weight.data_ptr() if weight is not None else None,
            a.master.numel(), self.threads, STEP, *HYPER.values(), scale)
        if ret:
            sys.exit(f"adam_peers: the update failed: {os.strerror(-ret)}")

    def step(self):
        self.update(self.arrays.grad16, self.arrays.weight, FACTOR)

    def bare(self):
        self.update(self.arrays.grad, None, 1.0)


class DeepSpeed:
    def __init__(self, op, arrays):
        self.op, self.a = op, arrays
        h = HYPER
        op.create_adam(0, h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"], True, False)

    def bare(self):
        a, h = self.a, HYPER
        self.op.adam_update(0, STEP, h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"],
                            True, a.master, a.grad, a.momentum, a.variance)

    def step(self, clip=True):
        self.a.grad.copy_(self.a.grad16)
        if clip:
            self.a.grad.mul_(FACTOR)
        self.bare()
        self.a.weight.copy_(self.a.master)


def torch_step(torch, arrays, **how):
    parameter = torch.nn.Parameter(arrays.master)
    parameter.grad = arrays.grad
    h = HYPER
    optimizer = torch.optim.AdamW([parameter], lr=h["lr"], betas=(h["beta1"], h["beta2"]),
                                  eps=h["eps"], weight_decay=h["weight_decay"], **how)
    optimizer.state[parameter] = {"step": torch.tensor(float(STEP - 1)),
                                  "exp_avg": arrays.momentum, "exp_avg_sq": arrays.variance}
    return optimizer.step


def make_jobs(torch, library, op, arrays):
    ours, deepspeed = Ours(library, arrays), DeepSpeed(op, arrays)
    return ours, {
        "spillway step": ours.step,
        "deepspeed step": deepspeed.step,
        "deepspeed step, no clip": lambda: deepspeed.step(clip=False),
        "spillway bare": ours.bare,
        "deepspeed bare": deepspeed.bare,
        "torch fused bare": torch_step(torch, arrays, fused=True),
        "torch foreach bare": torch_step(torch, arrays, foreach=True),
    }


def same_result(torch, library, op):
    """All compute the same update, to rounding: the largest difference of a master relative to the
    move, over the sides."""
    arrays = Arrays(torch, 1 << 16)
    results = {}
    for name in ("spillway bare", "deepspeed bare", "torch fused bare", "torch foreach bare"):
        arrays.fill(torch)
        before = arrays.master.clone()
        make_jobs(torch, library, op, arrays)[1][name]()
        results[name] = arrays.master - before
    first = results.pop("spillway bare")
    # A master near 1 moves by 1e-6 and is rounded to 6e-8: 0.1 of a move.
    return max(float((r - first).abs().max() / first.abs().max()) for r in results.values())


# ---- the run -----------------------------------------------------------------------------------

def measure(torch, ours, jobs, threads, rounds):
    """{job: {threads: [seconds]}}."""
    times = {name: {n: [] for n in threads} for name in jobs}
    for r in range(-1, rounds):  # the first warms up
        for n in threads:
            torch.set_num_threads(n)
            ours.threads = n
            for name, job in jobs.items():
                start = time.perf_counter()
                job()
                if r >= 0:
                    times[name][n].append(time.perf_counter() - start)
    return times


def best(times):
    """(threads, seconds by round) of the thread count with the least median."""
    n = min(times, key=lambda k: statistics.median(times[k]))
    return n, times[n]


def ratio(times, peer, own):
    return statistics.median(a / b for a, b in zip(best(times[peer])[1], best(times[own])[1]))


def machine():
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{names[0]}, {len(os.sched_getaffinity(0))} CPUs, Linux {platform.release()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default=os.environ.get("LONG_DIR", "/var/tmp/spillway-long"))
    parser.add_argument("--params", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    folder = os.path.abspath(args.dir)
    enter(folder)

    import torch
    import deepspeed
    from deepspeed.ops.op_builder import CPUAdamBuilder
    builder = CPUAdamBuilder()
    flags = " ".join(builder.cxx_args())
    op = builder.load(verbose=False)
    library = build_ours(folder)
    variant = library.peer_variant()
    if not variant:
        sys.exit("adam_peers: SPILLWAY_ISA names what cannot run here")
    off = same_result(torch, library, op)
    if not off < 0.25:
        sys.exit(f"adam_peers: the sides compute different updates (off by {off} of a move)")

    threads = sorted({int(n) for n in args.threads.split(",")})
    arrays = Arrays(torch, args.params)
    ours, jobs = make_jobs(torch, library, op, arrays)
    with torch.no_grad():
        times = measure(torch, ours, jobs, threads, args.rounds)
    pairs = {"step": ("deepspeed step", "spillway step", 2.0),
             "step, no clip": ("deepspeed step, no clip", "spillway step", 1.7),
             "bare": ("deepspeed bare", "spillway bare", 1.0),
             "torch fused": ("torch fused bare", "spillway bare", 1.0),
             "torch foreach": ("torch foreach bare", "spillway bare", 1.0)}
    report = {
        "schema": 1, "machine": machine(), "params": args.params, "rounds": args.rounds,
        "variant": variant.decode(), "torch": torch.__version__, "deepspeed": deepspeed.__version__,
        "deepspeed_flags": flags, "largest_difference_of_a_move": off,
        "jobs": {name: {"threads": best(t)[0], "ns_per_param":
                        1e9 * statistics.median(best(t)[1]) / args.params,
                        "by_threads": {n: 1e9 * statistics.median(s) / args.params
                                       for n, s in t.items()}} for name, t in times.items()},
        "faster": {name: ratio(times, a, b) for name, (a, b, _) in pairs.items()},
        "targets": {name: least for name, (_, _, least) in pairs.items()},
    }
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    print(f"{report['machine']}; {args.params} parameters, {args.rounds} interleaved rounds\n"
          f"spillway {report['variant']}; torch {report['torch']}; deepspeed "
          f"{report['deepspeed']} built with {flags}\n")
    print("| job | " + " | ".join(f"{n} thread{'s' * (n > 1)}" for n in threads)
          + " |\n| --- |" + " ---: |" * len(threads))
    for name, job in report["jobs"].items():
        print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in job["by_threads"].values()) + " |")
    print("\n(ns per parameter)\n")
    short = 0
    for name, value in report["faster"].items():
        least = report["targets"][name]
        short += not (value >= least and math.isfinite(value))
        print(f"{name}: spillway is {value:.2f} times as fast (wanted: {least})")
    return 1 if args.check and short else 0


if __name__ == "__main__":
    sys.exit(main())
