"""Several processes under mpirun: the bits of one process with as many ranks, one commit for all,
one model, one log, and an end for all when one of them ends.

time limit: 300 s
"""
import fcntl
import json
import os
import re
import shutil
import signal
import time

import support as t

BASE = ["--seq-len", 24, "--lr", "1e-3", "--digest", "--device-threads", 1, "--chunk", 60000]
STEPS = 4


# What mpirun lets pass between SIGTERM and SIGKILL, whether there is anything left to wait for or
# not: by default a second, which a busy machine is too slow for.
PATIENCE = "OMPI_MCA_odls_base_sigkill_timeout"


def launch(processes, out, *more, steps=STEPS, program=None, env=None, preexec=None,
           patience=None):
    """A job under way. mpirun gives its first process a terminal, so the progress line is live."""
    if not shutil.which("mpirun"):
        t.skip("no mpirun here")
    args = ["-np", processes, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
            program or t.SPILLWAY, "train", "--model", t.MODEL, "--data",
            t.SHAKESPEARE + "/train.bin", "--out", out, "--steps", steps, *BASE, *more]
    # What Open MPI keeps is no leak of this program's, whose own are looked for by the other tests.
    env = dict(env or {})
    options = env.get("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", ""))
    env["ASAN_OPTIONS"] = options + ":detect_leaks=0"
    if patience:
        env[PATIENCE] = patience
    return t.Process(args, program="mpirun", env=env, preexec=preexec)


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


@t.test
def processes_give_the_bits_of_one():
    with t.folder() as tmp:
        for i, more in enumerate((
                ["--optimizer", "nvme"],
                ["--zero", 2, "--dtype", "fp32", "--accumulate", 2],
                ["--clip", 0, "--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme",
                 "--activations", "nvme"],
                ["--reduce-dtype", "bf16", "--optimizer", "host:50%,nvme", "--master", "split"])):
            log = ["--log", f"{tmp}/{i}-1.jsonl"]
            one = alone(f"{tmp}/{i}-1", "--ranks", 4, *more, *log)
            want = outcome(one, f"{tmp}/{i}-1", log[1])
            for processes in (2, 4) if i == 0 else (2,):
                name = f"{tmp}/{i}-{processes}"
                run = job(processes, name, "--ranks", 4 // processes, *more, "--log",
                          name + ".jsonl")
                t.check(outcome(run, name, name + ".jsonl") == want,
                        f"{processes} processes, {more}: other bits", run)
                t.equal(sorted(n for n in os.listdir(name) if "optimizer" in n), [],
                        "stores left behind", run)


@t.test
def replicas_in_other_processes_change_no_bit_between_stages_and_tiers():
    """Shards inside a process, replicas across: sums in another order than over the world, so other
    bits than that, and the same losses. With one rank in each process both are one sum of two."""
    with t.folder() as tmp:
        common = ["--ranks", 2, "--shard", "node", "--dtype", "fp32"]
        world = alone(tmp + "/world", "--ranks", 4, "--dtype", "fp32", "--log",
                      tmp + "/world.jsonl")
        losses = [s["loss"] for s in t.read_log(tmp + "/world.jsonl")[0]]
        want = None
        for i, more in enumerate((["--zero", 2], ["--zero", 3, "--optimizer", "nvme"],
                                  ["--params", "nvme", "--optimizer", "nvme"])):
            out = f"{tmp}/{i}"
            got = outcome(job(2, out, *common, *more, "--log", out + ".jsonl"), out, out + ".jsonl")
            want = want or got
            t.check(got == want, f"{more}: other bits")
            for (step, loss, _), other in zip(got[1], losses):
                t.close(loss, other, 2e-5 * step, f"loss of step {step}")
        t.check(want[0] != digest(world), "the order of sums is the world's")
        one = alone(tmp + "/pair", "--ranks", 2, "--dtype", "fp32")
        two = job(2, tmp + "/pairs", "--shard", "node", "--dtype", "fp32", "--optimizer", "nvme")
        t.equal(digest(two), digest(one), "one rank in each process", two)


