"""Jobs of several processes under mpirun, for the tests that start some."""
import os
import re
import shutil

import support as t

BASE = ["--seq-len", 24, "--lr", "1e-3", "--digest", "--device-threads", 1, "--chunk", 60000]
STEPS = 4


def launch(processes, out, *more, steps=STEPS, program=None, env=None, preexec=None, model=t.MODEL,
           data=t.SHAKESPEARE + "/train.bin", wrap=()):
    """A job under way. mpirun gives its first process a terminal, so the progress line is live.
    wrap: a program and arguments that start mpirun."""
    if not shutil.which("mpirun"):
        t.skip("no mpirun here")
    args = ["-np", processes, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
            program or t.SPILLWAY, "train", "--model", model, "--data", data, "--out", out,
            "--steps", steps, *BASE, *more]
    # What Open MPI keeps is no leak of this program's, whose own are looked for by the other tests.
    env = dict(env or {})
    options = env.get("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", ""))
    env["ASAN_OPTIONS"] = options + ":detect_leaks=0"
    program, *args = [*wrap, "mpirun", *args]
    return t.Process(args, program=program, env=env, preexec=preexec)


def job(processes, out, *more, rc=0, **options):
    run = launch(processes, out, *more, **options).finish(120)
    if rc is not None:
        t.equal(run.rc, rc, f"exit status of {processes} processes", run)
    return run


def alone(out, *more, steps=STEPS, **options):
    return t.train(out, "--steps", steps, *BASE, *more, rc=0, **options)


def digest(run):
    found = re.findall(r"digest: (master.*?)\r?$", run.stdout, re.M)
    t.equal(len(found), 1, "digests", run)
    return found[0]


def outcome(run, out, log):
    steps, _ = t.read_log(log)
    return (digest(run), [(s["step"], s["loss"], s["grad_norm"]) for s in steps],
            t.read_model(out)[1])


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(p) for p in file.read().split()]


def ranks_of(process):
    """The processes of a job that train, in their order."""
    found = []
    for pid in children(process.pid):
        with open(f"/proc/{pid}/comm", encoding="ascii") as file:
            if file.read().strip() == "spillway":
                found.append(pid)
    return sorted(found)


def of_its_own(tmp, name, *more):
    """A program for launch(): each process with options of its own, where R is its number."""
    path = os.path.join(t.ROOT, tmp, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nR=$OMPI_COMM_WORLD_RANK\nexec {t.SPILLWAY} "$@" '
                   f'{" ".join(more)}\n')
    os.chmod(path, 0o755)
    return path
