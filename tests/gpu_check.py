"""gpu-check, which runs on machines with GPUs, on the CPU stand-in: every row runs from a folder
that was packed and moved, with next to no environment; what fails, hangs or is stopped is told, and
hides nothing. Of the release program alone, which is what is packed. With GPU_CHECK_WHOLE=1 every
row goes to its end (make check-long).

time limit: 300 s
"""
import atexit
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import support as t

sys.path.insert(0, os.path.join(t.ROOT, "tests", "gpu"))
import bundle as bundles  # noqa: E402
import check as driver  # noqa: E402
import libraries  # noqa: E402

WHOLE = os.environ.get("GPU_CHECK_WHOLE", "") not in ("", "0")
LONG = {"operators", "attention-right"}  # make test has them by themselves
# Plays compute-sanitizer, which some machines admit, or in part, and others refuse.
SANITIZER = """#!/bin/sh
case "$2" in
memcheck) shift 6; "$@" && echo "========= ERROR SUMMARY: 0 errors";;
*) echo "========= Error: Device not supported";;
esac
"""
_stack = contextlib.ExitStack()
atexit.register(_stack.close)
_packed = []


def bundle():
    """The folder, packed once, and somewhere else than it was packed for."""
    if not _packed:
        tmp = os.path.join(t.ROOT, _stack.enter_context(t.folder("gpu-")))
        subprocess.run([sys.executable, os.path.join(t.ROOT, "tests/gpu/bundle.py"), "--standin",
                        "--out", tmp + "/packed"], check=True)
        os.rename(tmp + "/packed", tmp + "/moved here")
        os.mkdir(tmp + "/tools")
        with open(tmp + "/tools/compute-sanitizer", "w", encoding="ascii") as file:
            file.write(SANITIZER)
        os.chmod(tmp + "/tools/compute-sanitizer", 0o755)
        _packed.extend((tmp + "/moved here", tmp + "/tools"))
    return _packed[0]


def start(out, *args, **env):
    """gpu-check with next to no environment. Process adds the tests' own, which `env -i` drops."""
    clean = ["-i", "PATH=" + _packed[1] + ":" + os.environ["PATH"], "PYTHON=" + sys.executable,
             *(f"{name}={value}" for name, value in env.items())]
    return t.Process([*clean, bundle() + "/gpu-check", "--tiny", "--out", out, *args],
                     program=shutil.which("env"))


def read(out):
    with open(out + "/result.json", encoding="utf-8") as file:
        return json.load(file)


def verdicts(result):
    return {row["name"]: row["verdict"] for row in result["rows"]}


def reason(result, name):
    return [row["reason"] for row in result["rows"] if row["name"] == name][0]


def figures(result, name):
    return {f["name"]: f["value"] for row in result["rows"] if row["name"] == name
            for f in row["figures"]}


@t.test
def every_row_runs_and_none_hides_the_next():
    folder = bundle()
    names = [r.name for r in driver.rows() if WHOLE or r.name not in LONG]
    want = {**dict.fromkeys(names, "passed"), "racecheck": "skipped", "pytorch": "skipped"}
    limits = []
    golden = folder + "/models/stories260k/golden.json"
    with open(golden, encoding="utf-8") as file:
        kept = file.read()
    if not WHOLE:  # one that fails at once, and one that is not over at its limit
        want.update(golden="failed", tiers="failed")
        limits = ["--limit", "tiers=0.3"]
        with open(golden, "w", encoding="utf-8") as file:
            file.write(json.dumps({**json.loads(kept), "token_sum": 1}))
    with t.folder() as tmp:
        out = os.path.join(t.ROOT, tmp, "out")
        run = start(out, "--only", ",".join(names), *limits, STANDIN_DEVICES=2).finish(240)
        result = read(out)
        kept_files = set(os.listdir(out))
    with open(golden, "w", encoding="utf-8") as file:
        file.write(kept)
    t.equal(verdicts(result), want, "verdicts", run)
    t.equal(run.rc, 0 if WHOLE else 1, "exit status", run)
    t.equal([result[k] for k in ("schema", "complete", "stopped", "standin")], [1, True, "", True],
            "the JSON's head")
    t.check({"log.txt", "step-report.html", "step-trace.json"} <= kept_files, f"{kept_files}")
    for row in result["rows"]:
        line = rf"^  {row['verdict']} +{row['name']} +{re.escape(row['what'])} "
        t.check(re.search(line, run.stdout, re.M), f"no line of {row['name']}", run)
    if not WHOLE:
        t.contains(reason(result, "golden"), "sum of the first tokens", "reason", run)
        t.contains(reason(result, "tiers"), "time limit of 0.3 s", "reason", run)
    t.contains(reason(result, "racecheck"), "Device not supported", "reason", run)
    t.equal(figures(result, "machine")["devices"], 2, "devices")
    for name, count in (("copies", 6), ("products", 31), ("attention", 2)):
        found = figures(result, name)
        t.equal(len(found), count, f"figures of {name}", run)
        t.check(all(value > 0 for value in found.values()), f"figures of {name}: {found}")
    t.check(0 < figures(result, "step")["bound"], "the step's bound", run)
    t.equal(figures(result, "step")["layers"], 2, "layers", run)