@t.test
def evaluation_and_saves_are_those_of_one():
    with t.folder() as tmp:
        val = ["--val", t.SHAKESPEARE + "/val.bin", "--save-every", 2, "--eval-every", 2]
        t.write_tokens(tmp + "/val.bin", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:1000])
        val[1] = tmp + "/val.bin"
        one = alone(tmp + "/1", "--ranks", 2, *val)
        two = job(2, tmp + "/2", *val)
        found = [re.findall(r"validation loss (\S+) after", run.stdout) for run in (one, two)]
        t.check(found[0] == found[1] and len(found[0]) == 3, f"validation losses {found}", two)
        t.check(t.read_model(tmp + "/1/step-2")[1] == t.read_model(tmp + "/2/step-2")[1],
                "the model saved in between")


def read_trace(path):
    with open(path, encoding="utf-8") as file:
        return [e for e in json.load(file)["traceEvents"] if e["ph"] in "XM"]


def tasks_by_rank(events):
    """{rank: sorted tasks of its device lanes}, without their times."""
    found = {}
    for e in events:
        args = e["args"]
        if e["ph"] == "X" and args["lane"].split()[0] in ("compute", "h2d", "d2h", "comm"):
            found.setdefault(args["rank"], []).append(
                (e["name"], args["lane"], args["step"], args["micro"], args["bytes"]))
    return {rank: sorted(tasks) for rank, tasks in found.items()}


def ends_of(events, name, rank):
    return [e["ts"] + e["dur"] for e in events
            if e["ph"] == "X" and e["name"] == name and e["args"]["rank"] == rank]


@t.test
def every_process_traces_its_ranks():
    """The tasks of each rank are those of one process with all of them, in a file that `spillway
    report` opens. Also in the output folder, which --restart empties."""
    with t.folder() as tmp:
        more = ["--optimizer", "nvme", "--zero", 3]
        alone(tmp + "/one", "--ranks", 4, *more, "--trace", tmp + "/one.json")
        want = tasks_by_rank(read_trace(tmp + "/one.json"))
        t.equal(sorted(want), [0, 1, 2, 3], "ranks of one process")
        for again in ([], ["--restart"]):
            job(2, tmp + "/out", "--ranks", 2, *more, "--trace", tmp + "/out/trace.v1.json", *again)
            left = sorted(n for n in os.listdir(tmp + "/out") if "trace" in n)
            t.equal(left, ["trace.v1-p1.json", "trace.v1.json"], f"traces after {again}")
        both = [read_trace(f"{tmp}/out/trace.v1{p}.json") for p in ("", "-p1")]
        for process, events in enumerate(both):
            own = [2 * process, 2 * process + 1]
            t.equal({e["pid"] for e in events}, {process}, "pid")
            t.check(tasks_by_rank(events) == {rank: want[rank] for rank in own},
                    f"process {process}: other tasks than ranks {own} of one process have")
            lanes = {(e["tid"], e["args"]["lane"]) for e in events if e["ph"] == "X"}
            named = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
            t.check(lanes <= named, f"lanes without a name: {lanes - named}")
            page = f"{tmp}/{process}.html"
            told = t.spillway("report", f"{tmp}/out/trace.v1{['', '-p1'][process]}.json", "--json",
                              "-o", page, rc=0)
            names = {entry["lane"] for entry in json.loads(told.stdout)["lanes"]}
            t.check({["compute", "compute 2"][process], f"comm {own[1]}", "nvme_read"} <= names,
                    f"lanes of the report: {names}", told)
        # One begin for all: what is gathered together ends together.
        gathers = [ends_of(events, "gather layer.1", 2 * p) for p, events in enumerate(both)]
        t.equal(len(gathers[0]), len(gathers[1]), "gathers")
        for a, b in zip(*gathers):
            t.close(a, b, 2e5 * t.SLOWDOWN, "the end of a gather, in microseconds")


