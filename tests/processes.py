"""Several processes under mpirun: the bits of one process with as many ranks, one log and one trace
of each, and an end for all when one of them ends.

time limit: 300 s
"""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import time

import support as t
from support_processes import STEPS, alone, digest, job, launch, of_its_own, outcome, ranks_of


@t.test
def processes_give_the_bits_of_one():
    with t.folder() as tmp:
        for i, more in enumerate((
                ["--optimizer", "nvme"],
                ["--zero", 2, "--dtype", "fp32", "--accumulate", 2],
                ["--clip", 0, "--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme",
                 "--activations", "nvme"],
                ["--reduce-dtype", "bf16", "--optimizer", "host:50%,nvme", "--master", "split"],
                ["--reduce-dtype", "bf16"])):
            log = ["--log", f"{tmp}/{i}-1.jsonl"]
            ranks = 2 if i == 4 else 4  # with two processes of one rank each
            one = alone(f"{tmp}/{i}-1", "--ranks", ranks, *more, *log)
            want = outcome(one, f"{tmp}/{i}-1", log[1])
            for processes in (2, 4) if i == 0 else (2,):
                name = f"{tmp}/{i}-{processes}"
                run = job(processes, name, "--ranks", ranks // processes, *more, "--log",
                          name + ".jsonl")
                t.check(outcome(run, name, name + ".jsonl") == want,
                        f"{processes} processes, {more}: other bits", run)
                t.equal(sorted(n for n in os.listdir(name) if "optimizer" in n), [],
                        "stores left behind", run)


