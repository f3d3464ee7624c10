#!/usr/bin/env python3
"""What the compiler says of the CUDA kernels: no hot one may spill registers. And the table of
docs/kernels.md.

    tests/kernel_report.py            checks the report of the last build, for every target
    tests/kernel_report.py --table    registers, shared memory, and the least time of each kernel

The build leaves ptxas's report beside each object (build/release/kernels/cuda/*.ptxas). A kernel is
hot unless it is named in COLD. A kernel that FLOORS does not know is an error: the table has them
all.
"""
import argparse
import glob
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
REPORTS = os.path.join(ROOT, "build", "release", "kernels", "cuda", "*.ptxas")

COLD = set()  # kernels that may spill, each with the reason

# A layer of an 8B model (LLAMA 3's shapes) and its head, two rows of 4,096 tokens, BF16.
ROWS, TIME, HIDDEN, INTER, HEADS, KV, DIM, VOCAB = 2, 4096, 4096, 14336, 32, 8, 128, 128256
N = ROWS * TIME
LAYER = 2 * HIDDEN + HIDDEN * DIM * (2 * HEADS + 2 * KV) + 3 * HIDDEN * INTER
SLABS = 128
PRODUCT = 2 * ROWS * HEADS * DIM * TIME * (TIME + 1) / 2  # operations of one causal product

