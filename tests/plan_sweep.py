#!/usr/bin/env python3
"""`spillway plan --sweep` and `spillway bench step`: each point is what the simulator says of it,
what does not fit is not drawn as if it did, the page needs nothing else, and runs with throttled
lanes stand beside it.

time limit: 240 s"""
import contextlib
import glob
import html.parser
import json
import os
import pty
import re
import signal
import subprocess
import time

import support as t

RATES = {"flops_per_s": 2e9, "h2d_bytes_per_s": 2e8, "d2h_bytes_per_s": 1e8,
         "both_bytes_per_s": 2.2e8, "cores": 4, "cpus": 4, "memory_bytes": 8e9,
         "memory_bytes_per_s": 2e10, "adam_bytes_per_s": 3e8}
DRIVE = {"drive": "drive", "bytes": 1e12, "read_bytes_per_s": 1e8, "write_bytes_per_s": 5e7,
         "mixed_bytes_per_s": 9e7}
LETTERS = {"compute": "c", "h2d": "u", "d2h": "d", "comm": "m", "adam": "a", "nvme_read": "r",
           "nvme_write": "w"}
PLACES = ("--params", "host", "--optimizer", "nvme", "--gradients", "host", "--activations",
          "device")


def profile(tmp, times=1.0, **changes):
    """A made-up machine, whose drives are so many times as fast."""
    path = os.path.join(tmp, "machine.json")
    drive = {key: value * times if key.endswith("_s") else value for key, value in DRIVE.items()}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "about": "made up", "machine": {**RATES, **changes},
                   "drives": [drive]}, file)
    return path


def plan(*args, rc=0):
    return json.loads(t.spillway("plan", *args, "--json", rc=rc).stdout)


def case(machine, *args):
    return (t.MODEL, "--machine", machine, "--device", "host", "--seq-len", 64, *PLACES, *args)


def short_of_ram(tmp):
    """A case of 2.2 GB of state; a rate that is unknown spares the search."""
    machine = profile(tmp, adam_bytes_per_s=0) + ":ram=1500M,nvme=none"
    return ("smollm2-135m", "--machine", machine, "--seq-len", 64)


