#!/usr/bin/env python3
"""Runs every test of one build configuration and says, on the last line, how it went.

Two kinds of tests:
  build/CONFIG/tests/test_NAME   a cmocka program, one for each tests/test_NAME.c
  tests/NAME.py                  a whole-program test: started in the repository's root with
                                 SPILLWAY naming the program, prints lines "ok NAME",
                                 "FAIL NAME: reason" and "skip NAME: reason", and exits with 0
                                 only if nothing failed (tests/support.py does all this)

A program that crashes, passes its time limit, reports no test, or exits with a status that its
lines do not explain counts as one more failure. A file whose first 40 lines hold the words
"time limit: N s" has that limit instead of the usual one; one with the words "runs alone" has the
machine to itself, the others run side by side. One that speaks of the "CPU stand-in" there needs
what is built where CUDA's headers are, and is left out elsewhere; one that is "Of the release
program alone" is left out of other configurations. With STRICT=1 a skip is a failure.

    tests/run.py [--config NAME] [--list] [--verbose] [--case NAME] [--limit S] [--jobs N]
                 [PATTERN...]
    tests/run.py [--config NAME] --exec COMMAND...
"""
import argparse
import fnmatch
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# In tests/, but no tests themselves.
TOOLS = {"run.py", "kernel_report.py", "support.py", "support_processes.py", "check_broken.py",
         "check_waits.py", "coverage_cuda.py", "tidy.py"}
TIME_LIMIT_S = 150
# How much longer a configuration may take.
SLOWDOWN = {"asan": 4, "tsan": 8, "debug": 3, "coverage": 4}
OUTPUT_LINES_MAX = 120  # shown of one failing program
CMOCKA_LINE = re.compile(r"\[ *(RUN|OK|FAILED|SKIPPED|ERROR) *\] (\S.*)$")
SCRIPT_LINE = re.compile(r"(ok|FAIL|skip) ([^:]+)(?:: (.*))?$")


class Program:
    """One test program and, after run(), what it reported."""

    def __init__(self, name, source, command):
        self.name, self.source, self.command = name, source, command
        self.passed, self.failed, self.skipped = [], [], []  # the last two: (name, reason)
        self.output, self.seconds, self.limit_s, self.child = "", 0.0, None, None
        with open(source, encoding="utf-8") as file:
            head = "".join(file.readlines()[:40])
        found = re.search(r"time limit: (\d+) s", head)
        self.own_limit_s = int(found.group(1)) if found else TIME_LIMIT_S
        self.alone = "runs alone" in head
        self.needs_standin = "CPU stand-in" in head
        self.release_alone = "Of the release program alone" in head

    def time_limit_s(self, config):
        return self.limit_s or self.own_limit_s * SLOWDOWN.get(config, 1)

    def run(self, config, env):
        start, limit = time.monotonic(), self.time_limit_s(config)
        timed_out = False
        self.child = subprocess.Popen(self.command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                      start_new_session=True)
        try:
            out, _ = self.child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            timed_out = True
            kill_group(self.child.pid)
            out, _ = self.child.communicate()
        kill_group(self.child.pid)  # whatever it left running
        status = self.child.returncode
        self.seconds = time.monotonic() - start
        self.output = out.decode("utf-8", "replace")
        (self.read_script if self.source.endswith(".py") else self.read_cmocka)()
        self.judge(status, timed_out, limit)

    def read_cmocka(self):
        current, said, announced = None, "", 0
        for line in self.output.splitlines():
            found = CMOCKA_LINE.search(line)
            if not found:
                start = re.search(r"\[=+\] .*Running (\d+) test", line)
                announced += int(start.group(1)) if start else 0
                said = line if line.strip() and not line.startswith("[") else said
                continue
            word, name = found.group(1), found.group(2).strip()
            if word == "RUN":
                if current is not None:
                    self.failed.append((current, "ended without a result"))
                current, said = name, ""
            elif name == current:  # the closing list of failed tests repeats names
                if word == "OK":
                    self.passed.append(name)
                elif word == "SKIPPED":
                    self.skipped.append((name, said.strip() or "no reason given"))
                else:
                    self.failed.append((name, "failed"))
                current = None
        if current is not None:
            self.failed.append((current, "ended without a result"))
        seen = len(self.passed) + len(self.failed) + len(self.skipped)
        if seen != announced:
            self.failed.append((self.name, f"{announced} tests announced, {seen} reported"))

    def read_script(self):
        for line in self.output.splitlines():
            found = SCRIPT_LINE.match(line)
            if not found:
                continue
            word, name, reason = found.group(1), found.group(2), found.group(3) or "no reason given"
            if word == "ok":
                self.passed.append(name)
            elif word == "skip":
                self.skipped.append((name, reason))
            else:
                self.failed.append((name, reason))

    def judge(self, status, timed_out, limit):
        if timed_out:
            self.failed.append((self.name, f"killed after its time limit of {limit} s"))
        elif status < 0:
            self.failed.append((self.name, f"died of {signal.Signals(-status).name}"))
        elif status != 0 and not self.failed:
            self.failed.append((self.name, f"exit status {status}, though no test failed"))
        elif not (self.passed or self.failed or self.skipped):
            self.failed.append((self.name, "reported no test"))
        elif status == 0 and self.failed:
            self.failed.append((self.name, "exit status 0, though a test failed"))


