"""Crash and resume: a run that was stopped at any moment goes on from its last commit and ends with
the bits of a run that nobody disturbed.

time limit: 300 s
"""
import contextlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import time

import support as t

STEPS = 12
BASE = ["--seq-len", 48, "--micro-batch", 2, "--lr", "1e-3", "--chunk", 100000, "--digest"]
NVME = ["--optimizer", "nvme"]
MODES = [
    NVME,
    NVME + ["--overlap", "none"],
    NVME + ["--clip", 0],
    NVME + ["--commit-every", 3, "--moments", "8bit"],
    NVME + ["--master", "split", "--dtype", "fp32"],
    ["--optimizer", "host", "--commit-every", 2],
    ["--optimizer", "device", "--commit-every", 2],
]
KILLS = int(os.environ.get("KILLS", "7"))
SEED = int(os.environ.get("SEED", str(time.time_ns() % 1000000)))


def arguments(out, *more, steps=STEPS):
    return ["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin", "--out", out,
            "--steps", steps, *BASE, *more]


def run(out, *more, rc=0, steps=STEPS, **options):
    return t.spillway(*arguments(out, *more, steps=steps), rc=rc, **options)


def digest(finished):
    found = re.search(r"^digest: (.*)$", finished.stdout, re.M)
    t.check(found, "no digest", finished)
    return found.group(1)


def resumed_from(finished):
    found = re.search(r"^resumed: going on after step (\d+)$", finished.stdout, re.M)
    return int(found.group(1)) if found else 0


def result(out):
    return t.read_model(out)[1]


def undisturbed(tmp, mode):
    whole = run(f"{tmp}/whole", *mode)
    t.equal(os.path.exists(f"{tmp}/whole/optimizer.commit"), False, "the store after a good end")
    return digest(whole), result(f"{tmp}/whole")


def finish_and_compare(out, mode, want, **options):
    last = run(out, *mode, "--resume", **options)
    t.equal(digest(last), want[0], f"digest after {mode}", last)
    t.check(result(out) == want[1], f"{mode}: the written weights differ", last)
    t.equal([n for n in os.listdir(out) if n.startswith("optimizer")], [], "store left behind")
    return last


def chain(tmp, mode, want, life_s, kills, dice):
    """One job, killed up to `kills` times and resumed each time; the number of kills that hit.
    Each resume may repeat the steps since the last commit, and two more."""
    with t.folder() as below:
        out, log, hit = f"{below}/out", f"{below}/log.jsonl", 0
        while hit < kills:
            process = t.Process(arguments(out, *mode, "--resume", "--log", log))
            time.sleep(dice.uniform(0, life_s))
            process.signal(signal.SIGKILL)
            killed = process.finish()
            t.check(killed.rc in (0, -signal.SIGKILL), f"{mode}", killed)
            if killed.rc == 0:
                break
            hit += 1
        last = run(out, *mode, "--resume", "--log", log)
        if "nothing to do" not in last.stdout:
            t.equal(digest(last), want[0], f"{mode}", last)
        t.check(result(out) == want[1], f"{mode}: the written weights differ", last)
        with open(log, encoding="utf-8") as file:
            steps = sum("loss" in json.loads(line) for line in file)
        every = 3 if 3 in mode else 2 if 2 in mode else 1
        t.check(steps <= STEPS + (1 + every) * hit, f"{mode}: {steps} steps, {hit} kills")
    return hit


@t.test
def killed_at_random_moments():
    """Uniform over the run's life: start, first commit, steps, final save, clean-up."""
    print(f"# SEED={SEED} KILLS={KILLS}", flush=True)
    dice = random.Random(SEED)
    for mode in MODES:
        with t.folder() as tmp:
            start, hit = time.monotonic(), 0
            want = undisturbed(tmp, mode)
            life_s = time.monotonic() - start
            for _ in range(10 * KILLS):
                if hit >= KILLS / len(MODES):
                    break
                hit += chain(tmp, mode, want, life_s, min(6, KILLS), dice)
            t.check(hit >= KILLS / len(MODES), f"{mode}: only {hit} kills hit")


