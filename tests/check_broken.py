#!/usr/bin/env python3
"""Plants each bug of tests/broken/ in a copy of the tree and demands that its test catches it.

A variant is a text file tests/broken/NAME.broken. Lines starting with # say nothing.

    promise: The update adds eps outside the root.
    file: cpu_adam/adam_scalar.c
    old: sqrtf(v) + eps
    new: sqrtf(v + eps)
    test: tests/test_adam

`old` is exact text and stands exactly once in the file; leading blanks do not belong to it. Text of
several lines, or with leading blanks, follows on lines of its own, each after a bar:

    old:
    |    if (ret < 0)
    |        return ret;

file, old and new may come several times, in this order. `test` is tests/test_NAME or tests/NAME.py,
the latter with the names of single tests after it if wanted. `config: poison` builds and runs in
that configuration instead of release.

The copy lives in build/broken/ with the objects of build/, so a variant costs one or two
compilations and its test. Every test is run on the unmodified copy first: a variant counts as
caught only if its test passes there and fails here. The last line is "N caught, N missed".

    tests/check_broken.py [--list] [NAME...]
"""
import argparse
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COPY = os.path.join(ROOT, "build", "broken")
FOLDER = os.path.join(ROOT, "tests", "broken")

HANG_S_MIN, HANG_FACTOR = 20, 10  # a test that takes longer than its usual time hangs


class BadVariant(Exception):
    """A variant that cannot be applied, with the reason."""


class Variant:
    def __init__(self, path):
        self.name = os.path.splitext(os.path.basename(path))[0]
        fields = {"promise": [], "file": [], "old": [], "new": [], "test": [], "config": []}
        key = None
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file.read().split("\n"), 1):
                if line.startswith("|"):
                    if key not in ("old", "new"):
                        raise BadVariant(f"line {number}: a bar belongs under old: or new:")
                    fields[key][-1] = (fields[key][-1] or []) + [line[1:]]
                elif line.strip() and not line.startswith("#"):
                    key, colon, value = line.partition(":")
                    if not colon or key not in fields:
                        raise BadVariant(f"line {number}: expected one of {', '.join(fields)}")
                    fields[key].append([value.strip()] if value.strip() else None)
        text = {k: ["\n".join(v or []) for v in values] for k, values in fields.items()}
        if len(text["promise"]) != 1 or len(text["test"]) != 1:
            raise BadVariant("wants one promise: and one test:")
        if not text["file"] or not len(text["file"]) == len(text["old"]) == len(text["new"]):
            raise BadVariant("wants file:, old: and new: once for each change")
        self.promise, self.config = text["promise"][0], (text["config"] or ["release"])[0]
        self.edits = list(zip(text["file"], text["old"], text["new"]))
        self.test, *self.cases = text["test"][0].split()
        if not re.fullmatch(r"tests/(test_\w+|\w+\.py)", self.test):
            raise BadVariant(f"test: '{self.test}' is neither tests/test_NAME nor tests/NAME.py")

    def apply(self):
        """Changes the copy; returns what undo() needs."""
        changed = {}
        for file, old, new in self.edits:
            path = os.path.join(COPY, file)
            if not os.path.isfile(path):
                raise BadVariant(f"{file}: no such file")
            with open(path, encoding="utf-8") as source:
                text = source.read()
            count = text.count(old) if old else 0
            if count != 1 or old == new:
                raise BadVariant(f"{file}: the old text stands there {count} times, not once"
                                 if count != 1 else f"{file}: old and new are the same")
            changed.setdefault(path, text)
            write(path, text.replace(old, new))
        return changed

    def program(self):
        """The make target that the test needs."""
        if not self.test.endswith(".py"):
            # The plugin that such a test opens is named: make need not rebuild what is not there.
            return [f"build/{self.config}/{self.test}"] + ["standin"] * ("test_cuda" in self.test)
        release = self.config == "release"
        targets = ["build/spillway" if release else f"build/{self.config}/spillway"]
        with open(os.path.join(COPY, self.test), encoding="utf-8") as file:
            text = file.read()
        if "support_world" in text:  # a program that it runs
            targets.append(f"build/{self.config}/tests/support_world")
        if "mpirun" in text:
            targets.append(targets[0].replace("/spillway", "/libspillway_mpi.so"))
        return targets + ["standin"] * ("CPU stand-in" in text)


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def undo(changed):
    for path, text in changed.items():
        write(path, text)  # now newer than the objects of the variant