def kill_group(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def find_archer():
    """clang's OpenMP runtime tells TSan about its barriers through this tool."""
    for pattern in ("/usr/lib/llvm-*/lib/libarcher.so", "/usr/lib/*/libarcher.so"):
        found = sorted(glob.glob(pattern), key=lambda p: [int(n) for n in re.findall(r"\d+", p)])
        if found:
            return found[-1]
    return None


def wrapper(config):
    """TSan before LLVM 18 stops where the kernel spreads addresses wider than it knows
    (vm.mmap_rnd_bits); without randomisation it runs everywhere. A container may refuse that."""
    command = ["setarch", "-R"]
    if config != "tsan" or not shutil.which(command[0]):
        return []
    refused = subprocess.run(command + ["true"], stderr=subprocess.DEVNULL).returncode
    return [] if refused else command


def environment(config):
    env = dict(os.environ)
    env["SPILLWAY_PROFILE"] = ""  # what somebody measured here once decides no test
    env["CONFIG"] = config
    env["SPILLWAY"] = os.path.join(ROOT, "build", "spillway" if config == "release"
                                   else os.path.join(config, "spillway"))
    env["CMOCKA_MESSAGE_OUTPUT"] = "STDOUT"
    env["PYTHONPATH"] = os.path.join(ROOT, "tests")
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["LC_ALL"] = "C.UTF-8"
    if config == "asan":
        env["ASAN_OPTIONS"] = "detect_leaks=1:strict_string_checks=1:exitcode=99"
        supp = os.path.join(ROOT, "tests", "lsan.supp")
        env["LSAN_OPTIONS"] = f"suppressions={supp}:print_suppressions=0"
        env["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
    if config == "tsan":
        supp = os.path.join(ROOT, "tests", "tsan.supp")
        env["TSAN_OPTIONS"] = (f"suppressions={supp}:print_suppressions=0:exitcode=66:"
                               "ignore_noninstrumented_modules=1:history_size=5")
        archer = find_archer()
        if archer:
            env["OMP_TOOL_LIBRARIES"] = archer
        # Else clang's OpenMP learns the cores by running a thread on each of them in turn, and a
        # test of masks may see it there.
        env["KMP_TOPOLOGY_METHOD"] = "cpuinfo"
    return env


def matches(program, patterns):
    return any(fnmatch.fnmatch(program.name, x) or os.path.splitext(program.name)[0] == x
               for x in patterns)


def find_programs(config, patterns):
    folder = os.path.join(ROOT, "tests")
    programs = []
    for file in sorted(os.listdir(folder)):
        source, stem = os.path.join(folder, file), os.path.splitext(file)[0]
        if file.startswith("test_") and file.endswith(".c"):
            binary = os.path.join(ROOT, "build", config, "tests", stem)
            programs.append(Program(stem, source, [binary]))
        elif file.endswith(".py") and file not in TOOLS:
            programs.append(Program(file, source, [sys.executable, source]))
    # The long ones first; the small ones fill what they leave, so that none is alone at the end.
    programs.sort(key=lambda p: (not p.source.endswith(".py"), -p.own_limit_s))
    for x in patterns:
        if not any(matches(p, [x.removeprefix("no:")]) for p in programs):
            sys.exit(f"run.py: no test program is named {x.removeprefix('no:')}")
    without = [x[len("no:"):] for x in patterns if x.startswith("no:")]
    patterns = [x for x in patterns if not x.startswith("no:")]
    found = [p for p in programs if not matches(p, without) and
             (not patterns or matches(p, patterns))]
    if config != "release":
        found = [p for p in found if not p.release_alone]
    if not os.path.exists(os.path.join(ROOT, standin(config))):
        absent = [p.name for p in found if p.needs_standin]
        if absent:
            print(f"left out, as CUDA's headers were not here to build {standin(config)}: "
                  + " ".join(absent))
        found = [p for p in found if not p.needs_standin]
    return found


def standin(config):
    return os.path.join("build", "" if config == "release" else config, "standin",
                        "libspillway_cuda.so")


def report(program, strict, verbose):
    bad = program.failed or (strict and program.skipped)
    counts = f"{len(program.passed)} passed"
    if program.failed:
        counts += f", {len(program.failed)} failed"
    if program.skipped:
        counts += f", {len(program.skipped)} skipped"
    print(f"{'FAIL' if bad else 'ok  '} {program.name:<28} {counts}  ({program.seconds:.1f} s)")
    if verbose:
        for name in program.passed:
            print(f"       ok {name}")
    for name, reason in program.skipped:
        print(f"       {'FAIL (skipped under STRICT=1)' if strict else 'skip'} {name}: {reason}")
    for name, reason in program.failed:
        print(f"       FAIL {name}: {reason}")
    if program.failed:
        lines = program.output.splitlines()
        if len(lines) > OUTPUT_LINES_MAX:
            head = OUTPUT_LINES_MAX // 3
            tail = OUTPUT_LINES_MAX - head
            lines = lines[:head] + [f"... {len(lines) - head - tail} lines left out ..."] \
                + lines[-tail:]
        for line in lines:
            print(f"       | {line}")
    sys.stdout.flush()
    return bool(bad)


class Runner:
    """Runs programs, `jobs` at a time, then those that must be alone; reports each as it ends."""

    def __init__(self, programs, config, env, strict, verbose):
        self.config, self.env, self.strict, self.verbose = config, env, strict, verbose
        self.side_by_side = [p for p in programs if not p.alone]
        self.alone = [p for p in programs if p.alone]
        self.lock, self.running, self.bad, self.stopped = threading.Lock(), set(), [], False

    def run_one(self, program):
        try:
            program.run(self.config, self.env)
        except OSError as error:
            program.failed.append((program.name, f"could not be started: {error}"))
        with self.lock:
            if not self.stopped and report(program, self.strict, self.verbose):
                self.bad.append(program.name)

    def work(self, queue):
        while True:
            with self.lock:
                if not queue or self.stopped:
                    return
                program = queue.pop(0)
                self.running.add(program)
            self.run_one(program)
            with self.lock:
                self.running.remove(program)

    def run(self, jobs):
        for queue, count in ((self.side_by_side, jobs), (self.alone, 1)):
            threads = [threading.Thread(target=self.work, args=(queue,)) for _ in range(count)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:
                with self.lock:
                    self.stopped = True
                    for program in self.running:
                        if program.child:
                            kill_group(program.child.pid)
                raise
        return self.bad


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=os.environ.get("CONFIG") or "release")
    parser.add_argument("--list", action="store_true", help="name the programs and stop")
    parser.add_argument("--verbose", action="store_true", help="name the tests that passed too")
    parser.add_argument("--case", action="append", default=[], metavar="NAME",
                        help="of whole-program tests, run only the tests of this name")
    parser.add_argument("--limit", type=int, metavar="S", help="seconds for each program")
    parser.add_argument("--jobs", type=int, metavar="N", default=2 * min(2, os.cpu_count() or 1),
                        help="test programs at a time, but for those that run alone; some of "
                             "them wait most of their time (default: %(default)s)")
    parser.add_argument("--exec", nargs=argparse.REMAINDER, metavar="COMMAND",
                        help="run this with the configuration's environment, nothing else")
    parser.add_argument("patterns", nargs="*", metavar="PATTERN",
                        help="e.g. test_adam same_bits; no:world leaves one out")
    args = parser.parse_args()
    if args.exec:
        command = wrapper(args.config) + args.exec
        os.execvpe(command[0], command, environment(args.config))
    strict = os.environ.get("STRICT", "") not in ("", "0")

    programs = find_programs(args.config, args.patterns)
    if args.list:
        print("\n".join(p.name for p in programs))
        return 0
    prefix = wrapper(args.config)
    for program in programs:
        if program.source.endswith(".py"):
            program.command += args.case
        program.command = prefix + program.command
        program.limit_s = args.limit
    env = environment(args.config)
    print(f"running {len(programs)} test programs, configuration {args.config}", flush=True)
    start = time.monotonic()
    bad = Runner(programs, args.config, env, strict, args.verbose).run(args.jobs)
    passed = sum(len(p.passed) for p in programs)
    failed = sum(len(p.failed) for p in programs)
    skipped = sum(len(p.skipped) for p in programs)
    if strict:
        failed, skipped = failed + skipped, 0
    if passed + failed == 0:
        print("FAIL: no test ran")
        failed += 1
    print(f"{time.monotonic() - start:.0f} s" + (f"; failing: {' '.join(bad)}" if bad else ""))
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
