"""What several processes under mpirun write: one commit for all, one model, stores exported as one,
and drives that take their time.

time limit: 300 s
"""
import fcntl
import json
import os
import re
import shutil

import support as t
from support_processes import STEPS, alone, digest, job, of_its_own


def export(store, to, *more, rc=0):
    return t.spillway("export", "--model", t.MODEL, "--from", store, "--to", to, *more, rc=rc)


def files(folder):
    found = {}
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            found[name] = file.read()
    return found


@t.test
def all_go_back_to_the_last_commit_that_all_have():
    """One process is killed before it writes the record of commit 3, when the other may have; also
    so late that the other would long have gone on. An export goes back likewise, and changes
    nothing."""
    with t.folder() as tmp:
        constant = ["--optimizer", "nvme", "--schedule", "constant", "--warmup", 0]
        want = digest(alone(tmp + "/one", "--ranks", 2, *constant, steps=8))
        alone(tmp + "/two", "--ranks", 2, *constant, "--keep-store", steps=2)
        export(tmp + "/two", tmp + "/want")
        for victim, when in (("optimizer.commit", "before"), ("optimizer-p1.commit", "before"),
                             ("optimizer-p1.commit", "late")):
            out = f"{tmp}/{victim}-{when}"
            dead = job(2, out, *constant, "--rank-timeout", 10, steps=8, rc=None,
                       env=t.kill_at(f"pwrite:/{victim}:3:{when}"))
            t.check(dead.rc != 0, "a killed process is a success", dead)
            shown = json.loads(t.spillway("inspect", out, "--json", rc=0).stdout)
            t.equal([shown["process"], *(s["process"] for s in shown["other_processes"])], [0, 1],
                    "processes that inspect shows")
            text = t.spillway("inspect", out, rc=0).stdout
            for step, process in ((shown["step"], 0), (shown["other_processes"][0]["step"], 1)):
                t.check(re.search(rf"process {process} of the run\n.*step {step} of 8", text),
                        f"inspect: the step of process {process}")
            before = files(out)
            told = export(out, out + "-files")
            t.contains(told.stdout, "exported step 2", victim, told)
            t.check(t.exported(out + "-files") == t.exported(tmp + "/want"),
                    f"{victim}: other files", told)
            t.check(files(out) == before, "the export changed the stores")
            last = job(2, out, *constant, "--resume", steps=8)
            t.contains(last.stdout, "going on after step 2", "the step", last)
            t.equal(digest(last), want, f"{victim}: other bits", last)


@t.test
def a_resume_without_all_parts_loses_none():
    """More processes than there were, a part that is missing, or one that is damaged: refused with
    the process and the folder, and what is there can still be gone on from."""
    with t.folder() as tmp:
        constant = ["--optimizer", "nvme", "--schedule", "constant", "--warmup", 0]
        store = tmp + "/store"
        nvme = ["--nvme", store, *constant]
        want = digest(alone(tmp + "/one", "--ranks", 4, *constant, steps=4))
        os.mkdir(store)
        job(2, tmp + "/out", "--ranks", 2, *nvme, "--keep-store", steps=2)
        shutil.rmtree(tmp + "/out")
        part = store + "/optimizer-p1.commit"
        before = files(store)

        def refused(processes, ranks, missing):
            run = job(processes, tmp + "/out", "--ranks", ranks, *nvme, "--resume", steps=4,
                      rc=None)
            t.check(run.rc != 0, "a lost part is nothing", run)
            t.contains(run.text, f"process {missing} finds no whole commit of its own in {store}, "
                       "while process 0 is at step 2", "what is told", run)

        refused(4, 1, 2)
        t.check(files(store) == before, "the refused resume changed the stores")
        os.rename(part, part + "-away")
        refused(2, 2, 1)
        with open(part, "wb") as file:
            file.write(b"\x5a" * len(before["optimizer-p1.commit"]))
        refused(2, 2, 1)
        os.replace(part + "-away", part)
        t.check(files(store) == before, "the refused resume changed the stores")
        last = job(2, tmp + "/out", "--ranks", 2, *nvme, "--resume", steps=4)
        t.equal(digest(last), want, "other bits", last)