def call(command, **options):
    return subprocess.run(command, cwd=COPY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", **options)


def make_copy(*more):
    """With what is built for release, and for these configurations."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT,
                            check=True, stdout=subprocess.PIPE, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source, target = os.path.join(ROOT, name), os.path.join(COPY, name)
        if os.path.isfile(source):  # listed but deleted is possible
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(source, target)
    build = os.path.join(COPY, "build")
    os.makedirs(build, exist_ok=True)
    # Copies with their times, so that make finds them up to date.
    for name in ("release", "spillway", "libspillway_mpi.so", *more):
        source = os.path.join(ROOT, "build", name)
        if os.path.isdir(source):
            shutil.copytree(source, os.path.join(build, name))
        elif os.path.isfile(source):
            shutil.copy2(source, os.path.join(build, name))


def build(variant):
    """None, or what the compiler said."""
    # A planted bug may leave a variable unused: that is not what is to be caught.
    made = call(["make", f"CONFIG={variant.config}", f"-j{os.cpu_count()}", "CFLAGS=-Wno-error",
                 "CXXFLAGS=-Wno-error", "PROBE=0", *variant.program()],
                env={k: v for k, v in os.environ.items()
                     if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")})
    return None if made.returncode == 0 else made.stdout


def run(variant, limit_s=None):
    """(passed, failed, skipped, output) of the variant's test in the copy."""
    name = os.path.basename(variant.test)
    ran = call([sys.executable, "tests/run.py", "--config", variant.config, name]
               + (["--limit", str(limit_s)] if limit_s else [])
               + [f"--case={case}" for case in variant.cases],
               env={k: v for k, v in os.environ.items() if k != "STRICT"})
    found = re.findall(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?$", ran.stdout, re.M)
    passed, failed, skipped = (int(n or 0) for n in found[-1]) if found else (0, 1, 0)
    return passed, failed, skipped, ran.stdout


def baseline(variant):
    """(reason, seconds): None if the variant's test passes on the unmodified copy, else why it
    proves nothing; and how long it took."""
    said = build(variant)
    if said is not None:
        return f"the unmodified tree does not build:\n{said}", 0
    start = time.monotonic()
    passed, failed, skipped, output = run(variant)
    seconds = time.monotonic() - start
    if failed or not passed:
        return f"{variant.test} fails on the unmodified tree:\n{output}", seconds
    return f"{variant.test} skips tests here:\n{output}" if skipped else None, seconds


def check(variant, baselines):
    """None if caught, else the reason."""
    key = (variant.config, variant.test, *variant.cases)
    if key not in baselines:
        baselines[key] = baseline(variant)
    reason, seconds = baselines[key]
    if reason is not None:
        return reason
    changed = variant.apply()
    try:
        said = build(variant)
        if said is not None:
            return f"the variant does not build:\n{said}"
        # A bug may show as a hang: no need to sit out the test's own limit.
        passed, failed, _, output = run(variant, int(HANG_S_MIN + HANG_FACTOR * seconds))
        if failed:
            return None
        return f"{variant.test} passes all the same ({passed} passed):\n{output}"
    finally:
        undo(changed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the variants and stop")
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="start no further one after this time; which ones come first changes "
                             "with the commit")
    parser.add_argument("names", nargs="*", metavar="NAME")
    args = parser.parse_args()

    caught, missed, variants = 0, 0, []
    for file in sorted(os.listdir(FOLDER)) if os.path.isdir(FOLDER) else []:
        name, extension = os.path.splitext(file)
        if extension != ".broken" or (args.names and name not in args.names):
            continue
        try:
            variants.append(Variant(os.path.join(FOLDER, file)))
        except BadVariant as error:
            print(f"MISSED {name}: {error}", flush=True)
            missed += 1
    if args.list:
        for variant in variants:
            print(f"{variant.name}: {variant.promise} ({variant.test})")
        return 1 if missed else 0
    if not variants and not missed:
        print("no variant found")
        missed += 1

    begin, skipped = time.monotonic(), 0
    if args.seconds < math.inf:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE,
                                text=True, check=False).stdout
        variants.sort(key=lambda v: hashlib.sha256((commit + v.name).encode()).digest())
    else:
        variants.sort(key=lambda v: (v.config, v.test, v.cases, v.name))
    make_copy()
    # One test after the other: its baseline is built and run once.
    baselines = {}
    for variant in variants:
        start = time.monotonic()
        if start - begin > args.seconds:
            skipped += 1
            continue
        try:
            reason = check(variant, baselines)
        except BadVariant as error:
            reason = str(error)
        seconds = time.monotonic() - start
        if reason is None:
            caught += 1
            print(f"caught {variant.name}: {variant.promise} ({variant.test}, {seconds:.0f} s)")
        else:
            missed += 1
            lines = reason.splitlines()
            print(f"MISSED {variant.name}: {variant.promise}\n       {lines[0]}")
            print("".join(f"       | {line}\n" for line in lines[1:][-25:]), end="")
        sys.stdout.flush()
    shutil.rmtree(os.path.join(COPY, "build", "tmp"), ignore_errors=True)
    print(f"{caught} caught, {missed} missed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
