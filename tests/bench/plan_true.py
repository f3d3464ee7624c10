#!/usr/bin/env python3
"""What plan predicts, beside what train takes, on the CPU as device.

    python3 tests/bench/plan_true.py [--out FOLDER] [--only NAME] [--list] [--steps N]

First the machine is measured: `spillway bench all` and, for each of the rows that the cases have,
`spillway bench model`, into OUT/machine.json, unless it is there. Then all predictions are written
to OUT/predictions.json, before the first run. Then each case runs the line that its plan offered:
of a run's step times, without the first two steps and the last, the median; of three such runs the
median, of five where three differ by more than 3%. The table has predicted and measured time, the
error, the step clocks, and whether the bytes that lanes move in a step and the memory of each tier
are the same. A quarter of the cases holds lanes to rates and leaves the operations out
(--sim-flops), a quarter is held to nothing. The machine must do nothing else meanwhile.
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
PROGRAM = "program, libraries and turns"  # in the byte table, but no pool of a tier

# 63 million parameters: 0.75 GB of records.
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 768,
          "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
          "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 512,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
          "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def tiers(params, optimizer, gradients, activations):
    return ["--params", params, "--optimizer", optimizer, "--gradients", gradients,
            "--activations", activations]


DEVICE = tiers("device", "device", "device", "device")
HOST = tiers("device", "host", "host", "device")
DISK = tiers("device", "nvme", "host", "device")
HALF = tiers("device", "host:50%,nvme", "host", "device")
STREAM = tiers("host", "nvme", "host", "host")
ALL = tiers("nvme", "nvme", "nvme", "nvme")
FLOPS = ["--sim-flops", "60G"]  # 128 tokens: 0.9 s
SHORT, LONG = ["--seq-len", "128"], ["--seq-len", "256"]
BATCH = [*SHORT, "--micro-batch", "2"]
RANKS = ["--ranks", "2", "--zero", "3"]
FORWARD, BACKWARD, NONE = (["--overlap", "forward"], ["--overlap", "backward", "--clip", "0"],
                           ["--overlap", "none"])

# Names, and options: they differ in what binds, where state lies, in ranks and batch.
CASES = [
    # Lanes held to rates, no operations.
    ("drive, forward", [*SHORT, *DISK, *FLOPS, *FORWARD, "--sim-nvme", "500M,400M"]),
    ("drive, none", [*SHORT, *DISK, *FLOPS, *NONE, "--sim-nvme", "600M,500M"]),
    ("drive, backward", [*SHORT, *DISK, *FLOPS, *BACKWARD, "--sim-nvme", "600M,500M"]),
    ("adam, forward", [*SHORT, *HOST, *FLOPS, *FORWARD, "--sim-adam", "2G"]),
    ("pcie, forward", [*SHORT, *STREAM, *FLOPS, *FORWARD, "--sim-pcie", "200M,100M",
                       "--sim-nvme", "1G"]),
    ("operations", [*SHORT, *DISK, *FORWARD, "--sim-flops", "40G", "--sim-nvme", "1G"]),
    ("everything", [*SHORT, *ALL, *FLOPS, *FORWARD, "--sim-nvme", "700M", "--sim-pcie", "500M",
                    "--sim-adam", "4G"]),
    ("micro-batches", [*SHORT, *STREAM, *FLOPS, *FORWARD, "--sim-nvme", "500M", "--accumulate",
                       "3"]),
    ("ranks, links", [*SHORT, *HOST, *FLOPS, *FORWARD, *RANKS, "--sim-comm", "200M"]),
    ("ranks, drive", [*SHORT, *DISK, *FLOPS, *FORWARD, *RANKS, "--sim-nvme", "500M"]),
    # Lanes held to rates beside the operations themselves.
    ("drive 250", [*SHORT, *DISK, *FORWARD, "--sim-nvme", "250M"]),
    ("drive 500", [*SHORT, *DISK, *FORWARD, "--sim-nvme", "500M"]),
    ("drive 500, none", [*SHORT, *DISK, *NONE, "--sim-nvme", "500M"]),
    ("drive 500, backward", [*SHORT, *DISK, *BACKWARD, "--sim-nvme", "500M"]),
    ("drive 500, long", [*LONG, *DISK, *FORWARD, "--sim-nvme", "500M"]),
    ("drive 500, half", [*SHORT, *HALF, *FORWARD, "--sim-nvme", "500M"]),
    ("drive written slowly", [*SHORT, *DISK, *FORWARD, "--sim-nvme", "800M,300M"]),
    ("adam 1", [*SHORT, *HOST, *FORWARD, "--sim-adam", "1G"]),
    ("adam 2, none", [*SHORT, *HOST, *NONE, "--sim-adam", "2G"]),
    ("adam 2, backward", [*SHORT, *HOST, *BACKWARD, "--sim-adam", "2G"]),
    ("adam 2, batch", [*BATCH, *HOST, *FORWARD, "--sim-adam", "2G"]),
    ("pcie 100", [*SHORT, *HOST, *FORWARD, "--sim-pcie", "100M"]),
    ("pcie 200, stream", [*SHORT, *STREAM, *FORWARD, "--sim-pcie", "200M", "--sim-nvme", "1G"]),
    ("pcie up", [*LONG, *STREAM, *FORWARD, "--sim-pcie", "150M,1G", "--sim-nvme", "1G"]),
    ("pcie down", [*SHORT, *HOST, *BACKWARD, "--sim-pcie", "1G,80M"]),
    ("everything 500", [*SHORT, *ALL, *FORWARD, "--sim-nvme", "500M", "--sim-pcie", "400M"]),
    ("micro-batches 300", [*SHORT, *DISK, *FORWARD, "--sim-nvme", "300M", "--accumulate", "2"]),
    ("ranks, links 100", [*SHORT, *HOST, *FORWARD, *RANKS, "--sim-comm", "100M"]),
    ("ranks, drive 400", [*SHORT, *DISK, *FORWARD, *RANKS, "--sim-nvme", "400M"]),
    ("checkpoints, drive 400", [*LONG, *DISK, *FORWARD, "--checkpoint-every", "2", "--sim-nvme",
                                "400M"]),
    # Nothing is held to anything.
    ("free: device", [*SHORT, *DEVICE, *FORWARD]),
    ("free: device, long", [*LONG, *DEVICE, *FORWARD]),
    ("free: host", [*SHORT, *HOST, *FORWARD]),
    ("free: host, none", [*LONG, *HOST, *NONE]),
    ("free: host, batch", [*BATCH, *HOST, *FORWARD]),
    ("free: host, micro-batches", [*SHORT, *HOST, *FORWARD, "--accumulate", "3"]),
    ("free: drive, none", [*SHORT, *DISK, *NONE]),
    ("free: drive", [*LONG, *DISK, *FORWARD]),
    ("free: drive, half", [*LONG, *HALF, *FORWARD]),
    ("free: all on the drive", [*LONG, *ALL, *FORWARD]),
]
ROWS = (SHORT, LONG, BATCH, [*SHORT, "--ranks", "2"])


def run(*args):
    done = subprocess.run([SPILLWAY, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(args)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def predict(model, machine, options):
    return json.loads(run("plan", model, "--machine", machine, "--device", "host", *options,
                          "--json"))


def offered(report):
    """The options of the line, but for paths."""
    command = report["decision"]["command"]
    left_out = ("--model", "--data", "--out", "--nvme")
    return [word for i, word in enumerate(command[1:], 1)
            if word not in left_out and command[i - 1] not in left_out]


def measure(model, data, out, options, steps):
    """The median step, its bytes by lane, the clock that most steps had, the tiers' memory."""
    shutil.rmtree(out, ignore_errors=True)
    log = out + ".jsonl"
    if os.path.exists(log):
        os.remove(log)
    run("train", "--model", model, "--data", data, "--out", out, *options, "--steps", str(steps),
        "--log", log)
    with open(log, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    found = [line for line in lines if "loss" in line][2:-1]
    shutil.rmtree(out, ignore_errors=True)
    clock = statistics.mode(s["step_clock"] for s in found)
    return (statistics.median(s["step_s"] for s in found), found[-1]["bytes"], clock,
            found[-1]["memory_bytes"])


def measure_well(*args):
    tries = [measure(*args) for _ in range(3)]
    times = [each[0] for each in tries]
    if max(times) - min(times) > 0.03 * min(times):
        tries += [measure(*args) for _ in range(2)]
    tries.sort(key=lambda each: each[0])
    return tries[len(tries) // 2]


def differences(told, moved, memory):
    """What a step moves and what tiers hold, where plan and run differ."""
    planned = {lane["lane"]: lane["bytes"] for lane in told["times"]["lanes"]}
    others = [f"{lane}: {planned[lane]:.0f}, {moved[lane]}" for lane in TRAFFIC
              if planned[lane] != moved[lane]]
    held = dict.fromkeys(memory, 0)
    for row in told["decision"]["rows"]:
        if row["what"] != PROGRAM:
            held[row["tier"]] += row["bytes"]
    others += [f"{tier}: {held[tier]} held, {memory[tier]}" for tier in memory
               if abs(held[tier] - memory[tier]) > 0.02 * memory[tier]]
    return "; ".join(others) or "the same"


def prepare(out):
    """The model, its data and the machine's profile."""
    model, data = os.path.join(out, "model"), os.path.join(out, "train.bin")
    machine = os.path.join(out, "machine.json")
    if not os.path.isdir(model):
        config = os.path.join(out, "config.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump(CONFIG, file)
        run("init", "--config", config, "--out", model)
    with open(data, "wb") as file:  # tokens of two bytes, below the vocabulary
        file.write(b"".join((i * 7919 % 8192).to_bytes(2, "little") for i in range(100000)))
    if not os.path.exists(machine):
        run("bench", "all", "--nvme", out, "--profile", machine)
        for rows in ROWS:
            run("bench", "model", model, *rows, "--seconds", "15", "--profile", machine)
    return model, data, machine


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "plan_true"))
    parser.add_argument("--only", action="append", help="a case; may come several times")
    parser.add_argument("--list", action="store_true", help="the cases' names")
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(name for name, _ in CASES))
        return
    os.environ["SPILLWAY_PROFILE"] = ""
    out = os.path.abspath(arguments.out)
    os.makedirs(out, exist_ok=True)
    model, data, machine = prepare(out)
    cases = [case for case in CASES if not arguments.only or case[0] in arguments.only]
    predictions = {name: predict(model, machine, options) for name, options in cases}
    with open(os.path.join(out, "predictions.json"), "w", encoding="utf-8") as file:
        json.dump(predictions, file, indent=1)
        file.flush()
        os.fsync(file.fileno())

    print("| case | predicted | measured | error | clock predicted, measured | bytes, memory |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    errors = []
    for name, options in cases:
        told = predictions[name]
        times = told["times"]
        step_s, moved, clock, memory = measure_well(model, data, os.path.join(out, "run"),
                                                    offered(told), arguments.steps)
        error = times["step_s"] / step_s - 1
        errors.append(abs(error))
        print(f"| {name} | {times['step_s']:.3f} s | {step_s:.3f} s | {100 * error:+.1f}% | "
              f"{times['step_clock']}, {clock} | {differences(told, moved, memory)} |",
              flush=True)
    print(f"\nerror: {100 * statistics.median(errors):.1f}% in the median, "
          f"{100 * max(errors):.1f}% at worst, of {len(errors)} cases")


if __name__ == "__main__":
    main()