@t.test
def all_go_back_to_the_last_commit_that_all_have():
    """One process is killed before it writes the record of commit 3, when the other may have; also
    so late that the other would long have gone on."""
    with t.folder() as tmp:
        want = digest(alone(tmp + "/one", "--ranks", 2, "--optimizer", "nvme", steps=8))
        for victim, when in (("optimizer.commit", "before"), ("optimizer-p1.commit", "before"),
                             ("optimizer-p1.commit", "late")):
            out = f"{tmp}/{victim}-{when}"
            dead = job(2, out, "--optimizer", "nvme", "--rank-timeout", 10, steps=8, rc=None,
                       env={**t.preload("kill_at_call"), "KILL_AT": f"pwrite:/{victim}:3:{when}"})
            t.check(dead.rc != 0, "a killed process is a success", dead)
            last = job(2, out, "--optimizer", "nvme", "--resume", steps=8)
            t.contains(last.stdout, "going on after step 2", "the step", last)
            t.equal(digest(last), want, f"{victim}: other bits", last)


def export(store, to, *more, rc=0):
    return t.spillway("export", "--model", t.MODEL, "--from", store, "--to", to, *more, rc=rc)


def files(folder):
    found = {}
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            found[name] = file.read()
    return found


def of_its_own(tmp, name, *more):
    """A program for launch(): each process with options of its own, where R is its number."""
    path = os.path.join(t.ROOT, tmp, name)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'#!/bin/sh\nR=$OMPI_COMM_WORLD_RANK\nexec {t.SPILLWAY} "$@" '
                   f'{" ".join(more)}\n')
    os.chmod(path, 0o755)
    return path