def chart_of(text):
    """The rows of the chart above its axis, the axis, and how many columns stand before them."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r" +\+[-x]+$", line))
    start = at
    while re.match(r".{9} \|", lines[start - 1]):
        start -= 1
    return [line[11:] for line in lines[start:at]], lines[at][11:]


# ---- the curve ----

@t.test
def points_are_what_plan_says_there():
    with t.folder() as tmp:
        sweep = plan(*case(profile(tmp)), "--sweep", "nvme")["sweep"]
        t.equal((sweep["what"], len(sweep["points"])), ("nvme", 13), "the sweep")
        t.equal([p["own"] for p in sweep["points"]], [i == 6 for i in range(13)], "the own value")
        for i in (0, 3, 6, 9, 12):
            point = sweep["points"][i]
            times = plan(*case(profile(tmp, point["value"] / 1e8)))["times"]
            t.close(point["step_s"], times["step_s"], 1e-9, f"point {i}", relative=True)
            t.equal(point["step_clock"], times["step_clock"], f"the clock of point {i}")
            t.close(point["tokens_per_s"], times["tokens_per_s"], 1e-9, f"point {i}", relative=True)
        for x in sweep["crossovers"]:
            t.check(x["below"] < x["above"] <= 1.01 * x["below"], f"{x}")
            for side in ("below", "above"):
                times = plan(*case(profile(tmp, x[side] / 1e8)))["times"]
                t.equal(times["step_clock"], x["clock_" + side], f"{side} of {x}")


@t.test
def the_clock_changes_and_the_sentence_says_where():
    with t.folder() as tmp:
        args = case(profile(tmp, flops_per_s=2e10), "--accumulate", 2)
        sweep = plan(*args, "--sweep", "tokens=64..8K")["sweep"]
        crossed = sweep["crossovers"]
        t.check(len(crossed) >= 1, f"no crossover: {sweep}")
        for x in crossed:
            t.equal(x["above"] - x["below"], 64, "the two sides, a micro-batch apart")
        first = f"{crossed[0]['above']:,.0f} tokens a step"
        t.contains(sweep["sentence"], f"Below {first}", "the sentence")
        run = t.spillway("plan", *args, "--sweep", "tokens=64..8K", rc=0)
        t.contains(run.stdout, sweep["sentence"], "the text", run)
        t.check(run.stdout.isascii(), "letters that are not ASCII", run)
        rows, axis = chart_of(run.stdout)
        drawn = set("".join(rows)) - {" ", ":"}
        t.equal(drawn, {LETTERS[p["step_clock"]] for p in sweep["points"]}, "the letters", run)
        t.check("x" not in axis and ":" in "".join(rows), "the chart", run)
        for word in ("step time", "tokens/s", "step clock", "fits", "> "):
            t.contains(run.stdout, word, "the table", run)


@t.test
def what_does_not_fit_is_told_and_drawn_so():
    with t.folder() as tmp:
        what_does_not_fit(short_of_ram(tmp))


def what_does_not_fit(args):
    report = plan(*args, "--sweep", "ram", rc=1)
    points = report["sweep"]["points"]
    t.check(not points[0]["fits"] and points[-1]["fits"], f"{points}")
    for p in points:
        t.equal("step_s" in p, p["fits"], f"a time of what does not fit: {p}")
        t.equal(p["decided_anew"], p["fits"], "nothing fitted at first")
    t.contains(report["sweep"]["sentence"], "nothing fits; from there on, ", "the sentence")
    run = t.spillway("plan", *args, "--sweep", "ram", rc=1)
    rows, axis = chart_of(run.stdout)
    columns = {round(i / (len(points) - 1) * (len(axis) - 1)) for i, p in enumerate(points)
               if not p["fits"]}
    t.equal({i for i, c in enumerate(axis) if c == "x"}, columns, "crosses on the axis", run)
    for row in rows:
        for i in columns:
            t.check(row[i:i + 1] in ("", " ", ":"), f"drawn above a cross: {row!r}", run)
    t.contains(run.stdout, "decided anew for this point", "the mark", run)
    t.contains(run.stdout, ", weights device, optimizer ", "the line", run)


@t.test
def gpus_and_throttles_are_swept():
    gpus = plan("7B", "--machine", "8xh100", "--tokens", "32K", "--no-search", "--sweep",
                "gpus")["sweep"]
    t.equal([p["value"] for p in gpus["points"]], [1, 2, 4, 8, 16, 32, 64], "GPUs")
    own = gpus["points"][3]
    t.equal((own["own"], own["fits"], own["decided_anew"]), (True, True, False), "its own value")
    with t.folder() as tmp:
        args = case(profile(tmp), "--sim-pcie", "20M,10M", "--sweep", "pcie")
        sweep = plan(*args)["sweep"]
        t.close(sweep["points"][0]["value"], 20e6 / 8, 1, "the throttle")
        t.equal(sweep["points"][6]["value"], 20e6, "the throttle")


def at_a_terminal(tmp, until, number):
    """A sweep whose stderr is a terminal: what it says there, and its exit status; `number` is
    sent once that matches."""
    machine = profile(tmp) + ":ram=1500M"
    ours, its = pty.openpty()
    with subprocess.Popen([t.SPILLWAY, "plan", "smollm2-135m", "--machine", machine, "--device",
                           "host", "--seq-len", "64", "--sweep", "ram=300M..1500M"], cwd=t.ROOT,
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=its) as child:
        os.close(its)
        text = ""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while piece := os.read(ours, 4096):
                text += piece.decode()
                if number and re.search(until, text):
                    child.send_signal(number)
                    number = None
        child.wait()
    os.close(ours)
    return text, child.returncode


@t.test
def a_long_sweep_shows_where_it_is_and_an_interrupt_ends_it():
    with t.folder() as tmp:
        text, status = at_a_terminal(os.path.join(t.ROOT, tmp), None, None)
        t.equal(status, 0, f"exit status; {text!r}")
        t.check(re.search(r"sweep of ram: point \d+ of \d+, \d", text), f"no progress: {text!r}")
        t.check(text.endswith("\r\x1b[K"), f"the line stays: {text[-80:]!r}")
        text, status = at_a_terminal(os.path.join(t.ROOT, tmp), "point", signal.SIGINT)
        t.equal(status, 130, f"exit status; {text!r}")
        t.check(text.endswith("\r\x1b[Kspillway: plan: stopped; nothing was written\r\n"),
                f"the end: {text[-120:]!r}")
        run = t.spillway("plan", *short_of_ram(tmp), "--sweep", "ram", rc=1)  # does not fit
        t.equal(run.stderr, "", "what is said without a terminal", run)


@t.test
def what_cannot_be_swept_is_refused():
    with t.folder() as tmp:
        no_copies = profile(tmp, h2d_bytes_per_s=0)
        for args, word, rc in (
                (case(no_copies, "--sweep", "pcie"), "no h2d_bytes_per_s", 2),
                (case(no_copies, "--sweep", "gpus"), "no gpus", 2),
                (case(no_copies, "--sweep", "disk"), "tokens, nvme, pcie, ram, gpus", 2),
                (case(no_copies, "--sweep", "nvme=2G..1G"), "2G..1G", 2),
                (case(no_copies, "--sweep-page", tmp + "/p.html"), "no effect", 2),
                (case(no_copies, "--sweep", "nvme", "--sweep-page", tmp), "a folder", 2),
                (case(no_copies, "--sweep", "nvme", "--sweep-page", "/nowhere/p.html"),
                 "/nowhere", 2)):
            run = t.spillway("plan", *args, rc=rc)
            t.contains(run.stderr, word, "the message", run)
            t.equal(run.stdout, "", "standard output", run)


# ---- the page ----

class Page(html.parser.HTMLParser):
    """Tags with their attributes, and whether each that was opened was closed."""
    VOID = {"meta", "rect", "line", "circle", "path", "polyline"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            t.equal(self.open.pop(), tag, "the tag that is closed")

    def handle_data(self, data):
        self.text += data


@t.test
def the_page_stands_alone():
    with t.folder() as tmp:
        path = tmp + "/sweep.html"
        sweep = plan(*short_of_ram(tmp), "--sweep", "ram", "--sweep-page", path, rc=1)["sweep"]
        with open(os.path.join(t.ROOT, path), encoding="utf-8") as file:
            text = file.read()
        page = Page(text)
        t.equal(page.open, [], "tags that stay open")
        t.check("http" not in text and "<script" not in text and "url(" not in text, "the network")
        for word in ("width=device-width", "prefers-color-scheme: dark", "<svg viewBox"):
            t.contains(text, word, "the page")
        t.contains(page.text, sweep["sentence"], "the sentence")
        fit = sum(p["fits"] for p in sweep["points"])
        t.check(0 < fit < len(sweep["points"]), f"{fit} points fit")
        names = [name for name, _ in page.tags]
        counts = {tag: names.count(tag) for tag in ("circle", "path", "tr")}
        t.equal(counts, {"circle": fit, "path": len(sweep["points"]) - fit,
                         "tr": 1 + len(sweep["points"])}, "circles, crosses, rows")
        curves = [a["points"].split() for tag, a in page.tags if tag == "polyline"]
        t.equal(sum(map(len, curves)), fit, "points of the curve")


# ---- runs ----

def bench(tmp, *args, rc=0):
    return t.spillway("bench", "step", "--scratch", tmp, "--points", 3, "--steps", 4, *args, rc=rc,
                      env={"SPILLWAY_PROFILE": os.path.join(tmp, "none.json")})


def left_in(tmp):
    return sorted(os.listdir(os.path.join(t.ROOT, tmp)))


@t.test
def runs_stand_beside_the_simulator():
    with t.folder() as tmp:
        page = tmp + "/step.html"
        run = bench(tmp, "--json", "--page", page)
        t.contains(run.stderr, "3 runs of 4 steps, about ", "what it will take", run)
        report = json.loads(run.stdout)
        sweep, rates = report["sweep"], report["rates"]
        told, seen = sweep["points"], sweep["measured"]["points"]
        t.equal((report["schema"], sweep["what"], len(told), len(seen)), (1, "pcie", 3, 3), "sweep")
        t.equal([p["value"] for p in seen], [p["value"] for p in told], "values")
        t.check(min(rates["sim_pcie"] + rates["sim_nvme"]) > 0 and rates["sim_adam"] > 0
                and rates["sim_flops"] > 0, f"{rates}")
        for p, m in zip(told, seen):
            # A busy machine makes a run longer; nothing makes it shorter.
            t.check(m["step_s"] > 0.85 * p["step_s"], f"{p}, measured {m}", run)
        t.equal(told[0]["step_clock"], "h2d", "the clock of slow copies", run)
        t.check(told[2]["step_clock"] != "h2d", f"the clock of fast copies: {told[2]}", run)
        t.check(len(sweep["crossovers"]) >= 1, f"no crossover: {sweep}", run)
        t.equal(left_in(tmp), ["step.html"], "what is left", run)
        with open(os.path.join(t.ROOT, page), encoding="utf-8") as file:
            t.contains(file.read(), "squares: measured", "the page")


@t.test
def tokens_are_swept_by_runs():
    with t.folder() as tmp:
        run = bench(tmp, "--sweep", "tokens=128..512", "--sim-flops", "2G", "--model", t.MODEL)
        for word in ("measured:", "simulator:", "error", "its clock", "capitals: measured",
                     "--sim-flops 2000000000"):
            t.contains(run.stdout, word, "the text", run)
        t.equal(left_in(tmp), [], "what is left", run)


@t.test
def an_interrupt_leaves_nothing_behind():
    with t.folder() as tmp:
        process = t.Process(["bench", "step", "--scratch", tmp, "--steps", "100"])
        process.wait_for("runs of 100 steps")
        log = None
        while not log:  # until the first run is under way
            log = [os.path.join(tmp, n, "log.jsonl") for n in left_in(tmp)]
            log = [n for n in log if os.path.exists(os.path.join(t.ROOT, n))]
        process.signal(signal.SIGINT)
        run = process.finish(30)
        t.equal(run.rc, 130, "exit status", run)
        t.contains(run.stderr, "stopped after 0 of 7 runs", "the message", run)
        t.equal(left_in(tmp), [], "what is left", run)


@t.test
def a_second_interrupt_names_what_it_leaves():
    """Both come before the first is looked at, as the process does not run meanwhile."""
    with t.folder() as tmp:
        process = t.Process(["bench", "step", "--scratch", tmp, "--steps", "100"])
        process.wait_for("runs of 100 steps")
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            process.signal(number)
        run = process.finish(30)
        t.check(run.rc in (130, 143), f"exit status {run.rc}", run)
        left = left_in(tmp)
        t.equal(len(left), 1, f"what is left: {left}", run)
        t.contains(run.stderr, f"{tmp}/{left[0]} is left behind", "the last message", run)


@t.test
def runs_are_not_planned_by_the_users_profile():
    """With all its rates measured, `train` plans what the benchmark leaves open."""
    with t.folder() as tmp:
        drive = os.path.join(t.ROOT, tmp)
        env = {"SPILLWAY_PROFILE": profile(drive, memory_bytes=6e7, round_bytes_per_s=1e10)}
        t.spillway("bench", "nvme", "--nvme", tmp, "--seconds", "0.2", "--size", "4Mi", env=env,
                   rc=0)
        planned = t.train(tmp + "/planned", "--optimizer", "nvme", "--nvme", tmp, "--steps", 1,
                          env=env, rc=0)
        t.contains(planned.stdout, "plan: on this machine", "the profile", planned)
        process = t.Process(["bench", "step", "--scratch", tmp, "--points", 2, "--steps", 4],
                            env=env)
        said = set()
        while process.is_running():
            for name in glob.glob(drive + "/spillway-step-*/said"):
                with contextlib.suppress(FileNotFoundError), open(name, encoding="utf-8") as file:
                    said.add(file.read())
            time.sleep(0.005)
        run = process.finish()
        t.equal(run.rc, 0, "exit status", run)
        ended = [text for text in said if "trained" in text or "step 4/4" in text]
        t.check(ended, f"no run was seen to end: {sorted(said)[-1:]}", run)
        t.check(not any("plan: " in text for text in said), f"a run is planned: {ended[0]}", run)


@t.test
def a_bench_that_cannot_be_is_refused():
    with t.folder() as tmp:
        for args, word, rc in ((["--sweep", "ram"], "no throttle", 2),
                               (["--sweep", "speed"], "tokens", 2),
                               (["--page", tmp], "a folder", 2),
                               (["--model", tmp + "/absent"], "absent", 1),
                               (["--scratch", tmp + "/absent"], "absent", 1)):
            run = t.spillway("bench", "step", "--scratch", tmp, *args, rc=rc) \
                if "--scratch" not in args else t.spillway("bench", "step", *args, rc=rc)
            t.contains(run.stderr, word, "the message", run)
            t.equal(left_in(tmp), [], "what is left", run)
        usage = t.spillway("bench", "step", "--help", rc=0)
        for word in ("--sweep", "--sim-pcie", "--sim-flops", "--page", "--json", "--scratch"):
            t.contains(usage.stdout, word, "the help", usage)


if __name__ == "__main__":
    t.main()