@t.test
def killed_at_every_stage_of_the_commit():
    """Section by section: the sync of the records, the record itself (before, torn, after), its
    sync. What counts is the last durable record: a resume begins there."""
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        # Commit 5 is the fifth call of each kind; with one drive a commit syncs one state file.
        stages = [("fdatasync:.state:5:before", 4), ("fdatasync:.state:5:after", 4),
                  ("pwrite:.commit:5:before", 4), ("pwrite:.commit:5:torn", 4),
                  ("pwrite:.commit:5:after", 5), ("fdatasync:.commit:5:before", 5),
                  ("fdatasync:.commit:5:after", 5)]
        for number, (stage, begins) in enumerate(stages):
            out = f"{tmp}/{number}"
            killed = run(out, *NVME, rc=-signal.SIGKILL, env=t.kill_at(stage))
            t.check("saved" not in killed.stdout, "killed too late", killed)
            last = finish_and_compare(out, NVME, want)
            t.equal(resumed_from(last), begins, f"step that {stage} resumes after", last)


@t.test
def killed_while_the_store_is_cleaned_up():
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        for number, stage in enumerate(("unlink:.commit:1:before", "unlink:.commit:1:after",
                                        "unlink:.state:1:before", "unlink:.state:1:after")):
            out = f"{tmp}/{number}"
            run(out, *NVME, rc=-signal.SIGKILL, env=t.kill_at(stage))
            t.check(result(out) == want[1], f"{stage}: the result is not whole")
            again = run(out, *NVME, "--resume")
            t.contains(again.stdout, "nothing to do", stage)
            t.equal([n for n in os.listdir(out) if n.startswith("optimizer")], [],
                    f"{stage}: store left behind")


@t.test
def a_save_that_a_kill_cut_short_is_made_again():
    """Where the run stands at the step that it was of; what else a kill has left is told and
    removed, and a whole save of a step that the run comes to again is replaced."""
    with t.folder() as tmp:
        mode, out = [*NVME, "--save-every", 4], f"{tmp}/out"
        want = undisturbed(tmp, mode)
        process = t.Process(arguments(out, *mode), env={**t.preload("slow_calls"),
                                                        "SLOW_CALLS": ".safetensors:3000:always"})
        while not os.path.isdir(f"{out}/step-4.partial"):
            t.check(process.is_running(), "it has ended already")
            time.sleep(0.01)
        process.signal(signal.SIGKILL)
        process.finish()
        for made in (f"{out}/step-2.partial", f"{out}.step-4.partial", f"{out}/step-8.partial",
                     f"{out}/step-8"):
            os.mkdir(made)
            with open(f"{made}/model.safetensors", "wb") as file:
                file.write(b"half")
        last = finish_and_compare(out, mode, want)
        t.equal(resumed_from(last), 4, "the step", last)
        for text in ("step-4.partial was removed: the save of step 4 was cut short, and is made "
                     "now", "step-8.partial was removed: the save of step 8 was cut short, and is "
                     "made when the run comes to", "warning: --resume: " + f"{out}/step-2.partial "
                     "was removed: the save of step 2 was cut short, and is lost",
                     "out.step-4.partial was removed: the run was killed while it stopped"):
            t.contains(last.stderr, text, "what is told", last)
        for step in (4, 8):
            t.check(t.read_model(f"{out}/step-{step}") == t.read_model(f"{tmp}/whole/step-{step}"),
                    f"the save of step {step}", last)
        t.equal([n for n in (*os.listdir(out), *os.listdir(tmp)) if "partial" in n], [], "left")


@t.test
def interrupted_runs_say_where_and_go_on():
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        process = t.Process(arguments(f"{tmp}/out", *NVME, "--log", f"{tmp}/log"))
        process.wait_for(r"^step 1/")
        process.signal(signal.SIGINT)
        stopped = process.finish()
        t.equal(stopped.rc, 130, "status", stopped)
        step = int(re.search(r"stopped after step (\d+);.*--resume goes on", stopped.stdout)[1])
        last = finish_and_compare(f"{tmp}/out", NVME, want)
        t.equal(resumed_from(last), step, "step", last)


def stop_before_load(*args):
    """Holds a run back where it prints its table, before it loads anything, asks it to stop, and
    lets it go on: (exit status, standard output, standard error)."""
    reader, writer = os.pipe()
    filled = 0
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    child = subprocess.Popen([t.SPILLWAY, *map(str, args)], cwd=t.ROOT, stdout=writer,
                             stderr=subprocess.PIPE, preexec_fn=t.as_from_a_shell(None))
    os.close(writer)
    while True:  # until it catches the signal
        with open(f"/proc/{child.pid}/status", encoding="ascii") as file:
            caught = int(re.search(r"^SigCgt:\s+(\w+)$", file.read(), re.M)[1], 16)
        if caught >> (signal.SIGINT - 1) & 1:
            break
        t.check(child.poll() is None, "the run has ended already")
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    with os.fdopen(reader, "rb") as file:
        text = file.read()[filled:].decode()
    with child.stderr as file:
        said = file.read().decode()
    return child.wait(), text, said


