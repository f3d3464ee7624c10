#!/usr/bin/env python3
"""The lines of kernels/cuda/ that no test executes on the CPU stand-in: none, or with a reason.

`make coverage-cuda` builds the configuration that counts (CONFIG=coverage, gcc's --coverage without
optimisation) and comes here. Its unit tests run once; a line counts as executed when
each instance of its template has been. An error's branch is executed by a call that fails
(STANDIN_FAIL, tests/test_cuda_errors.c). What EXCUSED names needs no test and must not have one.
The last line is "N lines, N executed, N excused, N missed".

    tests/coverage_cuda.py
"""
import glob
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "build", "coverage")
SOURCES = "kernels/cuda/"
TESTS = ["test_cuda_*"]

# A file and its line, blanks aside: why no test executes it.
EXCUSED = {}


def objects(extension):
    return [path for part in ("", "standin")
            for path in sorted(glob.glob(os.path.join(FOLDER, part, SOURCES, "*" + extension)))]


def run_tests():
    for path in objects(".gcda"):
        os.remove(path)
    ran = subprocess.run([sys.executable, "tests/run.py", "--config", "coverage", *TESTS], cwd=ROOT,
                         stdin=subprocess.DEVNULL, check=False)
    return ran.returncode == 0


def counts():
    """{(file, line number): how often it was executed}, the least of all its instances."""
    found = {}
    notes = objects(".gcno")
    if not notes:
        sys.exit("coverage_cuda: nothing is built in build/coverage ('make coverage-cuda')")
    for path in notes:
        said = subprocess.run(["gcov", "--json-format", "--stdout", path], cwd=ROOT, check=True,
                              stdout=subprocess.PIPE, text=True).stdout
        for file in json.loads(said)["files"]:
            name = os.path.normpath(file["file"])
            if name.startswith(SOURCES):
                for line in file["lines"]:
                    key = name, line["line_number"]
                    found[key] = min(found.get(key, line["count"]), line["count"])
    return found


def source_of(file, number):
    with open(os.path.join(ROOT, file), encoding="utf-8") as source:
        return source.read().splitlines()[number - 1].strip()


def main():
    passed = run_tests()
    found = counts()
    idle = {key: source_of(*key) for key in sorted(found) if found[key] == 0}
    excused = {key: EXCUSED[key[0], text] for key, text in idle.items()
               if (key[0], text) in EXCUSED}
    missed = len(idle) - len(excused)
    for key, text in idle.items():
        why = f"\n       excused: {excused[key]}" if key in excused else ""
        print(f"{'ok' if key in excused else 'MISSED'} {key[0]}:{key[1]}: {text}{why}")
    for file, text in sorted(set(EXCUSED) - {(f, idle[f, n]) for f, n in excused}):
        missed += 1
        print(f"MISSED {file}: '{text}' is excused, and is executed or not there")
    print(f"{len(found)} lines, {len(found) - len(idle)} executed, {len(excused)} excused, "
          f"{missed} missed")
    return 0 if passed and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
