#!/usr/bin/env python3
"""Is the memory limit of `spillway bench adam` a limit? Builds tests/bench/stream_referee.c and
lets it run beside every way of offload/stream.h, in interleaved rounds on the same memory.

    tests/bench/adam_limit.py [--params 67108864] [--rounds 9] [--threads 1,2] [--least 0.95]
                              [--json]

The ratio is the limit over the referee's best. Exits with 1 where one is below --least.
"""
import argparse
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
REFEREE = "build/release/tests/bench/stream_referee"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--least", type=float, default=0.95)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    subprocess.run(["make", "-s", REFEREE], cwd=ROOT, check=True, stdout=sys.stderr)
    rows = []
    for threads in sorted({int(n) for n in args.threads.split(",")}):
        ran = subprocess.run([REFEREE, str(args.params), str(threads), str(args.rounds)], cwd=ROOT,
                             check=True, stdout=subprocess.PIPE, text=True)
        rows += [json.loads(line) for line in ran.stdout.splitlines()]
    if args.json:
        print(json.dumps({"schema": 1, "rows": rows}, indent=2))
    else:
        print(f"{args.params} parameters, {args.rounds} rounds, {rows[0]['variant']}; GB/s\n")
        print("| threads | gradient | weight | referee | its way | limit | its way | ratio |")
        print("| ---: | --- | --- | ---: | --- | ---: | --- | ---: |")
        for r in rows:
            print(f"| {r['threads']} | {r['grad']} | {r['weight_out']} "
                  f"| {r['referee_gb_per_s']:.1f} | {r['referee']} | {r['limit_gb_per_s']:.1f} "
                  f"| {r['limit']} | {r['ratio']:.3f} |")
    return 0 if min(r["ratio"] for r in rows) >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
