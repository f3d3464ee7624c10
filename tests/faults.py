"""Whole runs on a drive that misbehaves: harmless faults change no bit, the others end the run with
file, offset, chunk, step and cause, leave the last commit whole, and nothing wrong is trained on.

time limit: 200 s
"""
import functools
import re

import support as t

STEPS = 8
ARGS = ["--seq-len", 48, "--micro-batch", 2, "--lr", "1e-3", "--chunk", 100000]
# Of 35 records a step, all are written and, from step 2 on, all are read.
RECORDS = 35


def run(out, *more, fault=None, rc=0, measured=True, tier="nvme"):
    """A run on the device that FAULT describes; measured: with the digest of its state."""
    env = {**t.preload("faulty_device"), "FAULT": fault} if fault else None
    args = [*ARGS, "--optimizer", tier, *more]
    args += [] if "--steps" in more else ["--steps", STEPS]
    args += ["--digest"] if measured else []
    return t.spillway("train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                      "--out", out, *args, rc=rc, env=env)


def digest(finished):
    found = re.search(r"^digest: (.*)$", finished.stdout, re.M)
    t.check(found, "no digest", finished)
    return found.group(1)


@functools.lru_cache(maxsize=None)
def undisturbed():
    with t.folder() as tmp:
        return digest(run(tmp + "/calm"))


def struck(finished, kind):
    """(bytes, offset) of the transfers that the device disturbed; at least one."""
    found = re.findall(rf"^faulty device: {kind}, (\d+) bytes at (\d+)$", finished.stderr, re.M)
    t.check(found, f"{kind}: nothing was disturbed", finished)
    return [(int(size), int(at)) for size, at in found]


def resumes(out, want, after):
    """The store in out goes on after one of these steps, to the undisturbed end."""
    last = run(out, "--resume")
    found = re.search(r"^resumed: going on after step (\d+)$", last.stdout, re.M)
    t.contains([str(a) for a in after], found[1] if found else "0", "step resumed after")
    t.equal(digest(last), want, "digest after the resume", last)


def tells(finished, step, *parts):
    """The error names all of this. The wrong bytes' step was not reported as done."""
    for part in parts:
        t.contains(finished.stderr, part, "the error")
    t.check(re.search(rf"^spillway: error: step {step}: ", finished.stderr, re.M),
            f"no error of step {step}", finished)
    t.check(f"step {STEPS}/{STEPS}" not in finished.stdout and "saved" not in finished.stdout,
            "it trained on", finished)


@t.test
def harmless_faults_change_no_bit():
    with t.folder() as tmp:
        want = undisturbed()
        for kind in ("short", "eintr", "eagain", "ebusy"):
            out = f"{tmp}/{kind}"
            disturbed = run(out, fault=f"{kind}:6")
            t.check(len(struck(disturbed, kind)) > RECORDS, f"{kind}: too few", disturbed)
            t.check("error" not in disturbed.stderr, f"{kind}: an error", disturbed)
            t.equal(digest(disturbed), want, f"{kind}: digest", disturbed)


@t.test
def an_error_of_a_transfer_ends_the_run_and_the_commit_before_goes_on():
    with t.folder() as tmp:
        want = undisturbed()
        # Reads begin in step 2, behind one that tries the file: the 90th is in step 4. The 90th
        # write is in step 3.
        for kind, verb, step in (("eio_read", "read", 4), ("eio_write", "write", 3)):
            out = f"{tmp}/{kind}"
            failed = run(out, fault=f"{kind}:90", rc=1)
            (size, at), = struck(failed, kind)
            place = re.search(rf"{verb} of chunk (\d+) \(home [01]\) failed: "
                              rf"'{re.escape(out)}/optimizer\.0\.state', {size} bytes at offset "
                              rf"{at}: Input/output error$", failed.stderr, re.M)
            t.check(place, f"{kind}: the place is not named", failed)
            tells(failed, step, "elements ", "could not be " + ("read" if verb == "read" else
                                                                "written"), "Input/output error",
                  "is committed: go on with --resume")
            resumes(out, want, [step - 1, step - 2] if verb == "read" else [step - 1])


@t.test
def wrong_bytes_are_named_and_never_trained_on():
    """Read wrong or written wrong, found before the next commit: the last one goes on."""
    with t.folder() as tmp:
        want = undisturbed()
        for kind, number, step in (("flip_read", 150, 6), ("stale", 150, 6), ("lost", 150, 6),
                                   ("torn", 150, 6), ("flip_write", 150, 6)):
            out = f"{tmp}/{kind}"
            failed = run(out, "--commit-every", 4, fault=f"{kind}:{number}", rc=1)
            (_, at), = struck(failed, kind)
            tells(failed, step, "elements ", "chunk ", f"{out}/optimizer.0.state at byte {at}",
                  "CRC-32C", "nothing was trained on them")
            last = run(out, "--resume", "--commit-every", 4)
            t.contains(last.stdout, "resumed: going on after step 4", "the resume")
            t.equal(digest(last), want, f"{kind}: digest", last)


@t.test
def without_commits_wrong_bytes_are_named_too():
    with t.folder() as tmp:
        want = undisturbed()
        for kind in ("stale", "lost"):
            out = f"{tmp}/{kind}"
            # One home: what the other would hold is past the file's middle, another chunk's.
            failed = run(out, "--commit-every", 0, fault=f"{kind}:150", rc=1)
            (_, at), = struck(failed, kind)
            tells(failed, 6, "chunk ", f"{out}/optimizer.0.state at byte {at}", "CRC-32C")
            again = run(out, "--resume")
            t.contains(again.stdout, "nothing is committed", "the resume")
            t.equal(digest(again), want, f"{kind}: digest from the beginning", again)


@t.test
def damage_that_was_committed_is_named_by_every_resume():
    """Of the last step: only the next run can find it. Nothing brings such bytes back, and the
    store stays as it is until --restart."""
    constant = ["--schedule", "constant", "--warmup", 0]
    last_step = ["--keep-store", "--steps", 5]
    with t.folder() as tmp:
        want = digest(run(tmp + "/calm", *constant))
        for kind in ("lost", "torn", "flip_write"):
            out = f"{tmp}/{kind}"
            kept = run(out, *constant, *last_step, fault=f"{kind}:{4 * RECORDS + 10}",
                       measured=False)
            (_, at), = struck(kept, kind)
            # Where the records are kept in RAM this is the only time that they are read.
            for tier in ("nvme", "host"):
                refused = run(out, *constant, "--resume", tier=tier, rc=1)
                tells(refused, 5, f"{out}/optimizer.0.state at byte {at}", "chunk ", "CRC-32C")
            t.equal(digest(run(out, *constant, "--restart")), want, f"{kind}: digest")


@t.test
def a_digest_is_of_the_right_bytes_or_none():
    with t.folder() as tmp:
        failed = run(tmp + "/out", fault=f"lost:{(STEPS - 1) * RECORDS + 10}", rc=1)
        (_, at), = struck(failed, "lost")
        for part in (f"step {STEPS}: ", f"optimizer.0.state at byte {at}", "CRC-32C"):
            t.contains(failed.stderr, part, "the error")
        t.check("digest: " not in failed.stdout, "a digest of wrong bytes", failed)


@t.test
def an_error_while_a_store_is_read_back_keeps_it():
    with t.folder() as tmp:
        want = undisturbed()
        out = f"{tmp}/out"
        run(out, fault="eio_read:90", rc=1)
        for kind, said in (("eio_read", "Input/output error"), ("flip_read", "CRC-32C"),
                           ("stale", "CRC-32C")):
            failed = run(out, "--resume", fault=f"{kind}:20", rc=1)
            tells(failed, "[23]", "optimizer.0.state", "chunk ", "elements ", said)
        resumes(out, want, [2, 3])


@t.test
def a_commit_that_fails_leaves_the_one_before():
    with t.folder() as tmp:
        want = undisturbed()
        for kind, file, cause, after in (
                ("sync_state", "optimizer.0.state", "Input/output error", [3]),
                ("eio_commit", "optimizer.commit", "Input/output error", [3]),
                ("enospc_commit", "optimizer.commit", "No space left on device", [3]),
                # Written whole and perhaps not durable: found, it counts.
                ("sync_commit", "optimizer.commit", "Input/output error", [3, 4])):
            out = f"{tmp}/{kind}"
            failed = run(out, fault=f"{kind}:4", rc=1)
            struck(failed, kind)
            tells(failed, 4, f"'{out}/{file}'", cause, "committed before: step 3")
            resumes(out, want, after)


if __name__ == "__main__":
    t.main()
