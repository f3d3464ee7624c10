"""`spillway bench`: what it says, what it refuses, and that nothing is timed before it was checked.

No figure is compared with another: the machine may be busy."""
import json
import os
import re
import signal

import support as t

NVME = ("bench", "nvme", "--seconds", "0.5", "--size", "16Mi")
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
    for word in ("adam", "nvme"):
        t.contains(run.stdout, word, "the benchmarks", run)
    run = t.spillway("bench", "adam", "--help", rc=0)
    for word in ("--seconds", "--threads", "--params", "--json", "ratio", "SPILLWAY_ISA"):
        t.contains(run.stdout, word, "the help", run)
    run = t.spillway("bench", "nvme", "--help", rc=0)
    for word in ("--nvme", "--seconds", "--size", "--block", "--depth", "--no-profile", "--json",
                 "SPILLWAY_PROFILE"):
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
                       (("bench", "adam", "extra"), "extra"),
                       (("bench", "nvme", "--seconds", "0"), "--seconds"),
                       (("bench", "nvme", "--size", "1M"), "--size"),
                       (("bench", "nvme", "--block", "5000"), "5000"),
                       (("bench", "nvme", "--block", "8Mi"), "--block"),
                       (("bench", "nvme", "--depth", "0"), "--depth"),
                       (("bench", "nvme", "--block", "2Mi", "--depth", "4,32"), "32Mi")):
        run = t.spillway(*args, rc=2)
        t.contains(run.stderr, word, "the message", run)
        t.equal(run.stdout, "", "standard output", run)


