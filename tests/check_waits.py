#!/usr/bin/env python3
"""Drops each wait of the CUDA back end in turn, in a copy of the tree, and demands that a test
shows it.

A site is one call in kernels/cuda/, engine/ or offload/, found by its name: a wait for an event or
a stream (the runtime's, or the device table's), a wait for cp.async, or a barrier of a block or a
warp. A dropped call leaves the value of its success. Tests are tried from the cheapest on until
one fails, by wrong bits, a report or a hang. Which ones:

    kernels/cuda/*.cu, .h  test_cuda_operators, test_cuda_attention, test_cuda_adam and
                           cuda_modes.py; the three programs under TSan; the tests of cuda_runs.py
    kernels/cuda/*.c       the same with test_cuda_device
    engine/, offload/      test_cuda_start, and the tests of cuda_runs.py, each for itself

A site that no test catches is a failure, unless EXCUSED names it with a reason. The last line is
"N sites, N caught", with "N excused" and "N missed" where there are such.

    tests/check_waits.py [--list] [--seconds S] [SITE...]     SITE: FILE or FILE:LINE
"""
import argparse
import glob
import math
import os
import re
import shutil
import sys
import time

import check_broken as broken

# A file and its line, blanks aside: why nothing shows when the call is dropped.
EXCUSED = {
    ("engine/trainer_load.c", "ret = t->ranks[i].device.ops->stream_sync(t->ranks[i].stream);"):
        "for the zeroing of accumulators: nothing reads those zeros, but if it came late it would "
        "erase gradients, and on the stand-in nothing brings it about in the middle of a step",
    ("engine/llama_warm_up.c", "const int over = device->ops->stream_sync(stream);"):
        "before memory is given back that products use: cudaFree waits for them, too, but nobody "
        "promises that",
}

CALL = re.compile(r"""(?P<receiver>(?:\w+(?:\[[^][]*\])?(?:->|\.))*)\b(?P<name>
    cuda(?:Stream|Event|Device)Synchronize | cudaStreamWaitEvent
  | (?:(?:sw_)?cuda_)?(?:stream_sync|stream_wait|event_wait)
  | gpu_copy_async_wait<\w+> | __syncthreads(?:_\w+)? | __syncwarp)\s*\(""", re.X)
FOLDERS = ("kernels/cuda/*.c", "engine/*.c", "offload/*.c", "kernels/cuda/*.h", "kernels/cuda/*.cu")
KERNEL_TESTS = ["tests/test_cuda_operators", "tests/test_cuda_attention", "tests/test_cuda_adam"]
DEVICE_TESTS = ["tests/test_cuda_device"]


class Test(broken.Variant):
    """What check_broken builds and runs, without a bug of its own."""

    def __init__(self, test, *cases, config="release"):  # pylint: disable=super-init-not-called
        self.test, self.cases, self.config = test, cases, config
        self.name = " ".join([test, *cases]) + (f" ({config})" if config != "release" else "")
        self.reason, self.seconds = None, 0.0


class Site:
    def __init__(self, file, text, found, end):
        self.file, self.at, self.end = file, found.start(), end
        self.line = text.count("\n", 0, found.start("name")) + 1
        self.name = f"{file}:{self.line}"
        self.source = text.splitlines()[self.line - 1].strip()
        arguments = text[found.end() - 1:end]
        if found["name"].startswith("cuda") and "_" not in found["name"]:
            self.left = "cudaSuccess"
        elif found["name"].startswith("__syncthreads_"):
            self.left = arguments  # the thread's own vote
        elif found["name"].startswith(("__", "gpu_")):
            self.left = "((void)0)"
        else:
            self.left = "0"

    def apply(self):
        path = os.path.join(broken.COPY, self.file)
        with open(path, encoding="utf-8") as source:
            text = source.read()
        broken.write(path, text[:self.at] + self.left + text[self.end:])
        return {path: text}


def without_comments(text):
    """As long as the text, so that places stay."""
    def blank(found):
        return re.sub(r"[^\n]", " ", found.group())
    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)


def closing(text, at):
    """Behind the bracket that closes the one before `at`."""
    depth = 1
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def find_sites():
    sites = []
    for pattern in FOLDERS:
        for path in sorted(glob.glob(os.path.join(broken.ROOT, pattern))):
            file = os.path.relpath(path, broken.ROOT)
            with open(path, encoding="utf-8") as source:
                text = source.read()
            code = without_comments(text)
            for found in CALL.finditer(code):
                before = re.search(r"(\w+|\*)\s*$", code[:found.start()])
                if before and before[1] != "return" and before[1] != "else":
                    continue  # a definition: its type stands there
                sites.append(Site(file, text, found, closing(code, found.end())))
    return sites