@t.test
def a_result_of_other_processes_is_not_taken_for_this_runs():
    with t.folder() as tmp:
        line = ["--optimizer", "nvme"]
        job(2, f"{tmp}/out", *line)
        run = job(3, f"{tmp}/out", *line, "--resume", rc=None)
        t.check(run.rc != 0, "a result of other ranks is nothing to do", run)
        t.contains(run.stderr, "is of another run: its numerics is 'ranks=2 ", "why", run)
        # With as many ranks in all it has the same bits, however they are shared out.
        for processes, ranks in ((2, 1), (1, 2)):
            same = [*line, "--ranks", ranks, "--resume"]
            run = job(2, f"{tmp}/out", *same) if processes == 2 else alone(f"{tmp}/out", *same)
            t.contains(run.stdout, "nothing to do", f"{processes} processes", run)


@t.test
def a_survivor_tells_what_is_on_its_disk():
    """The first process is stopped before it writes the record of commit 3, which the other has
    written and then waits for; a resume goes on from commit 2, which both have."""
    with t.folder() as tmp:
        line = ["--optimizer", "nvme", "--schedule", "constant", "--warmup", 0]
        out = f"{tmp}/out"
        dead = job(2, out, *line, "--rank-timeout", 2, steps=8, rc=None,
                   env=t.kill_at("pwrite:/optimizer.commit:3:stop"))
        t.check(dead.rc != 0, "a stopped process is a success", dead)
        shown = json.loads(t.spillway("inspect", out, "--json", rc=0).stdout)
        t.equal((shown["step"], shown["other_processes"][0]["step"]), (2, 3), "steps on the disk")
        t.contains(dead.stderr, f"process 1 has step 3 committed in {out}: go on with --resume, "
                   "from the last step that all 2 processes have", "what the survivor tells", dead)
        last = job(2, out, *line, "--resume", steps=8)
        t.contains(last.stdout, "going on after step 2", "the step", last)


