"""What the byte table says is what a run takes, in each of its four phases.

A random model of 10 million parameters: the highest private memory (RssAnon + RssShmem, sampled)
of a run that loads, trains, evaluates, saves in between and at the end, and of one that is stopped
and resumed, is at most the table's device and host memory plus 5%. Placements from everything in
memory to everything on NVMe.
"""
import json
import os
import re
import signal

import support as t

ALL_NVME = ("--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme", "--activations",
            "nvme")
PLACEMENTS = {
    "in memory": ("--optimizer", "host"),
    "weights streamed": ("--params", "host", "--optimizer", "host:50%,nvme", "--gradients", "host"),
    "all on NVMe": (*ALL_NVME, "--checkpoint-every", 2),
    "4 ranks, weights on the device": ("--ranks", 4, "--zero", 2, "--optimizer", "nvme"),
    "small window": (*ALL_NVME, "--device-memory", "30M", "--host-memory", "60M"),
}


if t.SANITIZED:  # what is measured is not there, and every step takes long
    PLACEMENTS = {"all on NVMe": PLACEMENTS["all on NVMe"]}


def made(tmp):
    with open(tmp + "/config.json", "w", encoding="utf-8") as file:
        json.dump({**t.MIDDLE_MODEL, "num_hidden_layers": 2, "vocab_size": 4096}, file)
    t.spillway("init", "--config", tmp + "/config.json", "--seed", 3, "--out", tmp + "/model", rc=0)
    t.write_tokens(tmp + "/val.bin", t.read_tokens(t.STORIES + "/val.bin")[:400])
    return tmp + "/model"


def ranks_of(run):
    """On the host device every rank's device memory is the process's."""
    return int(re.search(r"^  ranks +(\d+)$", run.stdout, re.M).group(1))


def check_peak(run, name):
    table = t.totals(run.stdout)
    planned = ranks_of(run) * table["device"] + table["host"]
    print(f"   {name}: {run.peak_private_bytes / 1e6:.1f} MB of {planned / 1e6:.1f} MB planned")
    if not t.SANITIZED:  # the sanitizers' own memory is in the same counters
        t.check(run.peak_private_bytes <= 1.05 * planned, f"{name}: more than 5% above the plan")


def arguments(model, out, placement):
    return ("train", "--model", model, "--data", t.SHAKESPEARE + "/train.bin",
            "--val", os.path.dirname(model) + "/val.bin", "--out", out,
            "--seq-len", 16, "--chunk", "1M", "--digest",
            *placement)


@t.test
def the_peak_of_load_train_evaluation_and_save_is_planned():
    with t.folder() as tmp:
        model, digests = made(tmp), {}
        for number, (name, placement) in enumerate(PLACEMENTS.items()):
            run = t.spillway(*arguments(model, f"{tmp}/{number}", placement), "--steps", 2,
                             "--save-every", 1, sample=True, rc=0)
            check_peak(run, name)
            found = re.search("^digest: .*", run.stdout, re.M).group(0)
            t.equal(found, digests.setdefault(ranks_of(run), found), f"digest of {name}", run)


@t.test
def the_turns_of_many_micro_batches_are_planned():
    with t.folder() as tmp:
        run = t.train(tmp + "/out", "--seq-len", 1, "--accumulate", 512, "--steps", 2, *ALL_NVME,
                      sample=True, rc=0)
        check_peak(run, "512 micro-batches")


@t.test
def a_resume_takes_no_more_than_the_run_did():
    with t.folder() as tmp:
        model = made(tmp)
        args = arguments(model, tmp + "/out", PLACEMENTS["all on NVMe"])
        process = t.Process([*args, "--steps", 4], sample=True)
        process.wait_for("^step 1/")
        process.signal(signal.SIGINT)
        first = process.finish()
        t.equal(first.rc, 130, "the stopped run", first)
        check_peak(first, "first run")
        at = int(re.search(r"stopped after step (\d+)", first.stdout).group(1))
        again = t.spillway(*args, "--steps", 4, "--resume", sample=True)
        t.equal(again.rc, 0, "the resumed run", again)
        t.contains(again.stdout, f"going on after step {at}", "where it goes on")
        check_peak(again, "resumed run")


if __name__ == "__main__":
    t.main()