def cases_of(test):
    with open(os.path.join(broken.ROOT, test), encoding="utf-8") as file:
        return re.findall(r"^@t\.test\ndef (\w+)", file.read(), re.M)


class Tests:
    """The tests of each kind of file, with what they take on the unmodified copy."""

    def __init__(self):
        whole = [Test("tests/cuda_runs.py", case) for case in cases_of("tests/cuda_runs.py")]
        kernels = [Test(name) for name in KERNEL_TESTS] + [Test("tests/cuda_modes.py")]
        device = [Test(name) for name in DEVICE_TESTS]
        races = [Test(name, config="tsan") for name in DEVICE_TESTS + KERNEL_TESTS]
        self.by_kind = {"device": [device + kernels, races, whole],
                        "kernel": [kernels, races[len(device):], whole],
                        "engine": [[Test("tests/test_cuda_start")], whole]}
        self.known = set()

    def groups(self, file):
        if not file.startswith("kernels/"):
            return self.by_kind["engine"]
        return self.by_kind["device" if file.endswith(".c") else "kernel"]

    def measure(self, group):
        """Before a site is dropped: a test that fails here proves nothing. Sorts by time."""
        for test in group:
            if test not in self.known:
                self.known.add(test)
                test.reason, test.seconds = broken.baseline(test)
                print(f"       {test.name}: {test.seconds:.1f} s without a drop", flush=True)
                if test.reason:
                    print(f"FAIL {test.name}: {test.reason}", flush=True)
        group.sort(key=lambda t: t.seconds)


def catcher(site, tests):
    """The first test that the dropped wait fails, or None; and how many were tried."""
    tried = 0
    for group in tests.groups(site.file):
        tests.measure(group)
        changed = site.apply()
        try:
            for test in group:
                if test.reason:
                    continue
                said = broken.build(test)
                if said is not None:
                    raise broken.BadVariant(f"the copy without it does not build:\n{said}")
                tried += 1
                limit_s = int(broken.HANG_S_MIN + broken.HANG_FACTOR * test.seconds)
                if broken.run(test, limit_s)[1]:
                    return test, tried
        finally:
            broken.undo(changed)
    return None, tried


def wanted(site, names):
    return not names or any(site.name == n or site.file == n for n in names)


def check(sites, tests, seconds):
    """(caught, missed, left out for want of time)."""
    caught = missed = left = 0
    begin = time.monotonic()
    for site in sites:
        start = time.monotonic()
        if start - begin > seconds:
            left += 1
            continue
        try:
            test, tried = catcher(site, tests)
            reason = f"none of {tried} tests shows it" if test is None else None
        except broken.BadVariant as error:
            reason = str(error)
        took = f"{time.monotonic() - start:.0f} s"
        if reason is None:
            caught += 1
            print(f"caught {site.name}: {site.source} ({test.name}, {took})", flush=True)
        else:
            missed += 1
            print(f"MISSED {site.name}: {site.source} ({took})\n       {reason}", flush=True)
    return caught, missed, left


def main():
    parser = argparse.ArgumentParser(description="Drops each wait in turn; a test has to show it.")
    parser.add_argument("--list", action="store_true", help="name the sites and stop")
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="start no further one after this time")
    parser.add_argument("names", nargs="*", metavar="SITE", help="FILE or FILE:LINE")
    args = parser.parse_args()
    broken.COPY = os.path.join(broken.ROOT, "build", "waits")
    every = find_sites()
    sites = [s for s in every if wanted(s, args.names)]
    excused = [s for s in sites if (s.file, s.source) in EXCUSED]
    stale = set(EXCUSED) - {(s.file, s.source) for s in every}
    for site in sites if args.list else excused:
        note = EXCUSED.get((site.file, site.source))
        print(f"{site.name}: {site.source}" + (f"\n       excused: {note}" if note else ""))
    for file, source in sorted(stale):
        print(f"MISSED {file}: no wait reads '{source}', which is excused")
    if args.list:
        return 1 if stale else 0
    broken.make_copy("tsan")
    caught, missed, left = check([s for s in sites if s not in excused], Tests(), args.seconds)
    missed += len(stale) + (not sites)
    shutil.rmtree(os.path.join(broken.COPY, "build", "tmp"), ignore_errors=True)
    more = [f"{n} {word}" for n, word in ((len(excused), "excused"), (missed, "missed"),
                                          (left, "left out")) if n]
    print(", ".join([f"{len(sites)} sites", f"{caught} caught", *more]))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
