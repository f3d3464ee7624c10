"""`spillway bench`: what it says, what it refuses, and that nothing is timed before it was checked.

No figure is compared with another: the machine may be busy."""
import json
import os
import re
import signal

import support as t

TINY = ("bench", "adam", "--params", "1Mi", "--seconds", "2")
ROW = {"params": int, "threads": int, "variant": str, "grad": str, "weight_out": str,
       "ns_per_param": float, "gb_per_s": float, "limit_gb_per_s": float, "ratio": float}


def supported():
    """The variants that run here, by asking for each."""
    return [isa for isa in ("avx512", "avx2", "scalar")
            if t.spillway("bench", "adam", "--params", "4Ki", "--threads", "1", "--seconds", "0.1",
                          env={"SPILLWAY_ISA": isa}).rc == 0]


@t.test
def help_names_everything():
    run = t.spillway("bench", "--help", rc=0)
    t.contains(run.stdout, "adam", "the benchmarks", run)
    run = t.spillway("bench", "adam", "--help", rc=0)
    for word in ("--seconds", "--threads", "--params", "--json", "ratio", "SPILLWAY_ISA"):
        t.contains(run.stdout, word, "the help", run)
    t.contains(t.spillway("--help", rc=0).stdout, "bench", "the commands")


@t.test
def bad_command_lines_are_refused():
    for args, word in ((("bench",), "usage"), (("bench", "adm"), "adam"),
                       (("bench", "adam", "--second", "1"), "--seconds"),
                       (("bench", "adam", "--seconds", "0"), "--seconds"),
                       (("bench", "adam", "--seconds", "x"), "--seconds"),
                       (("bench", "adam", "--threads", "0"), "--threads"),
                       (("bench", "adam", "--threads", "1,"), "--threads"),
                       (("bench", "adam", "--threads", "100000"), "--threads"),
                       (("bench", "adam", "--params", "12Q"), "12Q"),
                       (("bench", "adam", "--params", "1,,2"), "--params"),
                       (("bench", "adam", "--params", ",".join("123456789")), "--params"),
                       (("bench", "adam", "extra"), "extra")):
        run = t.spillway(*args, rc=2)
        t.contains(run.stderr, word, "the message", run)
        t.equal(run.stdout, "", "standard output", run)


@t.test
def json_has_every_row():
    run = t.spillway(*TINY, "--threads", "1,2", "--json", rc=0)
    report = json.loads(run.stdout)
    t.equal(report["schema"], 1, "schema", run)
    t.equal(report["verified"], True, "verified", run)
    cases = set()
    for row in report["rows"]:
        for key, kind in ROW.items():
            t.check(isinstance(row[key], kind), f"{key} is {row[key]!r}", run)
        t.check(min(row[k] for k in ROW if ROW[k] is float) > 0, f"a figure of {row} is 0", run)
        states = 24  # master, momentum and variance, read and written
        grad = {"bf16": 2, "fp32": 4}[row["grad"]]
        weight = {"bf16": 2, "none": 0}[row["weight_out"]]
        t.close(row["gb_per_s"] * row["ns_per_param"], states + grad + weight, 1e-9,
                "GB/s times ns per parameter", relative=True, run=run)
        cases.add((row["params"], row["threads"], row["grad"], row["weight_out"]))
    want = {(1 << 20, n, g, w) for n in (1, 2) for g in ("bf16", "fp32") for w in ("bf16", "none")}
    t.equal(cases, want, "cases", run)
    t.equal(len(report["rows"]), len(want), "rows", run)
    t.check(any(k["kind"] == "8-bit moments" for k in report["kinds"]), "no 8-bit moments", run)


@t.test
def text_has_the_same_columns():
    run = t.spillway(*TINY, "--threads", "1", rc=0)
    t.contains(run.stderr, "about 2 seconds", "what it will take", run)
    head = next(line for line in run.stdout.splitlines() if line.lstrip().startswith("params"))
    for column in ("threads", "variant", "grad", "weight", "B/param", "ns/param", "GB/s", "limit",
                   "ratio"):
        t.contains(head, column, "the table's head", run)
    rows = [line for line in run.stdout.splitlines() if line.split()[:2] == ["1Mi", "1"]]
    t.equal(len(rows), 4, "rows", run)
    for word in ("CPU", "variant", "binding", "checked"):
        t.contains(run.stdout, word, "what is said of the machine", run)


@t.test
def a_forced_variant_is_the_one_measured():
    found = supported()
    t.contains(found, "scalar", "variants that run")
    for isa in found:
        run = t.spillway("bench", "adam", "--params", "64Ki", "--threads", "1", "--seconds", "0.5",
                         "--json", env={"SPILLWAY_ISA": isa}, rc=0)
        t.equal({row["variant"] for row in json.loads(run.stdout)["rows"]}, {isa}, "variant", run)
    run = t.spillway(*TINY, env={"SPILLWAY_ISA": "sse9"}, rc=1)
    t.contains(run.stderr, "sse9", "the message", run)


@t.test
def too_many_threads_are_warned_of():
    threads = (os.cpu_count() or 1) + 1
    run = t.spillway("bench", "adam", "--params", "64Ki", "--threads", threads, "--seconds", "0.1",
                     rc=0)
    t.contains(run.stderr, "warning", "the message", run)
    t.contains(run.stderr, f"{threads} threads on", "the message", run)


@t.test
def an_interrupt_ends_it_with_what_is_there():
    process = t.Process(["bench", "adam", "--params", "4Mi", "--threads", "1", "--seconds", "600"])
    process.wait_for(r"^ +params .*ratio$")
    process.signal(signal.SIGINT)
    run = process.finish(60)
    t.equal(run.rc, 130, "exit status", run)
    done = re.search(r"stopped after (\d) of 4 rows", run.stderr)
    t.check(done and int(done[1]) < 4, "all rows were measured all the same", run)


if __name__ == "__main__":
    t.main()