@t.test
def stores_of_processes_are_exported_as_that_of_one():
    """Byte for byte: in one folder, in several of it, and with folders of each process alone."""
    with t.folder() as tmp:
        keep = ["--keep-store", "--optimizer", "nvme"]
        for i, more in enumerate(([], ["--master", "split", "--moments", "8bit"])):
            one = f"{tmp}/{i}-one"
            alone(one, "--ranks", 4, *keep, *more)
            export(one, one + "-files")
            want = t.exported(one + "-files")
            for processes in (2, 4):
                out = f"{tmp}/{i}-{processes}"
                job(processes, out, "--ranks", 4 // processes, *keep, *more)
                told = export(out, out + "-files")
                t.contains(told.stdout, f"exported step {STEPS}", "what it says", told)
                t.check(t.exported(out + "-files") == want,
                        f"{processes} processes: other files", told)
        # The layout knows in how many folders a store lies, so it is another run.
        places = [f"{tmp}/{n}" for n in ("a", "b", "p0a", "p0b", "p1a", "p1b")]
        for place in places:
            os.mkdir(place)
        alone(tmp + "/two", "--ranks", 4, *keep, "--nvme", ",".join(places[:2]))
        export(tmp + "/two", tmp + "/two-files", "--nvme", ",".join(places[:2]))
        want = t.exported(tmp + "/two-files")
        job(2, tmp + "/shared", "--ranks", 2, *keep, "--restart", "--nvme", ",".join(places[:2]))
        export(tmp + "/shared", tmp + "/shared-files", "--nvme", ",".join(places[:2]))
        t.check(t.exported(tmp + "/shared-files") == want, "two folders for all: other files")
        program = of_its_own(tmp, "own", "--nvme", f"{tmp}/p${{R}}a,{tmp}/p${{R}}b")
        job(2, tmp + "/own-out", "--ranks", 2, *keep, program=program)
        for number, order in enumerate((places[2:], places[4:] + places[2:4])):
            to = f"{tmp}/own-{number}"
            export(tmp + "/own-out", to, "--nvme", ",".join(order))
            t.check(t.exported(to) == want, f"two folders for each, {number}: other files")


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

        constant = ["--ranks", 2, *keep, "--schedule", "constant", "--warmup", 0]
        job(2, out, *constant, steps=1)
        shutil.copytree(out, f"{tmp}/short")
        job(2, out, *constant, "--resume")
        replaced("another step", f"{tmp}/short", f"process 0 in {part} stands at step {STEPS}",
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


def run_ids(out):
    """{process: its run's id} of the stores in a folder."""
    shown = json.loads(t.spillway("inspect", out, "--json", rc=0).stdout)
    shown = shown.get("store", shown)
    for s in (shown, *shown["other_processes"]):
        t.equal(s["processes"], 1 + len(shown["other_processes"]), "processes that a part tells")
    return {s["process"]: s["run_id"] for s in (shown, *shown["other_processes"])}


def take_part(source, process, target, place):
    """The part of a process becomes that of another, or of another run."""
    def name(p):
        return f"-p{p}" if p else ""
    for end in (".commit", ".0.state"):
        shutil.copy2(f"{source}/optimizer{name(process)}{end}",
                     f"{target}/optimizer{name(place)}{end}")


@t.test
def parts_of_two_runs_are_never_mixed():
    """Runs of the same shape and settings, as are their parts, which are told apart by the run and
    process that their commits name; a resume keeps the name."""
    with t.folder() as tmp:
        line = ["--keep-store", "--optimizer", "nvme", "--schedule", "constant", "--warmup", 0]
        for run in ("a", "b"):
            job(2, f"{tmp}/{run}", *line, steps=2)
        ids = {run: run_ids(f"{tmp}/{run}") for run in ("a", "b")}
        t.check(ids["a"][0] == ids["a"][1] != ids["b"][0] == ids["b"][1], f"run ids {ids}")
        job(2, f"{tmp}/a", *line, "--resume", steps=3)
        t.equal(run_ids(f"{tmp}/a"), ids["a"], "ids after a resume")
        job(2, f"{tmp}/b", *line, "--resume", steps=3)
        text = t.spillway("inspect", f"{tmp}/a", rc=0).stdout
        for p in (0, 1):
            t.contains(text, f"run {ids['a'][0]}, process {p} of 2", "inspect")
        a, b = f"{tmp}/a", f"{tmp}/b"
        swapped = "optimizer.commit is the part of process 1 of 2 (run"
        twice = "optimizer-p1.commit is the part of process 0 of 2 (run"
        both = (f"of run {ids['b'][1]}", f"of run {ids['a'][0]}")
        for what, parts, told in (("another run's", [(b, 1, 1)], both),
                                  ("one twice", [(a, 0, 1)], [twice]),
                                  ("swapped", [(a, 0, 1), (a, 1, 0)], [swapped])):
            mixed = f"{tmp}/{what.split()[0]}"
            shutil.copytree(a, mixed)
            for source, process, place in parts:
                take_part(source, process, mixed, place)
            before = files(mixed)
            refused = export(mixed, f"{tmp}/to", rc=1)
            t.check(not os.path.exists(f"{tmp}/to"), f"{what}: something was exported", refused)
            again = job(2, mixed, *line, "--resume", steps=4, rc=None)
            t.check(again.rc != 0, f"{what}: trained on", again)
            for run in (refused, again):
                for part in told:
                    t.contains(run.text, part, what, run)
            t.check(files(mixed) == before, f"{what}: the stores were changed", again)
        t.contains(job(2, a, *line, "--resume", steps=4).stdout, "going on after step 3", "whole")


def only(tmp):
    """A folder with the store of process 1 alone."""
    os.mkdir(f"{tmp}/only")
    for name in ("optimizer-p1.commit", "optimizer-p1.0.state"):
        shutil.copy2(f"{tmp}/seed/{name}", f"{tmp}/only/{name}")
    return f"{tmp}/only"


@t.test
def an_export_begins_a_run_of_several_processes():
    """The bits of the run that never stopped, and the same files again."""
    with t.folder() as tmp:
        more = ["--optimizer", "nvme", "--schedule", "constant", "--warmup", 0]
        want = digest(alone(tmp + "/whole", "--ranks", 4, *more, steps=6))
        job(4, tmp + "/out", *more, "--keep-store", steps=3)
        export(tmp + "/out", tmp + "/files")
        more += ["--ranks", 2, "--import", tmp + "/files"]
        t.equal(digest(job(2, tmp + "/on", *more, steps=6)), want, "digest of what goes on")
        job(2, tmp + "/again", *more, "--keep-store", steps=3)
        export(tmp + "/again", tmp + "/files-again")
        t.check(t.exported(tmp + "/files-again") == t.exported(tmp + "/files"), "other files")
        export(tmp + "/again", tmp + "/files-2")
        other = of_its_own(tmp, "other", "--import", f"{tmp}/files$([ $R = 1 ] && echo -2)")
        run = job(2, tmp + "/mixed", *more[:-2], program=other, rc=None)
        t.check(run.rc != 0, "two exports begin one run", run)
        t.contains(run.stderr, "--import", "what differs", run)


@t.test
def a_resume_reads_the_part_of_each_process():
    """What a process loads is its ranks' share of what one process with all of them does."""
    with t.folder() as tmp:
        more = ["--optimizer", "nvme", "--params", "nvme", "--keep-store"]
        loaded = {}
        for processes in (1, 4):
            out, log = f"{tmp}/{processes}", f"{tmp}/{processes}.jsonl"
            for resume in ([], ["--resume", "--log", log]):
                line = [*more, *resume, "--ranks", 4 // processes]
                steps = STEPS + len(resume)
                if processes == 1:
                    alone(out, *line, steps=steps)
                else:
                    job(processes, out, *line, steps=steps)
            loaded[processes] = [o["loaded_bytes"] for o in t.read_log(log)[1]
                                 if o["event"] == "start"][0]
        t.equal(4 * loaded[4], loaded[1], "bytes loaded by one process, and by each of four")


@t.test
def saves_on_drives_that_take_their_time_are_those_of_one():
    """Every write, sync and rename of each process takes up to 2 ms longer, drawn by each alone; a
    commit and a save follow every step. SAVES=N makes more of them."""
    saves = int(os.environ.get("SAVES", "16"))
    with t.folder() as tmp:
        more = ["--optimizer", "nvme", "--save-every", 1, "--commit-every", 1]
        alone(tmp + "/one", "--ranks", 8, *more, steps=saves)
        job(2, tmp + "/slow", "--ranks", 4, *more, steps=saves,
            env={**t.preload("slow_calls"), "SLOW_CALLS": "/slow/:2:random"})
        folders = ["", *(f"step-{n}" for n in range(1, saves))]
        t.equal(sorted(n for n in os.listdir(tmp + "/slow") if n.startswith("step-")),
                sorted(folders[1:]), "saves")
        for name in folders:
            t.check(t.read_model(f"{tmp}/one/{name}")[1] == t.read_model(f"{tmp}/slow/{name}")[1],
                    f"{name or 'the last save'}: another model")
        left = [n for _, _, found in os.walk(tmp + "/slow") for n in found
                if "partial" in n or "optimizer" in n]
        t.equal(left, [], "left behind")


@t.test
def no_process_gives_up_while_another_saves():
    """The first one writes the model for longer than --rank-timeout."""
    with t.folder() as tmp:
        run = job(2, tmp + "/out", "--rank-timeout", 2 * t.SLOWDOWN,
                  env={**t.preload("slow_calls"),
                       "SLOW_CALLS": f".safetensors:{3000 * t.SLOWDOWN}:always"})
        t.check(run.seconds > 6 * t.SLOWDOWN, f"it took {run.seconds:.1f} s alone", run)


if __name__ == "__main__":
    t.main()