@t.test
def without_a_gpu_it_says_so():
    bundle()
    with t.folder() as tmp:
        out = os.path.join(t.ROOT, tmp)
        run = start(out, STANDIN_ERROR=100).finish()
        result = read(out)
    t.equal(run.rc, 1, "exit status", run)
    t.contains(run.stdout, "There is no GPU that can be used", "the end", run)
    t.contains(run.stdout, "the driver is here and sees no GPU", "why", run)
    want = {r.name: "skipped" for r in driver.rows()}
    t.equal(verdicts(result), {**want, "machine": "failed"}, "verdicts", run)
    t.equal(reason(result, "golden"), "could not run: see machine", "reason", run)


@t.test
def without_python_it_says_so():
    run = t.Process(["-i", "PATH=/nowhere", bundle() + "/gpu-check"],
                    program=shutil.which("env")).finish()
    t.equal(run.rc, 1, "exit status", run)
    t.contains(run.stderr, "no python3 here", "what it says", run)


@t.test
def a_stop_leaves_what_there_is():
    bundle()
    with t.folder() as tmp:
        out = os.path.join(t.ROOT, tmp)
        process = start(out, "--only", "machine,tiers,step")
        process.wait_for(r"^\.\.\. tiers")
        early = read(out)
        process.signal(signal.SIGINT)
        run = process.finish(20)
        late = read(out)
    t.equal(verdicts(early), {"machine": "passed", "tiers": "not run", "step": "not run"},
            "verdicts while it runs", run)
    t.equal([early["complete"], early["stopped"]], [False, ""], "the JSON while it runs")
    t.equal(run.rc, 130, "exit status", run)
    t.equal(verdicts(late), {"machine": "passed", "tiers": "failed", "step": "not run"},
            "verdicts", run)
    t.equal(reason(late, "tiers"), "stopped by SIGINT", "reason", run)
    t.equal([late["complete"], late["stopped"]], [False, "SIGINT"], "the JSON", run)
    t.contains(run.stdout, "Stopped by SIGINT", "the table", run)
    t.check(not os.path.exists(bundle() + "/build/tmp"), "files of the stopped row are left")


@t.test
def the_programs_take_the_packed_libraries():
    folder, counted = bundle(), 0
    driver.unpack(folder)
    for at, _, names in os.walk(folder + "/bin"):
        for name in names:
            for soname, path in bundles.libraries_of(os.path.join(at, name)).items():
                if bundles.FALLBACK.match(soname):
                    continue
                counted += 1
                t.check(os.path.realpath(path or "").startswith(os.path.realpath(folder) + "/lib"),
                        f"{name} takes {soname} from {path}")
    t.check(counted > 10, f"{counted} libraries")


def symbols(path, *options):
    said = subprocess.run(["nm", *options, path], check=True, stdout=subprocess.PIPE, text=True)
    return {line.split()[-1] for line in said.stdout.splitlines() if " nccl" in line}


@t.test
def what_stands_for_a_missing_nccl_has_all_that_is_called():
    """Else the plugin could not be opened there, for one GPU either."""
    folder = os.path.join(t.ROOT, "build", "release")
    called = symbols(folder + "/kernels/cuda/group_nccl.c.o", "-u")
    absent = symbols(folder + "/gpu/libnccl.so.2", "-D", "--defined-only")
    t.check(len(called) > 8 and not called - absent, f"missing: {called - absent}")


@t.test
def a_library_that_is_missing_is_named_with_where_it_was_looked_for():
    folder = bundle()
    with open(folder + "/bundle.json", encoding="utf-8") as file:
        kept = file.read()
    with open(folder + "/bundle.json", "w", encoding="utf-8") as file:
        json.dump({**json.loads(kept), "to_be_found": ["libcublasLt.so.99", "libc.so.6"]}, file)
    with t.folder() as tmp:
        out = os.path.join(t.ROOT, tmp)
        run = start(out, "--only", "machine,device").finish()
        result = read(out)
    with open(folder + "/bundle.json", "w", encoding="utf-8") as file:
        file.write(kept)
    t.equal(verdicts(result), {"machine": "failed", "device": "skipped"}, "verdicts", run)
    t.check(result["libraries"]["found"]["libc.so.6"], "libc is found")
    for place, _ in libraries.places():
        t.contains(reason(result, "machine"), f"looked in {place}", "reason", run)
    t.contains(reason(result, "machine"), "libcublasLt.so.99 was found nowhere", "reason", run)


if __name__ == "__main__":
    t.main()