@t.test
def stopped_while_loading_a_run_leaves_what_was_there():
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        out = f"{tmp}/out"
        status, text, said = stop_before_load(*arguments(out, *NVME))
        t.equal(status, 130, "exit status of a new run")
        t.contains(text, "stopped while loading; nothing was saved", "a new run")
        t.contains(said, "stopping before another step is made", "what is said at once")
        t.check("saving" not in said, f"a save is announced: {said!r}")
        t.check(not os.path.exists(out), "a new run's folder")
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:4:before"))
        status, text, _ = stop_before_load(*arguments(out, *NVME, "--resume"))
        t.equal(status, 130, "exit status of a resume")
        t.contains(text, "stopped while loading; what is committed is as it was", "a resume")
        t.check("loaded" not in text, "a resume has loaded all")
        t.equal(resumed_from(finish_and_compare(out, NVME, want)), 3, "step")


@t.test
def what_is_loaded_is_told():
    """The working weights, and the records of device and host; new or resumed."""
    with t.folder() as tmp:
        for mode, kept in ((NVME, 0), (["--optimizer", "host", "--commit-every", 2], 1)):
            out = f"{tmp}/{kept}"
            first = run(out, *mode, rc=-signal.SIGKILL,
                        env=t.kill_at("pwrite:.commit:4:before"))
            last = run(out, *mode, "--resume", "--log", f"{tmp}/{kept}.log")
            params = int(re.search(r"^(\d+) parameters", first.stdout, re.M)[1])
            told = t.read_log(f"{tmp}/{kept}.log")[1][0]["loaded_bytes"]
            each = 2 + 12 * kept
            # Tensors begin at multiples of 128 elements, records take whole blocks of 4 KiB.
            more = 47 * 127 * each + kept * 4096 * 64
            t.check(0 <= told - params * each <= more, f"{told} bytes", last)
            for text in (first.stdout, last.stdout):
                t.check(re.search(r"^loaded \S+ [kM]B of weights and state in", text, re.M), "line")