@t.test
def json_has_every_row():
    run = t.spillway(*TINY[:-1], "0.5", "--threads", "1,2", "--json", rc=0)
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
        run = t.spillway("bench", "adam", "--params", "64Ki", "--threads", "1", "--seconds", "0.2",
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


# ---- the drives ----

def profile(tmp):
    """The environment that keeps the profile in a folder, and its path."""
    path = os.path.join(tmp, "config", "machine.json")
    return {"SPILLWAY_PROFILE": path}, path


@t.test
def every_pattern_has_its_row():
    with t.folder() as tmp:
        run = t.spillway(*NVME, "--nvme", tmp, "--json", "--no-profile", "--block", "256Ki",
                         "--depth", "2,8", rc=0)
        t.contains(run.stderr, "about 0.5 seconds", "what it will take", run)
        report = json.loads(run.stdout)
        t.equal((report["schema"], report["verified"]), (1, True), "schema, verified", run)
        t.equal([row["pattern"] for row in report["rows"]], ["read", "write", "mixed"], "rows", run)
        drive = report["drives"][0]
        t.equal((drive["folders"], drive["scratch_bytes"]), ([tmp], 16 << 20), "the drive", run)
        for row in report["rows"]:
            t.equal((row["block_bytes"], row["depth"]), (drive["block_bytes"], drive["depth"]),
                    "the setting", run)
            for key, pattern in (("read", "write"), ("write", "read")):
                t.equal(row[f"{key}_gb_per_s"] > 0, row["pattern"] != pattern, f"{key} in {row}",
                        run)
            t.check(0 < row["slowest_gb_per_s"] <= row["gb_per_s"] <= row["fastest_gb_per_s"],
                    f"the order of the rates of {row}", run)
        t.equal(os.listdir(tmp), [], "what is left", run)


@t.test
def the_fewest_bytes_in_flight_near_the_best_are_chosen():
    with t.folder() as tmp:
        run = t.spillway(*NVME, "--nvme", tmp, "--json", "--no-profile", "--block", "8Ki,64Ki,1Mi",
                         "--depth", "1,3,8", rc=0)
        drive = json.loads(run.stdout)["drives"][0]
        tried = [(s["block_bytes"], s["depth"]) for s in drive["sweep"]]
        t.equal(tried, [(b << 10, d) for b in (8, 64, 1024) for d in (1, 3, 8)], "settings", run)
        passes = max(s["passes"] for s in drive["sweep"])
        finalists = [s for s in drive["sweep"] if s["passes"] == passes]
        best = max(s["gb_per_s"] for s in finalists)
        near = [s for s in finalists if s["gb_per_s"] >= 0.97 * best]
        chosen = min(near, key=lambda s: (s["block_bytes"] * s["depth"], -s["gb_per_s"]))
        t.equal((drive["block_bytes"], drive["depth"]), (chosen["block_bytes"], chosen["depth"]),
                "the setting", run)


@t.test
def text_has_a_table_for_each_drive():
    with t.folder() as tmp:
        env, path = profile(tmp)
        folders = [os.path.join(tmp, name) for name in "ab"]
        for name in folders:
            os.mkdir(os.path.join(t.ROOT, name))
        run = t.spillway(*NVME, "--nvme", ",".join(folders), "--block", "256Ki", "--depth", "4",
                         env=env, rc=0)
        heads = [line for line in run.stdout.splitlines() if line.split()[:1] == ["pattern"]]
        t.equal(len(heads), 3, "tables: each drive and both together", run)
        for word in (*folders, "all 2 together", "written and read back", "blocks of 256 KiB, 4"):
            t.contains(run.stdout, word, "the tables", run)
        for pattern in ("read", "write", "mixed"):
            rows = [line for line in run.stdout.splitlines() if line.split()[:1] == [pattern]]
            t.equal(len(rows), 3, f"rows of {pattern}", run)
        t.contains(run.stderr, path, "where it was kept", run)


@t.test
def setting_and_rates_are_kept_in_the_profile():
    with t.folder() as tmp:
        env, path = profile(tmp)
        path = os.path.join(t.ROOT, path)
        run = t.spillway(*NVME, "--nvme", tmp, "--no-profile", "--block", "1Mi", "--depth", "2",
                         env=env, rc=0)
        t.check(not os.path.exists(path), "a profile in spite of --no-profile", run)
        for block, depth in ((64 << 10, 5), (512 << 10, 2)):
            run = t.spillway(*NVME, "--nvme", tmp, "--json", "--block", block, "--depth", depth,
                             env=env, rc=0)
            report = json.loads(run.stdout)
            t.equal(report["drives"][0]["kept"], True, "kept", run)
            with open(path, encoding="utf-8") as file:
                kept = json.load(file)
            t.equal(len(kept["drives"]), 1, "entries", run)
            entry = kept["drives"][0]
            t.equal(entry["drive"], report["drives"][0]["drive"], "the drive", run)
            t.equal((entry["block_bytes"], entry["depth"]), (block, depth), "the setting", run)
            for row in report["rows"]:
                t.close(entry[row["pattern"] + "_bytes_per_s"], 1e9 * row["gb_per_s"], 1e-9,
                        row["pattern"], relative=True, run=run)
            t.check(re.fullmatch(r"\d{4}-\d\d-\d\d", entry["measured"]), "the date", run)
        t.equal(os.listdir(os.path.dirname(path)), ["machine.json"], "what is left", run)


@t.test
def folders_that_cannot_be_measured_are_refused():
    with t.folder() as tmp:
        env, path = profile(tmp)
        run = t.spillway(*NVME, "--nvme", tmp + "/absent", env=env, rc=1)
        t.contains(run.stderr, tmp + "/absent", "the message", run)
        run = t.spillway("bench", "nvme", "--size", "60Ti", "--nvme", tmp, env=env, rc=1)
        t.contains(run.stderr, "no space", "the message", run)
        t.equal(os.listdir(os.path.join(t.ROOT, tmp)), [], "what is left", run)


@t.test
def an_interrupt_leaves_no_scratch_and_no_profile():
    with t.folder() as tmp:
        env, path = profile(tmp)
        process = t.Process(["bench", "nvme", "--seconds", "600", "--size", "16Mi", "--nvme", tmp,
                             "--json"], env=env)
        process.wait_for("about 600 seconds")
        process.signal(signal.SIGINT)
        run = process.finish(60)
        t.equal(run.rc, 130, "exit status", run)
        t.contains(run.stderr, "stopped after", "the message", run)
        report = json.loads(run.stdout)
        t.equal((report["schema"], report["rows"]), (1, []), "what is there", run)
        t.equal(os.listdir(os.path.join(t.ROOT, tmp)), [], "what is left", run)


if __name__ == "__main__":
    t.main()