# By file and kernel: what it does, the fewest bytes, and the operations of tensor cores. Sums and
# functions element by element take less time than their bytes, so they are left out.
FLOORS = {
    "embed gather": ("n x hidden, read and written", N * HIDDEN * 4 + 4 * N, 0),
    "embed scatter": ("n gradients, as many FP32 rows changed", N * HIDDEN * 10 + 4 * N, 0),
    "rmsnorm forward": ("n x hidden, read and written", N * HIDDEN * 4 + 4 * N, 0),
    "rmsnorm partial_dw": ("dy and x read", N * HIDDEN * 4 + SLABS * HIDDEN * 4, 0),
    "rmsnorm whole_dw": ("128 slabs added up", SLABS * HIDDEN * 4 + HIDDEN * 4, 0),
    "rmsnorm backward_dx": ("dy and x read, dx added to", N * HIDDEN * 8, 0),
    "pointwise rope": ("q of n tokens, read and written", N * HEADS * DIM * 4 + TIME * DIM * 4, 0),
    "pointwise swiglu": ("gate and up read, the product written", N * INTER * 6, 0),
    "pointwise swiglu_backward": ("three read, two written", N * INTER * 10, 0),
    "pointwise round_to": ("a layer, FP32 to BF16", LAYER * 6, 0),
    "norm round_norm": ("a layer, FP32 to BF16 and its squares", LAYER * 6, 0),
    "rank_sum sum_ranks": ("a layer's shards of 8 ranks, BF16, read; one of FP32 written",
                           LAYER * 2 + LAYER // 8 * 4, 0),
    "word_sum word_parts": ("a layer's weights in BF16, read", LAYER * 2, 0),
    "norm bad_begin": ("one record", 16, 0),
    "norm bad_end": ("one record", 16, 0),
    "norm sum_in_order": ("a loss for each token", N * 4, 0),
    "softmax row_stats": ("n x vocabulary of FP32, read", N * VOCAB * 4, 0),
    "softmax row_loss": ("statistics of n tokens", N * 16, 0),
    "softmax row_gradient": ("n x vocabulary, FP32 read, BF16 written", N * VOCAB * 6, 0),
    "attention forward": ("q, k, v read, out written; two products",
                          N * DIM * 2 * (2 * HEADS + 2 * KV), 2 * PRODUCT),
    "attention backward_by_keys": ("q, k, v, dout read, dk, dv written; four products",
                                   N * DIM * 2 * (2 * HEADS + 4 * KV), 4 * PRODUCT),
    "attention backward_by_queries": ("q, k, v, dout read, dq written; three products",
                                      N * DIM * 2 * (3 * HEADS + 2 * KV), 3 * PRODUCT),
    "attention_any delta_of_rows": ("dout and out read", N * HEADS * DIM * 4, 0),
    "attention_any any_forward": ("the fallback: FP32, no tensor cores", None, None),
    "attention_any any_by_keys": ("the fallback", None, None),
    "attention_any any_by_queries": ("the fallback", None, None),
    "adam update": ("a layer: state read and written, gradient and weight in BF16", LAYER * 28, 0),
}

# NVIDIA's data sheets of the SXM modules: bytes/s of memory, dense BF16 operations/s.
PEAKS = {"H100": (3.35e12, 989e12), "H200": (4.8e12, 989e12)}
TARGET = "sm_90"  # theirs


def demangled(names):
    run = subprocess.run(["c++filt", "-p"], input="\n".join(names), text=True, check=True,
                         stdout=subprocess.PIPE)
    return [re.sub(r"^.*?([A-Za-z_]\w*(?:<.*>)?)$", r"\1", line.replace("(sw_dtype)", "dtype "))
            for line in run.stdout.splitlines()]


def read_reports():
    """[(file, kernel with its template's arguments, target, registers, static bytes, spilled)]"""
    found = []
    for path in sorted(glob.glob(REPORTS)):
        with open(path, encoding="utf-8") as file:
            parts = re.split(r"Compiling entry function '", file.read())[1:]
        names = demangled([part.split("'")[0] for part in parts])
        for part, name in zip(parts, names):
            spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
            found.append((os.path.basename(path).split(".")[0], name,
                          re.search(r"for '(sm_\d+\w*)'", part)[1],
                          int(re.search(r"Used (\d+) registers", part)[1]),
                          int((re.search(r"(\d+) bytes smem", part) or (0, 0))[1]), spilled))
    return found


def number(target):
    return int(re.search(r"\d+", target)[0])


def check(reports):
    bad = 0
    for file, name, target, _, _, spilled in reports:
        kernel = f"{file} {name.split('<')[0]}"
        if kernel not in FLOORS:
            print(f"FAIL {kernel} is not in the table of {os.path.basename(__file__)}")
            bad += 1
        if spilled and kernel not in COLD:
            print(f"FAIL {file} {name} spills {spilled} bytes on {target}")
            bad += 1
    targets = sorted({r[2] for r in reports}, key=number)
    print(f"{len(reports)} kernels for {', '.join(targets)}")
    print(f"{len(reports) - bad} passed, {bad} failed")
    return bad > 0


def times_us(moved, operations):
    return [max(moved / memory, operations / cores) * 1e6 for memory, cores in PEAKS.values()]


def table(reports):
    targets = {r[2] for r in reports}
    target = TARGET if TARGET in targets else max(targets, key=number)
    print(f"| kernel | registers, static shared memory ({target}) | work | bytes | operations | "
          + " | ".join(f"{card}, us" for card in PEAKS) + " |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for kernel, (what, moved, operations) in FLOORS.items():
        mine = [r for r in reports if f"{r[0]} {r[1].split('<')[0]}" == kernel and r[2] == target]
        # Attention of the shape above; of others the variant with the most.
        shaped = [r for r in mine if r[1].endswith(f"<{DIM}>")] or mine
        registers, shared = max((r[3], r[4]) for r in shaped)
        cells = ["", "", "", ""]
        if moved is not None:
            cells = [f"{moved / 1e6:,.1f} MB" if moved >= 1e5 else f"{moved:,} B",
                     f"{operations / 1e9:,.0f} G" if operations else "",
                     *(f"{us:,.1f}" if us >= 0.05 else "" for us in times_us(moved, operations))]
        print(f"| {kernel.replace(' ', '.cu ')} | {registers}, {shared:,} B | {what} | "
              + " | ".join(cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--table", action="store_true", help="print the table of docs/kernels.md")
    args = parser.parse_args()
    reports = read_reports()
    if not reports:
        print("no report of the compiler: built without nvcc")
        print("0 passed, 0 failed")
        return 0
    if args.table:
        table(reports)
        return 0
    return check(reports)


if __name__ == "__main__":
    sys.exit(main())
