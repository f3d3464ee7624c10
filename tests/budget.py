"""What does not fit is refused at once, with the table, the shortfall and command lines that fit.

Every command line that a refusal offers is run as it stands there, by a shell: it must be accepted,
plan pools within the budgets, and train.
"""
import json
import os
import re
import resource
import shlex
import time

import support as t

COMMON = ["--data", t.STORIES + "/train.bin", "--seq-len", 24, "--steps", 2]


def made(tmp, **changes):
    """A random model with a vocabulary of several parts."""
    with open(t.MODEL + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config.update(vocab_size=3001, num_hidden_layers=4, **changes)
    with open(tmp + "/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    t.spillway("init", "--config", tmp + "/config.json", "--out", tmp + "/a model", rc=0)
    return tmp + "/a model"


LITTLE_LESS = object()


def needed(*args):
    """Bytes of the device: an operator's workspace depends on the width of the CPU's vectors."""
    run = t.spillway(*args, "--device-memory", 1, "--dry-run")
    return int(float(re.search(r"the run needs ([\d.]+) MB of device", run.stderr)[1]) * 1e6)


def offered(text):
    """[(effect, command line)]"""
    return re.findall(r"^(?:this would fit|or) \((.*)\):\n  (.*)$", text, re.M)


def budget_of(command, name):
    got = re.search(rf"--{name} (\d+)K", command)
    return int(got.group(1)) * 1000 if got else None


def shell(command):
    """The offered words, as a shell takes them apart; the program is the one under test."""
    return t.spillway(*shlex.split(command)[1:])


def check_offers(run, effects):
    t.equal(run.rc, 1, "exit status", run)
    t.contains((run.stdout + run.stderr), "are missing", "the shortfall")
    t.check(t.totals((run.stdout + run.stderr))["device"] > 0, "the table")
    offers = offered((run.stdout + run.stderr))
    t.equal([effect for effect, _ in offers], effects, "what is offered", run)
    for effect, command in offers:
        plan = shell(command + " --dry-run --restart")
        t.equal(plan.rc, 0, f"dry run: {command}", plan)
        for tier in ("device", "host"):
            limit = budget_of(command, tier + "-memory")
            if limit:  # the table has three digits
                t.check(t.totals(plan.stdout)[tier] <= 1.005 * limit, f"{tier} of {command}")
        t.equal(shell(command + " --restart").rc, 0, f"run: {command}")


SAME = "the same bits, more traffic"
SPLIT = "the same step in smaller micro-batches: other roundings"
LARGER = "as asked, with more memory"


@t.test
def whatever_a_refusal_offers_fits_and_trains():
    with t.folder() as tmp:
        model = made(tmp)
        for number, (args, effects) in enumerate((
                (["--device-memory", "1200K", "--host-memory", "60M", "--micro-batch", 4,
                  "--params", "device"], [SPLIT, LARGER]),
                (["--device-memory", "1500K", "--host-memory", "27M", "--micro-batch", 4,
                  "--optimizer", "host"], [SAME, LARGER]),
                (["--device-memory=600K"], [LARGER]),
                ([LITTLE_LESS, "--host-memory", "60M", "--micro-batch", 2, "--accumulate", 4,
                  "--activations=device", "--params", "host"], [SAME, LARGER]))):
            out = f"{tmp}/out it's {number}"
            train = ["train", "--model", model, "--out", out, *COMMON]
            if args[0] is LITTLE_LESS:
                args[0] = f"--device-memory={needed(*train, *args[1:]) * 95 // 100}"
            run = t.spillway(*train, *args)
            check_offers(run, effects)


@t.test
def a_refusal_comes_before_anything_is_loaded_or_written():
    with t.folder() as tmp:
        model = made(tmp)
        start = time.monotonic()
        run = t.spillway("train", "--model", model, "--out", tmp + "/out", *COMMON,
                         "--device-memory", "100K")
        t.equal(run.rc, 1, "exit status", run)
        t.check(time.monotonic() - start < 2, "longer than two seconds")
        t.check(not os.path.exists(tmp + "/out"), "the output folder is there")


@t.test
def a_refusal_takes_no_time_whatever_the_sizes():
    many = 2 ** 32 - 1
    with t.folder() as tmp:
        for args, part in (
                (["--micro-batch", 65536, "--accumulate", 65536, "--seq-len", 1, "--device-memory",
                  "1000000T", "--host-memory", "1000000T"], "nothing was found that would fit\n"),
                (["--micro-batch", many, "--accumulate", 65536], "beyond any memory"),
                (["--micro-batch", 720720, "--seq-len", 512, "--checkpoint-every", many,
                  "--activations", "host:33%,nvme"], "a shorter --seq-len needs less")):
            run = t.train(tmp + "/out", "--dry-run", *args)
            t.equal(run.rc, 1, "exit status", run)
            t.contains(run.stderr, part, "the message", run)
            t.check(run.seconds < 2 * t.SLOWDOWN, "longer than two seconds", run)
            t.check(run.usage.ru_maxrss < 200000 or t.SANITIZED, "it took memory", run)


@t.test
def every_divisor_of_a_micro_batch_may_be_offered():
    for micro, accumulate, budget, want in ((5, 1, "2000K", "--micro-batch 1 --accumulate 5"),
                                            (15, 2, "5000K", "--micro-batch 5 --accumulate 6")):
        with t.folder() as tmp:
            run = t.train(tmp + "/out", "--seq-len", 64, "--micro-batch", micro, "--accumulate",
                          accumulate, "--device-memory", budget, "--optimizer", "host",
                          "--steps", 1)
            check_offers(run, [SPLIT, LARGER])
            t.contains(run.stderr, want, "the offer", run)


@t.test
def no_accumulation_is_offered_that_the_options_refuse():
    """A prime number of rows, one more than there may be micro-batches."""
    with t.folder() as tmp:
        run = t.train(tmp + "/out", "--seq-len", 32, "--micro-batch", 65537, "--device-memory",
                      "2G", "--dry-run")
        t.equal(run.rc, 1, "exit status", run)
        for _, command in offered(run.stderr):
            t.equal(shell(command).rc, 0, command)


@t.test
def turns_that_cannot_be_built_are_named():
    if t.SANITIZED:  # they take address space themselves
        return
    with t.folder() as tmp:
        run = t.train(tmp + "/out", "--seq-len", 1, "--accumulate", 65536, "--dry-run",
                      "--threads", 1, "--device-threads", 1,
                      preexec=lambda: resource.setrlimit(resource.RLIMIT_AS, (500 << 20,) * 2))
        t.equal(run.rc, 1, "exit status", run)
        t.contains(run.stderr, "turns of a step could not be built", "the message", run)


@t.test
def a_group_is_at_most_all_layers():
    with t.folder() as tmp:
        args = ["--seq-len", 8, "--dry-run", "--checkpoint-every"]
        most, beyond = (t.train(tmp + "/out", *args, n, rc=0).stdout for n in (5, 2 ** 32 - 1))
        t.equal(beyond, most, "what is printed")
        t.check(re.search("^  checkpoint-every 5$", beyond, re.M), "the effective option")


@t.test
def open_placements_go_down_until_all_fits():
    """Chosen ones stay; what fits without a budget stays where it is fastest."""
    with t.folder() as tmp:
        model, seen = made(tmp), []
        for args in ([], ["--device-memory", "2500K"], ["--device-memory", "1300K"],
                     ["--device-memory", "1300K", "--host-memory", "27M"],
                     ["--device-memory", "1300K", "--host-memory", "27M", "--gradients", "host"]):
            run = t.spillway("train", "--model", model, "--out", tmp + "/out", *COMMON, *args,
                             "--dry-run", rc=0)
            seen.append(tuple(re.search(rf"^  {name} +(\S+)$", run.stdout, re.M).group(1)
                              for name in ("params", "optimizer", "gradients", "activations")))
        t.equal(seen, [("device", "host", "host", "device"),
                       ("device", "host", "host", "device"),
                       ("host", "host", "host", "host"),
                       ("host", "nvme", "nvme", "nvme"),
                       ("host", "nvme", "host", "nvme")], "placements")


if __name__ == "__main__":
    t.main()