@t.test
def rows_that_count_nowhere_in_a_process_change_no_bit():
    """The ranks of one process have few tokens that count, or none, in steps of their own."""
    with t.folder() as tmp:
        tokens = t.read_tokens(t.SHAKESPEARE + "/train.bin")[:24 * 4 * STEPS + 1]
        t.write_tokens(tmp + "/data.bin", tokens)
        step = lambda i: i // (24 * 4)
        mask = [int(i // 48 % 2 == step(i) % 2 or i % 31 == step(i) == 3)
                for i in range(len(tokens))]
        with open(tmp + "/mask", "wb") as file:
            file.write(bytes(mask))
        more = ["--mask", tmp + "/mask", "--order", "sequential", "--optimizer", "nvme"]
        want = outcome(alone(tmp + "/1", "--ranks", 4, *more, "--log", tmp + "/1.jsonl",
                             data=tmp + "/data.bin"), tmp + "/1", tmp + "/1.jsonl")
        for processes in (2, 4):
            out = f"{tmp}/{processes}"
            run = job(processes, out, "--ranks", 4 // processes, *more, "--log", out + ".jsonl",
                      data=tmp + "/data.bin")
            t.check(outcome(run, out, out + ".jsonl") == want, f"{processes}: other bits", run)


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
def a_trace_that_cannot_be_written_is_named_as_given_and_as_it_is():
    with t.folder() as tmp:
        os.mkdir(f"{tmp}/trace-p1.json")
        run = job(2, f"{tmp}/out", "--trace", f"{tmp}/trace.json", rc=None)
        t.check(run.rc != 0, "a folder in the trace's place is accepted", run)
        t.contains(run.stderr, f"--trace {tmp}/trace.json: process 1 writes {tmp}/trace-p1.json: "
                   f"{tmp}/trace-p1.json is a folder, not a file", "a folder", run)
        program = of_its_own(tmp, "script", f"--trace {tmp}/$([ $R = 1 ] && echo away/)trace.json")
        run = job(2, f"{tmp}/more", program=program, rc=None)
        t.contains(run.stderr, f"--trace {tmp}/away/trace.json: process 1 writes "
                   f"{tmp}/away/trace-p1.json: No such file", "a folder that is not there", run)


def stopped_at(run):
    found = re.search(r"stopped after step (\d+);.*--resume goes on", run.stdout)
    t.check(found, "no word of the stop", run)
    return int(found[1])


@t.test
def a_signal_stops_all_at_the_same_step():
    """mpirun passes USR1 on; a signal may come to one process alone, or late."""
    for whom in (None, 1):
        with t.folder() as tmp:
            process = launch(2, tmp + "/out", "--optimizer", "nvme", steps=100000)
            process.wait_for(r"step \d+/")
            if whom is None:
                told = re.search(r"send it SIGUSR1 instead: kill -USR1 (\d+)", process.text())
                t.equal(int(told[1]), process.pid, "the process to signal")
                os.kill(int(told[1]), signal.SIGUSR1)
            else:
                os.kill(ranks_of(process)[whom], signal.SIGINT)
            run = process.finish()
            t.check(run.rc != 0, "a stopped job is a success", run)
            step = stopped_at(run)
            t.check(os.path.isdir(f"{tmp}/out.step-{step}"), "the weights", run)
            again = job(2, tmp + "/out", "--optimizer", "nvme", "--resume", steps=step + 2)
            t.contains(again.stdout, f"going on after step {step}", "resume", again)


@t.test
def a_signal_to_one_is_the_status_of_all():
    """Each process leaves its id and its status; the one that is asked is not the first."""
    with t.folder() as tmp:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            script, notes = f"{tmp}/script-{number}", os.path.join(t.ROOT, tmp, str(int(number)))
            with open(script, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nR={notes}-$OMPI_COMM_WORLD_RANK\n'
                           f'{t.SPILLWAY} "$@" &\necho $! > $R.pid\nwait $!\nS=$?\n'
                           'echo $S > $R.status\nexit $S\n')
            os.chmod(script, 0o755)
            process = launch(2, f"{tmp}/out-{number}", "--optimizer", "nvme", steps=100000,
                             program=os.path.join(t.ROOT, script))
            process.wait_for(r"step \d+/")
            with open(notes + "-1.pid", encoding="ascii") as file:
                os.kill(int(file.read()), number)
            run = process.finish()
            for p in (0, 1):
                with open(f"{notes}-{p}.status", encoding="ascii") as file:
                    t.equal(int(file.read()), 128 + number, f"status of process {p}", run)


@t.test
def before_a_step_no_process_announces_a_save():
    """A signal comes to the second one while the text for validation is read the first time."""
    with t.folder() as tmp:
        process = launch(2, tmp + "/out", "--val", t.SHAKESPEARE + "/val.bin", steps=1000)
        process.wait_for("validation: row")
        os.kill(ranks_of(process)[1], signal.SIGINT)
        run = process.finish()
        t.contains(run.stdout + run.stderr, "stopping before another step is made", "said", run)
        t.check("finishing the step" not in run.stdout + run.stderr, "a save is announced", run)
        t.check(not os.path.exists(tmp + "/out"), "something is saved", run)


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
            step = stopped_at(run)
            t.check(last < step <= last + 2, f"{overlap}: {last} steps were reported, and then "
                    f"the run went on to {step}", run)
            t.equal(logged(log), step, "steps in the log", run)


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
def no_step_of_any_process_allocates():
    """Open MPI takes its memory before the first step, whichever way its messages go."""
    if t.SANITIZED:
        return
    with t.folder() as tmp:
        for i, (processes, more, way) in enumerate((
                (2, ["--ranks", 2, "--trace", tmp + "/trace.json", "--save-every", 2], {}),
                (2, ["--ranks", 2, "--shard", "node"], {}),
                (3, [], {"OMPI_MCA_btl": "tcp,self"}))):
            run = job(processes, f"{tmp}/{i}", "--optimizer", "nvme", *more,
                      env={"SPILLWAY_ALLOC_GUARD": "stop", **way})
            t.contains(run.stdout, "allocations inside steps: 0;", str(more), run)


def cpus_of(pid):
    """{a thread's name: CPUs it may run on}."""
    found = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/status", encoding="ascii") as file:
            text = file.read()
        name = re.search(r"^Name:\t(.*)$", text, re.M)[1]
        found[name] = re.search(r"^Cpus_allowed_list:\t(.*)$", text, re.M)[1]
    return found


@t.test
def processes_on_one_machine_part_it():
    """mpirun --bind-to none gives all of them the same mask."""
    if len(os.sched_getaffinity(0)) < 2:
        t.skip("one CPU alone")
    with t.folder() as tmp:
        masks = {}
        for bind in (None, "true"):
            process = launch(2, f"{tmp}/{bind}", steps=100000,
                             env={"OMP_PROC_BIND": bind} if bind else None)
            process.wait_for(r"step \d+/")
            masks[bind] = [cpus_of(pid) for pid in ranks_of(process)]
            process.signal(signal.SIGUSR1)
            run = process.finish()
            told = re.findall(r"process (\d): CPUs (\S+) of", run.text)
            t.equal(sorted(told), [(str(i), m["compute"]) for i, m in enumerate(masks[bind])]
                    if not bind else [], "what is told", run)
            memory = re.findall(r"process (\d): (\S+) GB of memory, of (\S+) GB that", run.text)
            t.equal(sorted(m[0] for m in memory), ["0", "1"], "processes that part memory", run)
            for _, part, whole in memory:
                t.close(2 * float(part), float(whole), 0.15, "memory of a process", run=run)
        for lane in ("compute", "comm", "adam"):
            t.check(masks[None][0][lane] != masks[None][1][lane], f"{lane}: {masks[None]}")
            t.equal(masks["true"][0][lane], masks["true"][1][lane], f"{lane}, bound by the user")


MESSAGES_BYTES = 16e6  # what Open MPI and its plugin take in each process, and blocks on their way


def watch_peaks(process):
    """The most that each process of a job has held, by its id (RssAnon + RssShmem, sampled)."""
    peaks = {}
    while process.is_running():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in ranks_of(process):
                held = t.private_bytes(pid)
                peaks[pid] = max(peaks.get(pid, 0), held)
        time.sleep(0.02)
    return peaks


@t.test
def processes_together_take_what_is_planned():
    """Each holds its shards of one model and what one or two units need: nobody holds it whole."""
    if t.SANITIZED:
        return
    with t.folder() as tmp:
        t.make_model(tmp + "/model", {**t.MIDDLE_MODEL, "num_hidden_layers": 2,
                                      "vocab_size": 4096}, "--seed", 3)
        more = ["--zero", 3, "--optimizer", "nvme"]
        for resume in ([], ["--resume"]):
            process = launch(2, tmp + "/out", "--ranks", 2, *more, "--keep-store", *resume,
                             model=tmp + "/model", steps=1 + len(resume))
            peaks = watch_peaks(process)
            run = process.finish()
            t.equal((run.rc, len(peaks)), (0, 2), "status and processes", run)
            table = t.totals(run.stdout.replace("\r", ""))
            planned = 2 * (1.05 * (2 * table["device"] + table["host"]) + MESSAGES_BYTES)
            t.check(sum(peaks.values()) <= planned,
                    f"{resume}: {sum(peaks.values()) / 1e6:.0f} MB of {planned / 1e6:.0f} MB", run)


@t.test
def little_shared_memory_changes_no_bit():
    """Containers have 64 MB at /dev/shm, or less: messages may go another way, which is told."""
    probe = ["-m", "sh", "-c", "mount -t tmpfs -o size=1m none /dev/shm && exec \"$@\"", "small"]
    if t.Process([*probe, "true"], program="unshare").finish().rc != 0:
        print("# not applicable here: no file system can be mounted", flush=True)
        return
    with t.folder() as tmp:
        want = digest(alone(tmp + "/1", "--ranks", 2))
        small = job(2, tmp + "/2", wrap=["unshare", *probe])
        t.equal(digest(small), want, "digest with 1 MB of shared memory", small)
        told = "/dev/shm has 1.05 MB left and Open MPI takes 9.44 MB there for 2 processes"
        t.equal(small.text.count(told), 1, "warnings", small)


@t.test
def processes_that_cannot_reach_each_other_end_at_once():
    with t.folder() as tmp:
        run = job(2, tmp + "/out", rc=None, env={"OMPI_MCA_btl": "self"})
        t.check(run.rc != 0, "a job that never met is a success", run)
        t.check(run.seconds < 20 * t.SLOWDOWN, f"it took {run.seconds:.1f} s", run)


@t.test
def what_was_asked_for_must_agree():
    """Each process has its own command line: here by a script that adds to one of them."""
    with t.folder() as tmp:
        script = of_its_own(tmp, "one-differs", '$([ "$R" = 1 ] && echo $MORE)')
        with open(tmp + "/documents", "wb") as file:
            file.write(struct.pack("<2Q", 0, 100))
        with open(tmp + "/mask", "wb") as file:
            file.write(b"\1" * (os.path.getsize(t.SHAKESPEARE + "/train.bin") // 2))
        hash_of = "[0-9a-f]{16}"
        for more, first, second in (
                ("--clip 2", "1", "2"), ("--weight-decay 0.2", "0.1", "0.2"),
                ("--seed 3", "0", "3"),
                (f"--documents {tmp}/documents", "none", rf"\S+/documents \({hash_of}\)"),
                (f"--mask {tmp}/mask", "none", rf"\S+/mask \({hash_of}\)"),
                ("--micro-batch 2", "1", "2"), ("--order sequential", "shuffle", "sequential"),
                ("--schedule constant", "cosine", "constant"), ("--ranks 2", "1", "2"),
                ("--resume", "not given", "given"), ("--restart", "not given", "given"),
                (f"--import {tmp}", "not given", rf"{tmp} \(given\)")):
            run = job(2, tmp + "/out", program=script, env={"MORE": more}, rc=None)
            t.check(run.rc != 0, f"{more} in one process is accepted", run)
            host = re.escape(socket.gethostname())
            told = re.findall(rf"error: all processes must be asked for the same run, and "
                              rf"{more.split()[0]} differs: process 0 on {host}: {first}; "
                              rf"process 1 on {host}: {second}\r?$", run.stderr, re.M)
            t.equal(len(told), 1, f"reports of the difference {more}", run)


@t.test
def other_data_in_one_process_is_told_with_both_paths():
    """Files of other names that hold the same are no difference."""
    with t.folder() as tmp:
        script, data = f"{tmp}/script", t.SHAKESPEARE + "/train.bin"
        for name in ("same", "other"):
            shutil.copy2(t.SHAKESPEARE + ("/val.bin" if name == "other" else "/train.bin"),
                         f"{tmp}/{name}")
            with open(script, "w", encoding="utf-8") as file:
                file.write('#!/bin/sh\nfor a; do shift\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && '
                           f'[ "$a" = {data} ] && a={tmp}/{name}\nset -- "$@" "$a"; done\n'
                           f'exec {t.SPILLWAY} "$@"\n')
            os.chmod(script, 0o755)
            run = job(2, f"{tmp}/out-{name}", program=os.path.join(t.ROOT, script), data=data,
                      rc=None)
            t.equal(run.rc == 0, name == "same", f"whether {name} is accepted", run)
            told = re.findall(rf"--data differs: process 0 on \S+: {data} \([0-9a-f]{{16}}\); "
                              rf"process 1 on \S+: {tmp}/other \(", run.stderr)
            t.equal(len(told), int(name == "other"), f"reports, {name}", run)


@t.test
def more_ranks_than_can_work_together_are_told_with_the_product():
    with t.folder() as tmp:
        run = job(2, tmp + "/out", "--ranks", 33, rc=None)
        t.check(run.rc != 0, "too many ranks are accepted", run)
        told = "--ranks 33: 2 processes x 33 ranks = 66, and at most 64 work together"
        t.equal(run.stderr.count(told), 1, "reports", run)
        told = t.spillway("train", "--help", rc=0).stdout
        for part in ("mpirun or srun --mpi=pmix several processes", "64 in all processes"):
            t.contains(told, part, "the help")


if __name__ == "__main__":
    t.main()
