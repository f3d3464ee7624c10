"""What the stages of gpu-check share beside tests/support.py: their sizes, their lines for the
table (result, limit) and their figures for the JSON. check.py reads both."""
import json
import os
import subprocess

import support as t

TINY = bool(os.environ.get("GPU_CHECK_TINY"))  # whether it runs, not how fast
OUT = os.environ.get("GPU_CHECK_OUT") or t.ROOT
SECONDS = float(os.environ.get("GPU_CHECK_SECONDS") or 60)  # of this stage, from its start
BIN = os.path.dirname(t.SPILLWAY)
# Dense BF16 products with FP32 sums, TFLOP/s, from NVIDIA's data sheets. The first name that is
# part of the device's counts.
PEAKS = [("B200", 2250), ("H100 PCIe", 756), ("H100 NVL", 835), ("GH200", 989), ("H200", 989),
         ("H100", 989), ("A100", 312), ("A30", 165), ("A40", 150), ("A10", 125), ("L40S", 362),
         ("L4", 121), ("RTX 4090", 165), ("RTX 3090", 71)]


def result(text):
    print(f"result: {text}", flush=True)


def limit(text):
    print(f"limit: {text}", flush=True)


def figure(name, value, unit):
    print("figure: " + json.dumps({"name": name, "value": value, "unit": unit}), flush=True)


def figures_of(name):
    """{name: value} that a stage before this one has left in result.json."""
    try:
        with open(os.path.join(OUT, "result.json"), encoding="utf-8") as file:
            rows = json.load(file)["rows"]
    except (OSError, ValueError):
        return {}
    return {f["name"]: f["value"] for row in rows if row["name"] == name for f in row["figures"]}


def rates(program, mode):
    """The lines of gpu_rates or bare_rates, as (what, name, value, unit)."""
    command = [os.path.join(BIN, program), mode] + ["tiny"] * TINY
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    t.check(run.returncode == 0, f"{program} {mode}: exit status {run.returncode}: "
            f"{run.stderr.strip()[-500:]}")
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return [(x["what"], x["name"], x["value"], x["unit"]) for x in lines]


def device():
    """(what the first device is, how many there are, bytes free on the first)."""
    (_, numerics, count, _), (_, _, free, _) = rates("gpu_rates", "devices")
    return numerics, int(count), free


def is_standin(numerics):
    return "CPU stand-in" in numerics


def peak_of(numerics):
    """Published TFLOP/s, or None."""
    return next((peak for name, peak in PEAKS if name in numerics), None)


def of_peak(rate, numerics):
    peak = peak_of(numerics)
    return f"{rate / peak:.0%} of {peak}" if peak else "peak not known"
