#!/usr/bin/env python3
"""What plan predicts, beside what train takes, on the CPU as device with throttled lanes.

    python3 tests/bench/plan_true.py [--profile FILE] [--out FOLDER] [--only NAME] [--steps N]

The machine is a profile that was measured before (`spillway bench all --profile FILE`); without one
all of it is unknown, and the throttled lanes alone have a time. All predictions are written to
OUT/predictions.json before the first run. Then each case runs: of a run's step times, without the
first two steps, the median; where three such runs differ by more than 3%, the median of five. The
table has predicted and measured time, the error, the step clocks, and whether the bytes of a step
are the same.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SPILLWAY = os.environ.get("SPILLWAY") or os.path.join(ROOT, "build", "spillway")
TRAFFIC = ("h2d", "d2h", "comm", "nvme_read", "nvme_write")

# 26 million parameters: 0.3 GB of records, which a throttled drive moves in seconds.
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
          "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
          "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
          "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def tiers(params, optimizer, gradients, activations):
    return ["--params", params, "--optimizer", optimizer, "--gradients", gradients,
            "--activations", activations]


HOST = tiers("device", "host", "host", "device")
DISK = tiers("device", "nvme", "host", "device")
STREAM = tiers("host", "nvme", "host", "host")
ALL = tiers("nvme", "nvme", "nvme", "nvme")
FLOPS = ["--sim-flops", "40G"]  # 128 tokens: 0.6 s

# Names, and options beyond the common ones: differ in what binds, where state lies, ranks, batch.
CASES = [
    ("drive, forward", [*DISK, *FLOPS, "--sim-nvme", "200M,150M", "--overlap", "forward"]),
    ("drive, none", [*DISK, *FLOPS, "--sim-nvme", "300M,200M", "--overlap", "none"]),
    ("drive, backward", [*DISK, *FLOPS, "--sim-nvme", "300M,250M", "--clip", "0"]),
    ("adam", [*HOST, *FLOPS, "--sim-adam", "800M", "--overlap", "forward"]),
    ("adam, none", [*HOST, *FLOPS, "--sim-adam", "1G", "--overlap", "none"]),
    ("pcie", [*STREAM, *FLOPS, "--sim-pcie", "100M,50M", "--sim-nvme", "500M"]),
    ("pcie down", [*HOST, *FLOPS, "--sim-pcie", "1G,40M"]),
    ("operations", [*DISK, "--sim-flops", "20G", "--sim-nvme", "500M"]),
    ("all of it", [*ALL, *FLOPS, "--sim-nvme", "250M", "--sim-pcie", "200M", "--sim-adam", "2G"]),
    ("micro-batches", [*STREAM, *FLOPS, "--sim-nvme", "200M", "--accumulate", "3"]),
    ("ranks, comm", [*HOST, *FLOPS, "--ranks", "2", "--zero", "3", "--sim-comm", "100M"]),
    ("ranks, drive", [*DISK, *FLOPS, "--ranks", "2", "--zero", "3", "--sim-nvme", "200M"]),
]


def run(*args):
    done = subprocess.run([SPILLWAY, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(args)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def predict(model, machine, options):
    return json.loads(run("plan", model, "--machine", machine, *options, "--json"))["times"]


def measure(model, data, out, options, steps):
    """The median step, its bytes by lane, and the clock that most steps had."""
    shutil.rmtree(out, ignore_errors=True)
    log = out + ".jsonl"
    run("train", "--model", model, "--data", data, "--out", out, *options, "--steps", str(steps),
        "--log", log)
    with open(log, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    found = [line for line in lines if "loss" in line][2:-1]
    shutil.rmtree(out, ignore_errors=True)
    clock = statistics.mode(s["step_clock"] for s in found)
    return statistics.median(s["step_s"] for s in found), found[-1]["bytes"], clock


def measure_well(*args):
    tries = [measure(*args) for _ in range(3)]
    times = [each[0] for each in tries]
    if max(times) - min(times) > 0.03 * min(times):
        tries += [measure(*args) for _ in range(2)]
    tries.sort(key=lambda each: each[0])
    return tries[len(tries) // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", help="a measured profile; else nothing is known but --sim-*")
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "plan_true"))
    parser.add_argument("--only", action="append", help="a case; may come several times")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    out = os.path.abspath(arguments.out)
    os.makedirs(out, exist_ok=True)
    model, data = os.path.join(out, "model"), os.path.join(out, "train.bin")
    if not os.path.isdir(model):
        config = os.path.join(out, "config.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump(CONFIG, file)
        run("init", "--config", config, "--out", model)
    with open(data, "wb") as file:  # tokens of two bytes, below the vocabulary
        file.write(b"".join((i * 7919 % 8192).to_bytes(2, "little") for i in range(100000)))
    machine = arguments.profile
    if not machine:
        machine = os.path.join(out, "unknown.json")
        with open(machine, "w", encoding="utf-8") as file:
            json.dump({"schema": 1, "about": "throttles alone",
                       "machine": {"memory_bytes": 64e9, "cores": os.cpu_count(),
                                   "cpus": os.cpu_count()},
                       "drives": [{"drive": "drive", "bytes": 1e12}]}, file)
    common = ["--device", "host", "--seq-len", "128", "--chunk", "1Mi"]
    cases = [(name, [*common, *options]) for name, options in CASES
             if not arguments.only or name in arguments.only]
    predictions = {name: predict(model, machine, options) for name, options in cases}
    with open(os.path.join(out, "predictions.json"), "w", encoding="utf-8") as file:
        json.dump(predictions, file, indent=1)
        file.flush()
        os.fsync(file.fileno())

    print("| case | predicted | measured | error | clock predicted, measured | bytes |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    errors = []
    for name, options in cases:
        told = predictions[name]
        step_s, moved, clock = measure_well(model, data, os.path.join(out, "run"), options,
                                            arguments.steps)
        error = told["step_s"] / step_s - 1
        errors.append(abs(error))
        planned = {lane["lane"]: lane["bytes"] for lane in told["lanes"]}
        others = [f"{lane}: {planned[lane]:.0f}, {moved[lane]}" for lane in TRAFFIC
                  if planned[lane] != moved[lane]]
        print(f"| {name} | {told['step_s']:.3f} s | {step_s:.3f} s | {100 * error:+.1f}% | "
              f"{told['step_clock']}, {clock} | {'; '.join(others) or 'the same'} |",
              flush=True)
    print(f"\nerror: {100 * statistics.median(errors):.1f}% in the median, "
          f"{100 * max(errors):.1f}% at worst, of {len(errors)} cases")


if __name__ == "__main__":
    main()