@t.test
def stores_of_processes_are_exported_as_that_of_one():
    """Byte for byte: in one folder, in several of it, and with folders of each process alone."""
    with t.folder() as tmp:
        keep = ["--keep-store", "--optimizer", "nvme"]
        for i, more in enumerate(([], ["--master", "split", "--moments", "8bit", "--chunk", 33333])):
            one = f"{tmp}/{i}-one"
            alone(one, "--ranks", 4, *keep, *more)
            export(one, one + "-files")
            want = files(one + "-files")
            for processes in (2, 4):
                out = f"{tmp}/{i}-{processes}"
                job(processes, out, "--ranks", 4 // processes, *keep, *more)
                told = export(out, out + "-files")
                t.contains(told.stdout, f"exported step {STEPS}", "what it says", told)
                t.check(files(out + "-files") == want, f"{processes} processes: other files", told)
        # The layout knows in how many folders a store lies, so it is another run.
        places = [f"{tmp}/{n}" for n in ("a", "b", "p0a", "p0b", "p1a", "p1b")]
        for place in places:
            os.mkdir(place)
        alone(tmp + "/two", "--ranks", 4, *keep, "--nvme", ",".join(places[:2]))
        export(tmp + "/two", tmp + "/two-files", "--nvme", ",".join(places[:2]))
        want = files(tmp + "/two-files")
        job(2, tmp + "/shared", "--ranks", 2, *keep, "--restart", "--nvme", ",".join(places[:2]))
        export(tmp + "/shared", tmp + "/shared-files", "--nvme", ",".join(places[:2]))
        t.check(files(tmp + "/shared-files") == want, "two folders for all: other files")
        program = of_its_own(tmp, "own", "--nvme", f"{tmp}/p${{R}}a,{tmp}/p${{R}}b")
        job(2, tmp + "/own-out", "--ranks", 2, *keep, program=program)
        for number, order in enumerate((places[2:], places[4:] + places[2:4])):
            to = f"{tmp}/own-{number}"
            export(tmp + "/own-out", to, "--nvme", ",".join(order))
            t.check(files(to) == want, f"two folders for each, {number}: other files")


@t.test
def a_store_ahead_of_the_others_goes_back():
    """What a crash between two records of a commit leaves is exported at the step that all have, as
    it would be resumed there."""
    with t.folder() as tmp:
        alone(tmp + "/one", "--ranks", 2, "--optimizer", "nvme", "--keep-store", "--schedule",
              "constant", "--warmup", 0, steps=2)
        export(tmp + "/one", tmp + "/want")
        for victim in ("optimizer.commit", "optimizer-p1.commit"):
            out = f"{tmp}/{victim}"
            dead = job(2, out, "--optimizer", "nvme", "--rank-timeout", 10, "--schedule",
                       "constant", "--warmup", 0, steps=8, rc=None,
                       env={**t.preload("kill_at_call"), "KILL_AT": f"pwrite:/{victim}:3:late"})
            t.check(dead.rc != 0, "a killed process is a success", dead)
            before = files(out)
            told = export(out, out + "-files")
            t.contains(told.stdout, "exported step 2", victim, told)
            t.check(files(out + "-files") == files(tmp + "/want"), f"{victim}: other files", told)
            t.check(files(out) == before, "the export changed the stores")


@t.test
def parts_that_do_not_belong_together_are_refused_by_name():
    with t.folder() as tmp:
        keep = ["--keep-store", "--optimizer", "nvme"]
        out, part, to = f"{tmp}/out", f"{tmp}/part", f"{tmp}/to"

        def refused(what, *texts, more=(), store=out):
            run = export(store, to, *more, rc=1)
            for text in texts:
                t.contains(run.stderr, text, what, run)
            t.check(not os.path.exists(to), f"{what}: a folder was left", run)

        def replaced(what, source, *texts):
            """The part of process 1 is that of another run."""
            shutil.rmtree(part, ignore_errors=True)
            shutil.copytree(out, part)
            for name in ("optimizer-p1.commit", "optimizer-p1.0.state"):
                shutil.copy2(f"{source}/{name}", f"{part}/{name}")
            refused(what, *texts, store=part)

        job(2, out, "--ranks", 2, *keep)
        job(2, f"{tmp}/short", "--ranks", 2, *keep, "--schedule", "constant", steps=1)
        replaced("another step", f"{tmp}/short", f"process 0 in {part} at step {STEPS}",
                 f"process 1 in {part} at step 1", "no step in common")
        job(2, f"{tmp}/seed", "--ranks", 2, *keep, "--seed", 3)
        replaced("another run", f"{tmp}/seed", f"process 1 in {part} belongs to another run",
                 "its rows is 'order shuffle, seed 3' and not 'order shuffle, seed 0'")
        job(4, f"{tmp}/four", *keep)
        replaced("other processes", f"{tmp}/four", f"process 1 in {part} belongs to another run",
                 "chunks and not")
        os.mkdir(f"{tmp}/empty")
        refused("too many folders", "lies in 1 folder for each of its 2 processes and 3 are given",
                more=["--nvme", f"{out},{tmp}/empty,{part}"])
        refused("twice", f"{out} and {tmp}/seed both have a store of process",
                more=["--nvme", f"{out},{tmp}/seed"])
        with open(f"{out}/optimizer-p1.0.state", "rb") as store:
            fcntl.flock(store, fcntl.LOCK_EX)
            refused("in use", f"in use by process {os.getpid()}", "optimizer-p1")
        os.unlink(f"{out}/optimizer-p1.commit")
        refused("process 1 missing", "each of the run's 2 processes has a part",
                "process 1 is missing", f"no optimizer-p1.commit lies in {out}")
        refused("process 0 missing", f"{tmp}/only has the store of process 1", "process 0",
                more=["--nvme", only(tmp)])


def only(tmp):
    """A folder with the store of process 1 alone."""
    os.mkdir(f"{tmp}/only")
    for name in ("optimizer-p1.commit", "optimizer-p1.0.state"):
        shutil.copy2(f"{tmp}/seed/{name}", f"{tmp}/only/{name}")
    return f"{tmp}/only"


@t.test
def a_signal_stops_all_at_the_same_step():
    """mpirun passes it on; but it may come to one process alone, or late."""
    for whom in (None, 1):
        with t.folder() as tmp:
            process = launch(2, tmp + "/out", "--optimizer", "nvme", steps=100000,
                             patience=None if whom else "8")
            process.wait_for(r"step \d+/")
            if whom is None:
                process.signal(signal.SIGINT)
            else:
                os.kill(ranks_of(process)[whom], signal.SIGINT)
            run = process.finish()
            stopped = re.search(r"stopped after step (\d+);.*--resume goes on", run.stdout)
            t.check(stopped, "no word of the stop", run)
            step = int(stopped[1])
            t.check(os.path.isdir(f"{tmp}/out.step-{step}"), "the weights", run)
            again = job(2, tmp + "/out", "--optimizer", "nvme", "--resume", steps=step + 2)
            t.contains(again.stdout, f"going on after step {step}", "resume", again)


def logged(log):
    return len(t.read_log(log)[0]) if os.path.exists(log) else 0


@t.test
def a_signal_stops_after_the_step_at_hand():
    """When step n is reported, n + 1 is at hand or, with updates beside forward, past its verdict;
    so n + 2 is the last one. Steps take half a second, a signal a moment."""
    for overlap, more in (("none", []), ("forward", []), ("backward", ["--clip", 0])):
        with t.folder() as tmp:
            log = tmp + "/log"
            process = launch(2, tmp + "/out", "--optimizer", "nvme", "--overlap", overlap, *more,
                             "--sim-nvme", "4M,4M", "--log", log, steps=100000)
            process.wait_for(r"step \d+/")
            before = logged(log)
            while logged(log) == before:
                time.sleep(0.01)
            os.kill(ranks_of(process)[1], signal.SIGINT)
            last = logged(log)
            run = process.finish()
            step = int(re.search(r"stopped after step (\d+);.*--resume goes on", run.stdout)[1])
            t.check(last < step <= last + 2, f"{overlap}: {last} steps were reported, and then "
                    f"the run went on to {step}", run)
            t.equal(logged(log), step, "steps in the log", run)


@t.test
def the_time_that_mpirun_gives_is_told():
    with t.folder() as tmp:
        for patience in (None, "20"):
            run = job(2, f"{tmp}/{patience}", steps=1, patience=patience)
            told = f"'mpirun --mca {PATIENCE[len('OMPI_MCA_'):]} 60'"
            t.equal((run.stdout + run.stderr).count(told), 0 if patience else 1, "told", run)


@t.test
def one_that_dies_or_stalls_ends_the_job():
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with t.folder() as tmp:
            process = launch(2, tmp + "/out", "--optimizer", "nvme", "--rank-timeout", 2,
                             steps=100000)
            process.wait_for(r"step \d+/")
            victim = ranks_of(process)[1]
            os.kill(victim, number)
            start = time.monotonic()
            run = process.finish()
            took = time.monotonic() - start
            if number == signal.SIGSTOP:
                try:
                    os.kill(victim, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            t.check(run.rc != 0, "the job's status", run)
            t.check(took < 6 * t.SLOWDOWN + 5, f"{took:.1f} s after {number.name}", run)
            t.check(os.path.exists(tmp + "/out/optimizer.commit"), "the last commit", run)


@t.test
def what_was_asked_for_must_agree():
    """Each process has its own command line: here by a script that adds to one of them."""
    with t.folder() as tmp:
        script = of_its_own(tmp, "one-differs", '$([ "$R" = 1 ] && echo $MORE)')
        for more, part in (("--clip 2", "--clip"), ("--seed 3", "rows"),
                           ("--micro-batch 2", "numerics"), ("--ranks 2", "--ranks")):
            run = job(2, tmp + "/out", program=script, env={"MORE": more}, rc=None)
            t.check(run.rc != 0, f"{more} in one process is accepted", run)
            t.contains(run.stderr, part, f"the difference {more}", run)


if __name__ == "__main__":
    t.main()
