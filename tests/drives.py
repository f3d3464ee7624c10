#!/usr/bin/env python3
"""Several drives: unequal ones take unequal parts, the machine profile is used, a store keeps its
layout, and none of it changes a bit."""
import contextlib
import json
import os
import re
import tempfile

import support as t

SHM = "/dev/shm"
# Many small chunks, so that proportions show.
COMMON = ("--optimizer", "nvme", "--seq-len", 64, "--chunk", 24576, "--digest")


@contextlib.contextmanager
def two_drives():
    """A folder for the run, and the store's two: on this tree's file system and in memory."""
    with t.folder() as tmp:
        if not os.access(SHM, os.W_OK) or os.stat(SHM).st_dev == os.stat(tmp).st_dev:
            t.skip("no second file system here")
        os.mkdir(tmp + "/drive")
        with tempfile.TemporaryDirectory(dir=SHM) as memory:
            yield tmp, [tmp + "/drive", memory]


def run(out, *args, rc=0, profile=""):
    done = t.train(out, *COMMON, *args, rc=rc, env={"SPILLWAY_PROFILE": profile})
    done.digest = re.findall(r"^digest: .*$", done.stdout, re.M)
    return done


def sizes(folders):
    """Of the store's files, by folder."""
    return [os.path.getsize(f"{folder}/optimizer.{i}.state") for i, folder in enumerate(folders)]


def profile_of(tmp, folders, rates, block_bytes=65536, depth=3):
    """A machine profile that says these MB/s of the folders' drives."""
    path = f"{tmp}/machine.json"
    t.spillway("bench", "nvme", "--nvme", ",".join(folders), "--seconds", 0.2, "--size", "4Mi",
               rc=0, env={"SPILLWAY_PROFILE": path})
    with open(path, encoding="utf-8") as file:
        profile = json.load(file)
    t.equal(len(profile["drives"]), len(folders), "drives in the profile")
    for drive, rate in zip(profile["drives"], rates):
        drive.update(mixed_bytes_per_s=rate * 1e6, block_bytes=block_bytes, depth=depth)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(profile, file)
    return path


@t.test
def unequal_drives_take_parts_by_their_speed_and_a_resume_keeps_them():
    with two_drives() as (tmp, folders):
        both = ("--nvme", ",".join(folders), "--keep-store")
        plain = run(f"{tmp}/plain", "--steps", 4)
        profile = profile_of(tmp, folders, (3000, 1000))
        first = run(f"{tmp}/out", *both, "--steps", 4, profile=profile)
        t.equal(first.digest, plain.digest, "bits", first)
        t.contains(first.stderr, "takes 75% of the state: 3000 MB/s, from the machine profile",
                   "what is said", first)
        large, small = sizes(folders)
        t.check(abs(large / (large + small) - 0.75) < 0.02, f"{large} and {small} bytes", first)
        # Another opinion of the drives moves nothing that is there.
        profile = profile_of(tmp, folders, (1000, 3000))
        again = run(f"{tmp}/out", *both, "--steps", 4, "--resume", profile=profile)
        t.equal(sizes(folders), [large, small], "layout", again)
        t.contains(again.stdout + again.stderr, "nothing to do", "the finished run", again)


@t.test
def a_resumed_run_reads_the_layout_that_is_there():
    with two_drives() as (tmp, folders):
        both = ("--nvme", ",".join(folders), "--steps", 6)
        plain = run(f"{tmp}/plain", "--steps", 6)
        profile = profile_of(tmp, folders, (3000, 1000))
        env = {**t.kill_at("pwrite:.commit:4:before"), "SPILLWAY_PROFILE": profile}
        t.train(f"{tmp}/out", *COMMON, *both, rc=-9, env=env)
        layout = sizes(folders)
        profile = profile_of(tmp, folders, (1000, 3000))
        other = run(f"{tmp}/out", *both, "--resume", "--keep-store", profile=profile)
        t.contains(other.stderr, "as the store was laid out", "what is said", other)
        t.equal(sizes(folders), layout, "layout", other)
        t.equal(other.digest, plain.digest, "bits", other)


@t.test
def drives_that_nobody_measured_are_measured_at_the_start():
    with two_drives() as (tmp, folders):
        done = run(f"{tmp}/out", "--nvme", ",".join(folders), "--steps", 1, "--keep-store")
        said = re.findall(r"takes (\d+)% of the state: (\d+) MB/s, measured now", done.stderr)
        if said:  # else they are equally fast, which is no fault
            t.equal(len(said), 2, "drives", done)
            (large, _), (small, _) = said
            first, second = sizes(folders)
            t.check(abs(first / (first + second) - int(large) / 100) < 0.03,
                    f"{first} and {second} bytes at {large}% and {small}%", done)
        left = [name for folder in folders for name in os.listdir(folder)]
        t.equal(sorted(left), ["optimizer.0.state", "optimizer.1.state", "optimizer.commit"],
                "files", done)


@t.test
def folders_on_one_drive_take_the_same():
    with t.folder() as tmp:
        folders = [f"{tmp}/a", f"{tmp}/b"]
        for folder in folders:
            os.mkdir(folder)
        done = run(f"{tmp}/out", "--nvme", ",".join(folders), "--steps", 1, "--keep-store")
        t.check("of the state" not in done.stderr, "striped", done)
        first, second = sizes(folders)
        t.check(abs(first - second) <= 2 * 24576, f"{first} and {second} bytes", done)


@t.test
def the_profiles_blocks_and_depth_are_used():
    with t.folder() as tmp:
        profile = profile_of(tmp, [tmp], (1000,), block_bytes=16384, depth=5)
        plain = run(f"{tmp}/plain", "--steps", 2)
        t.contains(plain.stdout, "8 blocks of 1024 KiB in flight", "the default", plain)
        tuned = run(f"{tmp}/out", "--steps", 2, profile=profile)
        t.contains(tuned.stdout, "5 blocks of 16 KiB in flight", "the mode", tuned)
        t.equal(tuned.digest, plain.digest, "bits", tuned)


@t.test
def polling_changes_no_bit():
    with t.folder() as tmp:
        plain = run(f"{tmp}/plain", "--steps", 2)
        for i, options in enumerate((["--sqpoll"], ["--iopoll"], ["--sqpoll", "--iopoll"])):
            polled = run(f"{tmp}/{i}", "--steps", 2, *options)
            t.equal(polled.digest, plain.digest, f"bits with {options}", polled)
            mode = re.search(r"^store: .*$", polled.stdout, re.M).group(0)
            t.check("SQPOLL" not in plain.stdout and "IOPOLL" not in plain.stdout, "unasked", plain)
            if "SQPOLL" not in mode and "io_uring" in mode and "--sqpoll" in options:
                t.contains(polled.stderr, "no kernel thread submits", "the reason", polled)
            if "IOPOLL" not in mode and "--iopoll" in options:
                t.contains(polled.stderr, "not polled for", "the reason", polled)


if __name__ == "__main__":
    t.main()
