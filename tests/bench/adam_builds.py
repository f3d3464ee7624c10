#!/usr/bin/env python3
"""What the CPU Adam's settings are worth: its loops, built in several ways, beside each other and
beside memory's limit, in interleaved rounds of one process on the same memory.

    tests/bench/adam_builds.py [--isa avx512] [--params 67108864] [--rounds 15] [--threads 1,2]
                               [--against COMMIT] [NAME=FLAGS ...]

Without NAME=FLAGS the settings of BUILDS are compared; one more is for example
"far=-DSW_ADAM_PREFETCH_BYTES=8192". With --against the loops of that commit are one more, "before".
Prints a table per thread count and mix: ns per parameter, and the ratio to the limit (1 is all that
memory gives).
"""
import argparse
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
KERNEL = "cpu_adam/adam_kernel.h"
BUILDS = {
    "as_it_is": "",
    "no_prefetch": "-DSW_ADAM_PREFETCH_BYTES=0",
    "prefetch_512": "-DSW_ADAM_PREFETCH_BYTES=512",
    "prefetch_1024": "-DSW_ADAM_PREFETCH_BYTES=1024",
    "prefetch_4096": "-DSW_ADAM_PREFETCH_BYTES=4096",
    "into_level_2": "-DSW_ADAM_PREFETCH_TO=2",
    "past_level_1": "-DSW_ADAM_PREFETCH_TO=0",
    "tile_64": "-DSW_ADAM_TILE=64",
    "tile_128": "-DSW_ADAM_TILE=128",
    "weight_through_caches": "-DSW_ADAM_WEIGHT_AROUND=0",
}
MIXES = [("BF16 gradient and weight", 0, 1), ("FP32 gradient, BF16 weight", 1, 1),
         ("FP32 gradient, no weight", 1, 0)]


def made(name):
    """A variable of the Makefile, as words."""
    text = f"include Makefile\nsaid:\n\t@echo '$({name})'\n"
    return subprocess.run(["make", "-s", "--no-print-directory", "-f", "-", "PROBE=0", "said"],
                          cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                          input=text).stdout.split()


def build(folder, isa, builds, before):
    """The program with every build in it."""
    flags = [f for f in made("cflags") if f not in ("-Werror", "-MMD", "-MP",
                                                  "-Wmissing-prototypes")]
    objects = []
    for name, own in builds.items():
        source = os.path.join(folder, f"{name}.c")
        kernel = before if name == "before" else KERNEL
        with open(source, "w", encoding="utf-8") as file:
            file.write(f'#define SW_ADAM_ISA {name}\n#include "{kernel}"\n')
        objects.append(os.path.join(folder, f"{name}.o"))
        subprocess.run(["gcc", *flags, "-O3", *made(f"isa_{isa}"), *own.split(), "-c", source,
                        "-o", objects[-1]], cwd=ROOT, check=True)
    program = os.path.join(folder, "adam_builds")
    subprocess.run(["gcc", *flags, "-DBUILDS=" + " ".join(f"B({n})" for n in builds),
                    "tests/bench/adam_builds.c", *objects, "build/release/libspillway.a",
                    *made("libs"), "-o", program], cwd=ROOT, check=True)
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="avx512", choices=["avx512", "avx2", "scalar"])
    parser.add_argument("--params", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("builds", nargs="*", metavar="NAME=FLAGS")
    args = parser.parse_args()
    builds = dict(b.split("=", 1) for b in args.builds) or BUILDS
    subprocess.run(["make", "-s", "build/release/libspillway.a"], cwd=ROOT, check=True,
                   stdout=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        before = os.path.join(folder, "before.h")
        if args.against:
            with open(before, "w", encoding="utf-8") as file:
                subprocess.run(["git", "show", f"{args.against}:{KERNEL}"], cwd=ROOT, check=True,
                               stdout=file)
            builds = {"before": "", **builds}
        program = build(folder, args.isa, builds, before)
        for threads in sorted({int(n) for n in args.threads.split(",")}):
            for mix, wide, weight in MIXES:
                ran = subprocess.run([program, args.isa, str(args.params), str(threads),
                                      str(args.rounds), str(wide), str(weight)], check=True,
                                     stdout=subprocess.PIPE, text=True)
                print(f"\n{mix}, {threads} thread{'s' * (threads > 1)}, {args.isa}\n\n"
                      "| build | ns/param | ratio |\n| --- | ---: | ---: |")
                for line in ran.stdout.splitlines():
                    print("| " + " | ".join(line.split("\t")) + " |")
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