@t.test
def the_log_is_appended_and_a_torn_line_is_cut():
    with t.folder() as tmp:
        log = f"{tmp}/log"
        run(f"{tmp}/out", *NVME, "--log", log, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:5:before"))
        with open(log, "a", encoding="utf-8") as file:
            file.write('{"step": 5, "lo')
        run(f"{tmp}/out", *NVME, "--resume", "--log", log)
        steps, others = t.read_log(log)
        t.equal(sorted({s["step"] for s in steps}), list(range(1, STEPS + 1)), "steps in the log")
        t.equal([o["step"] for o in others if o.get("event") == "resumed_from"], [4], "event")


@t.test
def a_store_with_commits_is_never_overwritten_unasked():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:4:before"))
        refused = run(out, *NVME, rc=1)
        for part in ("step 3", t.MODEL, "--resume", "--restart"):
            t.contains(refused.stderr, part, "the refusal")
        both = run(out, *NVME, "--resume", "--restart", rc=2)
        t.contains(both.stderr, "exclude", "both options")
        fresh = run(out, *NVME, "--restart")
        t.equal(resumed_from(fresh), 0, "a restarted run's begin")


@t.test
def a_restart_that_a_kill_ends_leaves_no_model_without_weights():
    """config.json makes a folder a model: it goes before what belongs to it."""
    for model in ("out", "out/step-4"):
        with t.folder() as tmp:
            run(f"{tmp}/out", *NVME, "--save-every", 4)
            run(f"{tmp}/out", *NVME, "--restart", rc=-signal.SIGKILL,
                env=t.kill_at(f"unlink:{model}/config.json:1:after"))
            t.check(not os.path.exists(f"{tmp}/{model}/config.json"), f"{model} is a model")
            t.check(os.path.exists(f"{tmp}/{model}/model.safetensors"), f"{model}: weights first")


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def set_version(path, version):
    """Both records of a journal as another version of the program would have written them."""
    with open(path, "r+b") as file:
        whole = bytearray(file.read())
        for at in (0, len(whole) // 2):
            chunks = struct.unpack_from("<I", whole, at + 64)[0]
            struct.pack_into("<2I", whole, at + 8, version, 0)
            crc = crc32c(whole[at:at + 4096 + 8 * chunks])
            struct.pack_into("<I", whole, at + 12, crc)
        file.seek(0)
        file.write(whole)


@t.test
def a_store_of_another_version_is_refused_by_its_number():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:4:before"))
        set_version(f"{out}/optimizer.commit", 2)
        t.contains(t.spillway("inspect", out, rc=0).stdout, "step 3 of", "the same version")
        set_version(f"{out}/optimizer.commit", 1)
        before = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        told = "is of version 1 of the format, and this program reads version 2"
        for refused in (run(out, *NVME, "--resume", rc=1), run(out, *NVME, rc=1),
                        t.spillway("inspect", out, rc=1),
                        t.spillway("export", "--model", t.MODEL, "--from", out, "--to",
                                   f"{tmp}/to", rc=1)):
            t.contains(refused.stderr, told, "the refusal", refused)
        after = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        t.check(after == before, "a refusal changed the store")
        t.equal(resumed_from(run(out, *NVME, "--restart")), 0, "a restarted run's begin")


@t.test
def a_foreign_store_is_refused_by_name():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        other = f"{tmp}/data.bin"
        t.write_tokens(other, t.read_tokens(t.SHAKESPEARE + "/train.bin")[5:])
        t.spillway("init", "--config", t.MODEL + "/config.json", "--seed", 3, "--out",
                   f"{tmp}/model", rc=0)
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:4:before"))
        before = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        with open(f"{tmp}/documents", "wb") as file:
            file.write(struct.pack("<2Q", 0, 100))
        for name, more in (("rows", ["--seed", 9]), ("state", ["--master", "split"]),
                           ("numerics", ["--accumulate", 2]),
                           ("data", ["--documents", f"{tmp}/documents"])):
            refused = run(out, *NVME, "--resume", *more, rc=1)
            t.contains(refused.stderr, f"its {name} is", f"refusal of {more}")
        for name, old, new in (("data", t.SHAKESPEARE + "/train.bin", other),
                               ("model", t.MODEL, f"{tmp}/model")):
            swapped = [new if a == old else a for a in arguments(out, *NVME, "--resume")]
            refused = t.spillway(*swapped, rc=1)
            t.contains(refused.stderr, f"its {name} is", f"refusal of another {name}")
        after = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        t.check(before == after, "a refused resume changed the store")
        short = run(out, *NVME, "--resume", steps=2, rc=1)
        t.contains(short.stderr, "beyond --steps", "fewer steps than done")


@t.test
def resume_without_a_commit_starts_at_the_beginning():
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        fresh = run(f"{tmp}/out", *NVME, "--resume")
        t.contains(fresh.stdout, "nothing is committed", "what it says")
        t.equal(digest(fresh), want[0], "digest", fresh)
        again = run(f"{tmp}/out", *NVME, "--resume")
        t.contains(again.stdout, "nothing to do", "a second time")


@t.test
def what_never_came_to_a_commit_is_not_left_behind():
    """Also where the run that starts anew has no store, or one without commits."""
    with t.folder() as tmp:
        for number, mode in enumerate((["--optimizer", "host"], [*NVME, "--commit-every", 0])):
            out = f"{tmp}/{number}"
            process = t.Process(arguments(out, "--optimizer", "host:50%,nvme", "--commit-every",
                                          100000, steps=100000))
            process.wait_for(r"^step 1/")
            process.signal(signal.SIGKILL)
            process.finish()
            t.check(os.path.exists(f"{out}/optimizer.commit"), "no store was begun")
            last = run(out, *mode, "--resume")
            t.contains(last.stdout, "nothing is committed", "what it says", last)
            t.equal([n for n in os.listdir(out) if n.startswith("optimizer")], [],
                    f"what {mode} left behind")


@t.test
def a_kept_store_goes_on_to_more_steps():
    """The schedule must not depend on the number of steps for this to be one run."""
    constant = NVME + ["--schedule", "constant", "--warmup", 0]
    with t.folder() as tmp:
        want = undisturbed(tmp, constant)
        out = f"{tmp}/out"
        run(out, *constant, "--keep-store", steps=5)
        t.check(os.path.exists(f"{out}/optimizer.commit"), "the store was not kept")
        last = run(out, *constant, "--resume")
        t.equal(resumed_from(last), 5, "step", last)
        t.equal(digest(last), want[0], "digest", last)


@t.test
def a_result_of_another_run_is_not_taken_for_this_ones():
    """Without a store there is nothing to go on from, and another run's model is not this one's,
    nor that of other steps. Where a store was kept, the model of fewer steps is no result yet."""
    constant = NVME + ["--schedule", "constant", "--warmup", 0]
    with t.folder() as tmp:
        want = undisturbed(tmp, constant)
        out = f"{tmp}/whole"
        before = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        for more, steps, told in (
                (["--ranks", 2], STEPS, "model in .* is of another run: its numerics is 'ranks=1"),
                (["--seed", 3], STEPS, "its rows is 'order shuffle, seed 0' and this run's is"),
                ([], STEPS + 1, f"is that of step {STEPS}, --steps is {STEPS + 1}, and no store")):
            refused = run(out, *constant, *more, "--resume", steps=steps, rc=1)
            t.check(re.search(told, refused.stderr), f"refusal of {more} {steps}", refused)
        after = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
        t.check(after == before, "a refused resume changed the result")
        t.contains(run(out, *constant, "--resume").stdout, "nothing to do", "the same run")
        os.unlink(f"{out}/training.json")
        told = run(out, *constant, "--resume")
        t.contains(told.stderr, "nothing in " + out + " tells which run its model is of", "alone")
        t.contains(told.stdout, "nothing to do", "a model alone")
        more = f"{tmp}/more"
        run(more, *constant, "--keep-store", steps=5)
        run(more, *constant, "--resume", rc=-signal.SIGKILL,
            env=t.kill_at(f"fdatasync:.commit:{STEPS - 5}:after"))
        t.check(result(more) != want[1], "killed too late")
        t.equal(resumed_from(finish_and_compare(more, constant, want)), STEPS, "step")


@t.test
def another_tier_goes_on_with_the_same_bits():
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        for number, tier in enumerate(("host", "device", "nvme")):
            out = f"{tmp}/{number}"
            run(out, *NVME, rc=-signal.SIGKILL,
                env=t.kill_at("pwrite:.commit:6:before"))
            mode = ["--optimizer", tier, "--commit-every", 4]
            t.equal(resumed_from(finish_and_compare(out, mode, want)), 5, tier)


@t.test
def a_resumed_run_without_commits_leaves_the_one_it_came_from_whole():
    """A host run makes none by default, --commit-every 0 makes none anywhere: killed, it starts
    from the same commit once more."""
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME)
        at_6 = t.kill_at("pwrite:.commit:6:before")
        for number, mode in enumerate((["--optimizer", "host"], ["--optimizer", "device"],
                                       [*NVME, "--commit-every", 0])):
            out = f"{tmp}/{number}"
            run(out, *NVME, rc=-signal.SIGKILL, env=at_6)
            process = t.Process(arguments(out, *mode, "--resume"))
            process.wait_for(r"^step 1[01]/|^step [6-9]/")
            process.signal(signal.SIGKILL)
            process.finish()
            if not os.path.exists(f"{out}/config.json"):
                t.equal(resumed_from(finish_and_compare(out, mode, want)), 5, f"{mode}")


@t.test
def a_kept_store_is_that_of_the_last_step():
    """Also where the last step is no multiple of the interval, and where nothing else commits."""
    constant = ["--schedule", "constant", "--warmup", 0]
    with t.folder() as tmp:
        want = undisturbed(tmp, NVME + constant)
        for number, mode in enumerate(([*NVME, "--commit-every", 3], ["--optimizer", "host"],
                                       ["--optimizer", "device", "--commit-every", 4])):
            out = f"{tmp}/{number}"
            run(out, *mode, *constant, "--keep-store", steps=5)
            shown = t.spillway("inspect", out, rc=0).stdout
            for part in ("step 5 of 5", "parameters"):  # the store, and the model beside it
                t.contains(shown, part, f"inspect after {mode}")
            both = json.loads(t.spillway("inspect", out, "--json", rc=0).stdout)
            t.equal((both["store"]["step"], both["parameters"]), (5, 260032), "inspect --json")
            last = run(out, *mode, *constant, "--resume")
            t.equal(resumed_from(last), 5, f"{mode}", last)
            t.equal(digest(last), want[0], f"{mode}", last)


@t.test
def a_finished_run_leaves_the_store_of_another_alone():
    """Two runs, one store folder: one is done and resumed, the other is at work."""
    with t.folder() as tmp:
        store = f"{tmp}/store"
        os.mkdir(store)
        run(f"{tmp}/done", *NVME, "--nvme", store)
        other = t.Process(arguments(f"{tmp}/other", *NVME, "--nvme", store, "--commit-every",
                                    100000, steps=100000))
        other.wait_for(r"^step 1/")
        before = sorted(os.listdir(store))
        again = run(f"{tmp}/done", *NVME, "--nvme", store, "--resume")
        t.contains(again.stdout, "nothing to do", "the finished run")
        t.equal(sorted(os.listdir(store)), before, "the other run's store")
        other.signal(signal.SIGKILL)
        other.finish()


@t.test
def two_runs_on_one_store_are_refused():
    with t.folder() as tmp:
        store = f"{tmp}/store"
        os.mkdir(store)
        first = t.Process(arguments(f"{tmp}/a", *NVME, "--nvme", store, steps=100000))
        first.wait_for(r"^step 1/")
        second = run(f"{tmp}/b", *NVME, "--nvme", store, "--resume", rc=1)
        t.contains(second.stderr, str(first.pid), "the owner in the refusal")
        first.signal(signal.SIGKILL)
        first.finish()


@t.test
def changed_bytes_are_never_trained_on():
    """One bit of one committed record: the resume names file, chunk and step, and stops."""
    with t.folder() as tmp:
        out = f"{tmp}/out"
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:6:before"))
        size = os.path.getsize(f"{out}/optimizer.0.state")
        for home in (0, 1):  # a chunk's committed home is one of them
            shutil.copytree(out, f"{tmp}/{home}")
            with open(f"{tmp}/{home}/optimizer.0.state", "r+b") as file:
                at = home * (size // 2) + 70000
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
        damaged = [run(f"{tmp}/{home}", *NVME, "--resume", rc=None) for home in (0, 1)]
        t.equal(sorted(r.rc for r in damaged), [0, 1], "one home is committed, the other is not",
                damaged[0])
        bad = next(r for r in damaged if r.rc == 1)
        for part in ("optimizer.0.state", "chunk ", "step 5", "CRC-32C"):
            t.contains(bad.stderr, part, "the error")


@t.test
def what_is_written_to_the_drives_is_told():
    """By the kernel's count, too: records of two homes and commits, and nothing else but the model,
    the log and what the file system adds."""
    with t.folder() as tmp:
        done = run(f"{tmp}/out", *NVME, "--write-budget", "20M", "--log", f"{tmp}/log")
        told = re.search(r"^written to the drives: ([\d.]+) MB, ([\d.]+) kB per token, ",
                         done.stdout, re.M)
        t.check(told, "nothing told", done)
        steps = t.read_log(f"{tmp}/log")[0]
        records = sum(s["bytes"]["nvme_write"] for s in steps)
        place = 4096 * (1 + -(-8 * int(records / STEPS / 100000 + 1) // 4096))
        t.close(float(told[1]) * 1e6, records + STEPS * place, 0.01, "bytes", relative=True)
        t.close(float(told[2]) * 1e3, float(told[1]) * 1e6 / sum(s["tokens"] for s in steps), 0.01,
                "bytes per token", relative=True)
        t.equal(len(re.findall("write-budget", done.stderr)), 1, "warnings", done)
        t.close(done.io["write_bytes"], float(told[1]) * 1e6, 0.1, "the kernel's count",
                relative=True, run=done)
        quiet = run(f"{tmp}/other", *NVME, "--write-budget", "1G")
        t.check("write-budget" not in quiet.stderr, "warned too early", quiet)


@t.test
def inspect_shows_a_store():
    with t.folder() as tmp:
        out = f"{tmp}/out"
        run(out, *NVME, rc=-signal.SIGKILL,
            env=t.kill_at("pwrite:.commit:6:before"))
        shown = t.spillway("inspect", out, rc=0).stdout
        for part in ("step 5 of 12", t.MODEL, "numerics", ", 1 folder\n"):
            t.contains(shown, part, "inspect of a store")


if __name__ == "__main__":
    t.main()
