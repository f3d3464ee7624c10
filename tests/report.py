"""`spillway report`: the page and its figures equal the trace, the page is one well-formed file
that asks for nothing, and whatever is not a trace is refused by name. time limit: 300 s"""
import base64
import html.parser
import json
import os
import random
import re
import resource
import signal
import time

import support as t

LANES = ["compute", "h2d", "d2h", "comm", "adam", "nvme_read", "nvme_write", "control", "commit",
         "data"]
VOID = {"meta", "link", "br", "input", "img", "hr"}


# ---- traces ----

def task(lane, step, start_ns, duration_ns, bytes_=0, unit="layer.0", micro=0, kind="task", **more):
    return {"ph": "X", "name": f"{kind} {unit}", "pid": 0, "tid": LANES.index(lane),
            "ts": start_ns / 1000, "dur": duration_ns / 1000,
            "args": {"lane": lane, "unit": unit, "micro": micro, "bytes": bytes_, "step": step},
            **more}


def head():
    return [{"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(LANES)]


def memory(tier, at_ns, used, budget):
    return {"ph": "C", "name": f"memory {tier}", "pid": 0, "ts": at_ns / 1000,
            "args": {"used": used, "budget": budget}}


def peak(lane, bytes_per_s):
    return {"ph": "M", "name": "peak_bandwidth", "pid": 0, "tid": LANES.index(lane),
            "args": {"lane": lane, "bytes_per_s": bytes_per_s}}


def write_trace(path, events):
    """As the program writes it, an event a line."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"schema":1,"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join(json.dumps(e, separators=(",", ":")) for e in head() + events))
        file.write("\n]}\n")


def large_trace(path, tasks, steps=200, seed=1):
    """Lanes that are busy most of the time, steps in a row. Fast: a million take some seconds."""
    rng, now, lines = random.Random(seed), [0] * 5, []
    lanes = ["compute", "adam", "nvme_read", "nvme_write", "h2d"]
    ids = [LANES.index(lane) for lane in lanes]
    for i in range(tasks):
        k, step = i % 5, i * steps // tasks + 1
        start = now[k] + rng.randrange(0, 40)
        duration = rng.randrange(100, 2000 + 400 * k)
        now[k] = start + duration
        if i % (tasks // steps) == 0:
            now = [max(now)] * 5
        lines.append(f'{{"ph":"X","name":"work layer.{i % 50}","pid":0,"tid":{ids[k]},"ts":'
                     f'{start // 1000}.{start % 1000:03},"dur":{duration // 1000}.'
                     f'{duration % 1000:03},"args":{{"lane":"{lanes[k]}","unit":"layer.{i % 50}",'
                     f'"micro":{i % 4},"bytes":{4096 * (i % 7)},"step":{step}}}}}')
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"schema":1,"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(",\n".join([json.dumps(e) for e in head()] + lines) + "\n]}\n")


def sample_trace(path, seed=3, steps=7):
    """Small, with all there is: evaluations, memory, peaks, steps that overlap."""
    rng, now, events = random.Random(seed), {}, [peak("nvme_read", 2_000_000_000)]
    for step in range(1, steps + 1):
        for _ in range(40):
            lane = rng.choice(LANES)
            start = max(now.get(lane, 0), 50_000 * step) + rng.randrange(300)
            duration = rng.randrange(4000)
            now[lane] = start + duration
            events.append(task(lane, step, start, duration, rng.randrange(9) * 512,
                               f"layer.{rng.randrange(4)}", rng.randrange(3)))
        for tier in ("host", "nvme"):
            events.append(memory(tier, 50_000 * step, rng.randrange(1000), 1000))
    events.append(task("compute", 3, now["compute"] + 10, 900, kind="eval", cat="eval"))
    write_trace(path, events)


# ---- what the figures must be ----

def ns(us):
    return round(us * 1000)


def expected(path):
    """{step: {lane: [busy_ns, bytes, tasks]}} of the trace."""
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    steps = {}
    for e in events:
        if e["ph"] != "X" or e.get("cat") == "eval":
            continue
        lane = steps.setdefault(e["args"]["step"], {}).setdefault(e["args"]["lane"], [0, 0, 0])
        lane[0] += ns(e["dur"])
        lane[1] += e["args"]["bytes"]
        lane[2] += 1
    return steps


def check_figures(figures, path, run=None):
    want = expected(path)
    lanes = [entry["lane"] for entry in figures["lanes"]]
    t.equal(figures["schema"], 1, "schema", run)
    t.equal([s["step"] for s in figures["steps"]], sorted(want), "steps", run)
    for s in figures["steps"]:
        for i, lane in enumerate(lanes):
            busy, bytes_, tasks = want[s["step"]].get(lane, (0, 0, 0))
            got = (s["busy_ns"][i], s["bytes"][i], s["tasks"][i])
            t.equal(got, (busy, bytes_, tasks), f"{lane} in step {s['step']}", run)
            if busy:
                t.close(s["bytes_per_busy_s"][i], bytes_ / busy * 1e9, 1e-9, "rate", relative=True)
            if s["step_ns"]:
                t.close(s["bytes_per_s"][i], bytes_ / s["step_ns"] * 1e9, 1e-9, "rate",
                        relative=True)
        t.equal(s["step_ns"], s["end_ns"] - s["begin_ns"], "the step's time", run)
        t.equal(sum(s["lane_path_ns"]) + s["gap_ns"], s["step_ns"], "path and gaps", run)
        if s["path_ns"]:
            most = max(s["lane_path_ns"])
            t.equal(s["lane_path_ns"][lanes.index(s["step_clock"])], most, "step clock", run)
            t.contains(s["sentence"], f"{100 * most / s['path_ns']:.0f}%", "sentence", run)
    steady = [s for s in figures["steps"]]
    steady = steady if len(steady) < 4 else steady[2:-1]
    if steady:
        t.equal(figures["steady"]["steps"], len(steady), "steady steps", run)
        mean = sum(s["step_ns"] for s in steady) / len(steady)
        t.check(abs(figures["steady"]["step_ns"] - mean) <= 0.5, "the mean step", run)
    else:
        t.equal(figures["steady"], None, "steady steps", run)


# ---- the page ----

class Page(html.parser.HTMLParser):
    """Elements by id, and whether every one that is opened is closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.wrong, self.ids, self.texts, self.links = [], [], {}, {}, []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is never closed" for tag, _ in self.open]

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [attrs[k] for k in ("src", "href") if k in attrs]
        if "id" in attrs:
            if attrs["id"] in self.ids:
                self.wrong.append(f"id {attrs['id']} twice")
            self.ids[attrs["id"]] = tag
        if tag not in VOID:
            self.open.append((tag, attrs.get("id")))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1][0] != tag:
            self.wrong.append(f"</{tag}> closes {self.open[-1:]}")
        else:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1][1]:
            name = self.open[-1][1]
            self.texts[name] = self.texts.get(name, "") + data


def read_page(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    page = Page(text)
    t.equal(page.wrong, [], f"{path} is well-formed")
    t.check(text.startswith("<!DOCTYPE html>"), "no doctype")
    t.check("http" not in text, "the page names an address")
    t.check("{{" not in text, "a mark of the template is left")
    t.equal([link for link in page.links if not link.startswith("#")], [], "links")
    for aria in re.findall(r'aria-(?:labelledby|describedby)="([^"]+)"', text):
        t.check(aria in page.ids, f"no element has the id {aria}")
    for name in re.findall(r'get\("([\w-]+)"\)', text):
        t.check(name in page.ids, f"no element has the id {name} that the script asks for")
    return page


def decode(page, figures):
    """(tasks, samples) of the timeline: what tools/report_page.c says it wrote."""
    data, names = base64.b64decode(page.texts["data"]), json.loads(page.texts["names"])
    at = 0

    def unsigned():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            shift += 7
            at += 1
            if not data[at - 1] & 128:
                return value

    def signed():
        value = unsigned()
        return (value >> 1) ^ -(value & 1)

    kinds = [(names[unsigned()], unsigned(), unsigned(), unsigned()) for _ in range(unsigned())]
    tasks, samples, begin = [], [], figures["begin_ns"]
    for entry in figures["lanes"]:
        now, step = begin * 0, 0
        for _ in range(unsigned()):
            mark = unsigned()
            start = now + signed()
            now = start + unsigned()
            step += signed()
            tasks.append((entry["lane"], begin + start, begin + now, step, *kinds[mark >> 1]))
    for entry in figures["memory"]:
        now = used = budget = 0
        for _ in range(unsigned()):
            now, used, budget = now + signed(), used + signed(), budget + signed()
            samples.append((entry["tier"], begin + now, used, budget))
    t.equal(at, len(data), "bytes of the timeline")
    return tasks, samples


def make_page(path, out):
    run = t.spillway("report", path, "-o", out, "--json", rc=0, timeout_s=200)
    page, figures = read_page(out), json.loads(run.stdout)
    t.equal(json.loads(page.texts["figures"]), figures, "the page's figures and --json")
    check_figures(figures, path, run)
    return page, figures


# ---- tests ----

@t.test
def help_names_what_there_is():
    run = t.spillway("report", "--help", rc=0)
    for word in ("TRACE", "-o, --output", "--json"):
        t.contains(run.stdout, word, "the help", run)
    t.contains(t.spillway("--help", rc=0).stdout, "report", "the commands")


@t.test
def page_and_figures_equal_the_trace():
    with t.folder() as tmp:
        sample_trace(f"{tmp}/trace.json")
        page, figures = make_page(f"{tmp}/trace.json", f"{tmp}/report.html")
        with open(f"{tmp}/trace.json", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        tasks, samples = decode(page, figures)
        want = [(e["args"]["lane"], ns(e["ts"]), ns(e["ts"]) + ns(e["dur"]), e["args"]["step"],
                 e["name"], e["args"]["micro"], e["args"]["bytes"], int(e.get("cat") == "eval"))
                for e in events if e["ph"] == "X"]
        t.equal(sorted(tasks), sorted(want), "tasks")
        want = [(e["name"].removeprefix("memory "), ns(e["ts"]), e["args"]["used"],
                 e["args"]["budget"]) for e in events if e["ph"] == "C"]
        t.equal(sorted(samples), sorted(want), "samples of memory")
        peaks = {e["lane"]: e["peak_bytes_per_s"] for e in figures["lanes"]}
        t.equal([lane for lane in peaks if peaks[lane]], ["nvme_read"], "peaks")
        t.equal(peaks["nvme_read"], 2_000_000_000, "peak")
        tops = {e["tier"]: e["used_bytes_max"] for e in figures["memory"]}
        t.equal(tops, {tier: max(s[2] for s in samples if s[0] == tier)
                       for tier in ("host", "nvme")}, "highest use")


@t.test
def a_run_is_reported():
    with t.folder() as tmp:
        t.write_tokens(f"{tmp}/val.bin", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:1000])
        t.train(f"{tmp}/out", "--steps", 6, "--seq-len", 32, "--optimizer", "nvme", "--val",
                f"{tmp}/val.bin", "--sim-nvme", "40M,20M", "--trace",
                f"{tmp}/trace.json", "--log", f"{tmp}/log", rc=0)
        page, figures = make_page(f"{tmp}/trace.json", f"{tmp}/report.html")
        t.equal([s["step"] for s in figures["steps"]], list(range(1, 7)), "steps")
        t.contains(figures["steady"]["sentence"], "NVMe writes set the step", "the step clock")
        peaks = {e["lane"]: e["peak_bytes_per_s"] for e in figures["lanes"]}
        t.check(peaks["nvme_read"] <= 40_000_000 and peaks["nvme_write"] <= 20_000_000,
                f"rates that lanes are held to are their peaks: {peaks}")
        write = [e["lane"] for e in figures["lanes"]].index("nvme_write")
        for s in figures["steps"]:
            t.check(s["bytes_per_busy_s"][write] <= 20_000_000 * 1.02, "faster than it was held to")
        steps, _ = t.read_log(f"{tmp}/log")
        t.equal({e["tier"]: e["used_bytes_max"] for e in figures["memory"]},
                steps[-1]["memory_bytes"], "memory")
        for s, logged in zip(figures["steps"], steps):
            for i, entry in enumerate(figures["lanes"]):
                if entry["lane"] in logged["lane_busy_s"]:
                    t.close(s["busy_ns"][i] * 1e-9, logged["lane_busy_s"][entry["lane"]], 1e-9,
                            "busy time in trace and log")
            if s["step"] > 2:  # the first ones begin where the run does, or the first task
                t.close(s["step_ns"] * 1e-9, logged["step_s"], 1e-3, "the step in trace and log")


@t.test
def empty_and_one_task_traces_have_a_page():
    with t.folder() as tmp:
        write_trace(f"{tmp}/trace.json", [])
        page, figures = make_page(f"{tmp}/trace.json", f"{tmp}/report.html")
        t.equal((figures["tasks"], figures["steps"], figures["steady"]), (0, [], None), "figures")
        t.equal(decode(page, figures), ([], []), "tasks")
        write_trace(f"{tmp}/trace.json", [task("adam", 9, -5000, 1500, 12)])
        page, figures = make_page(f"{tmp}/trace.json", f"{tmp}/report.html")
        t.equal(figures["steady"]["step_clock"], "adam", "step clock")
        t.equal((figures["begin_ns"], figures["end_ns"]), (-5000, -3500), "extent")
        t.equal(decode(page, figures)[0],
                [("adam", -5000, -3500, 9, "task layer.0", 0, 12, 0)], "tasks")


@t.test
def names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script><!-- \u00e4 \" ' &"
    with t.folder() as tmp:
        name = f"{tmp}/<b>&.json"
        write_trace(name, [task("adam", 1, 0, 5, unit=evil)])
        page, _ = make_page(name, f"{tmp}/report.html")
        t.equal(list(page.ids.values()).count("script"), 3, "scripts with a name")
        with open(f"{tmp}/report.html", encoding="utf-8") as file:
            t.equal(file.read().count("<script"), 4, "scripts")


@t.test
def a_cut_trace_counts_as_far_as_it_goes():
    with t.folder() as tmp:
        sample_trace(f"{tmp}/whole.json")
        with open(f"{tmp}/whole.json", encoding="utf-8") as file:
            lines = file.read().splitlines(keepends=True)
        keep = len(lines) * 2 // 3
        with open(f"{tmp}/trace.json", "w", encoding="utf-8") as file:
            file.write("".join(lines[:keep]) + lines[keep][:30])
        run = t.spillway("report", f"{tmp}/trace.json", "-o", f"{tmp}/r.html", "--json", rc=0)
        t.contains(run.stderr, f"{tmp}/trace.json ends in the middle", "the warning", run)
        figures = json.loads(run.stdout)
        t.equal(figures["truncated"], True, "truncated", run)
        t.equal(figures["tasks"], sum('"ph":"X"' in line for line in lines[:keep]), "tasks", run)
        read_page(f"{tmp}/r.html")


@t.test
def a_killed_run_leaves_a_trace():
    with t.folder() as tmp:
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", f"{tmp}/out", "--steps", "100000", "--seq-len", "32",
                             "--log", f"{tmp}/log", "--trace", f"{tmp}/trace.json"])
        for _ in range(600):
            if os.path.exists(f"{tmp}/log") and len(t.read_log(f"{tmp}/log")[0]) > 20:
                break
            time.sleep(0.1)
        time.sleep(1)
        process.signal(signal.SIGKILL)
        t.equal(process.finish().rc, -signal.SIGKILL, "exit status")
        run = t.spillway("report", f"{tmp}/trace.json", "--json", rc=1)
        t.contains(run.stderr, f"{tmp}/trace.json.partial", "the remedy", run)
        run = t.spillway("report", f"{tmp}/trace.json.partial", "--json", rc=0)
        t.check(len(json.loads(run.stdout)["steps"]) > 20, "steps of the killed run", run)


@t.test
def huge_figures_are_refused_or_stop_at_the_largest():
    with t.folder() as tmp:
        path, most = f"{tmp}/trace.json", 2 ** 63 - 1
        for ts, dur, word in ((-4.7e15, 1, "its ts is beyond"), (1, 1e300, "its dur is beyond"),
                              (4e15, 4e15, "its ts and dur end beyond")):
            event = task("adam", 1, 0, 0)
            event.update(ts=ts, dur=dur)
            write_trace(path, [event])
            run = t.spillway("report", path, "--json", rc=1)
            t.contains(run.stderr, word, "the message", run)
            t.equal(len(run.stderr.splitlines()), 1, "lines", run)
        events = [task("adam", step, 0, 0, 2 ** 62) for step in (1, 1, 1, 1, 2, 2)]
        for event in events:
            event.update(ts=-4.6e15, dur=9.2e15 / 2)
        write_trace(path, events + [task("h2d", 2, 4600000000000000000, 0, most)])
        run = t.spillway("report", path, "-o", f"{tmp}/r.html", "--json", rc=0)
        figures, lane = json.loads(run.stdout), LANES.index("adam")
        for name in ("bytes", "busy_ns"):
            t.equal(figures["steps"][0][name][lane], most, name)
            t.equal(figures["steady"][name][lane], most // 2 + 1, f"{name} of a steady step")


@t.test
def bad_input_is_refused_by_name():
    other = '{"traceEvents":[{"ph":"X","name":"x","ts":1,"dur":2,"pid":1,"tid":1}]}'
    with t.folder() as tmp:
        for content, word in (("", "0 bytes"), ("hello", "not a JSON object"), ("[1,2", "trace"),
                              (other, "schema"), ('{"schema":1}', "traceEvents"),
                              (other.replace("{", '{"schema":1,', 1), "args.lane"),
                              ('{"schema":1,"traceEvents":[{"ph":"X","ts":}]}', "event 1"),
                              ('{"schema":1,"traceEvents":[]} {}', "behind its end")):
            path = f"{tmp}/bad.json"
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
            run = t.spillway("report", path, "-o", f"{tmp}/r.html", rc=1)
            t.contains(run.stderr, path, "the message", run)
            t.contains(run.stderr, word, "the message", run)
            t.equal(len(run.stderr.splitlines()), 1, "lines", run)
        for path in (f"{tmp}/none.json", tmp):
            run = t.spillway("report", path, "-o", f"{tmp}/r.html", rc=1)
            t.contains(run.stderr, path, "the message", run)
        t.equal(sorted(os.listdir(tmp)), ["bad.json"], "files")
        for args, word in ((("report",), "TRACE"), (("report", path), "-o"),
                           (("report", path, "-o"), "needs a value"),
                           (("report", path, "-o", "-"), "-o -"),
                           (("report", path, "-x", "y"), "-x"),
                           (("report", path, "--out", "y"), "--output"),
                           (("report", path, path, "--json"), "unexpected")):
            t.contains(t.spillway(*args, rc=2).stderr, word, "the message")


@t.test
def the_page_takes_its_place_whole_or_not_at_all():
    with t.folder() as tmp:
        trace, page = f"{tmp}/trace.json", f"{tmp}/r.html"
        sample_trace(trace)
        os.link(trace, f"{tmp}/same.json")
        os.symlink("trace.json", f"{tmp}/link.json")
        os.link(trace, f"{tmp}/r.partial")
        for out in (trace, f"{tmp}/same.json", f"{tmp}/link.json", f"{tmp}/r"):
            run = t.spillway("report", trace, "-o", out, rc=1)
            t.contains(run.stderr, out, "the message", run)
            t.contains(run.stderr, "overwrite", "the message", run)
        expected(trace)  # still whole
        for out in (f"{tmp}/none/r.html", tmp, "/dev/null"):
            t.contains(t.spillway("report", trace, "-o", out, rc=1).stderr, out, "the message")
        with open(page, "w", encoding="utf-8") as file:
            file.write("old")
        run = t.spillway("report", trace, "-o", page, rc=1, preexec=lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (5000, 5000)))
        t.contains(run.stderr, page, "the message", run)
        with open(page, encoding="utf-8") as file:
            t.equal(file.read(), "old", "the page of before")
        t.check(not os.path.exists(page + ".partial"), "half a page is left")
        t.spillway("report", trace, "-o", page, rc=0)
        read_page(page)
        t.check(os.stat(page).st_mode & 0o044, "others cannot read it")


@t.test
def a_million_tasks_take_seconds_and_little_memory():
    tasks = 1_000_000 if not t.SANITIZED else 50_000
    with t.folder() as tmp:
        large_trace(f"{tmp}/trace.json", tasks)
        bytes_ = os.path.getsize(f"{tmp}/trace.json")
        run = t.spillway("report", f"{tmp}/trace.json", "-o", f"{tmp}/r.html", "--json", rc=0,
                         timeout_s=100, sample=True)
        page = os.path.getsize(f"{tmp}/r.html")
        figures = json.loads(run.stdout)
        t.equal(figures["tasks"], tasks, "tasks")
        t.equal(len(figures["steps"]), 200, "steps")
        t.equal(sum(sum(s["tasks"]) for s in figures["steps"]), tasks, "tasks of steps")
        t.check(page < bytes_ / 8, f"a page of {page} bytes for a trace of {bytes_}")
        if not t.SANITIZED:
            t.check(run.seconds < 10, f"it took {run.seconds:.1f} s")
            peak_bytes = run.peak_private_bytes
            t.check(0 < peak_bytes < 250_000_000, f"it took {peak_bytes} bytes of memory")
            print(f"{run.seconds:.2f} s, {peak_bytes >> 20} MiB, trace {bytes_ >> 20} MiB, "
                  f"page {page >> 20} MiB")


@t.test
def the_colours_have_contrast():
    """WCAG 2: 4.5 to 1 for text, 3 to 1 for what is no text."""
    with open("tools/report.css", encoding="utf-8") as file:
        text = file.read()
    for scheme in re.findall(r":root \{(.*?)\}", text, re.S):
        colours = dict(re.findall(r"--([\w-]+): #(\w{6})", scheme))

        def luminance(colour):
            parts = [int(colour[i:i + 2], 16) / 255 for i in (0, 2, 4)]
            linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        def contrast(a, b):
            low, high = sorted((luminance(colours[a]), luminance(colours[b])))
            return (high + 0.05) / (low + 0.05)

        for ink in ("ink", "quiet", "accent", "warn"):
            for paper in ("page", "track") + (("band",) if ink in ("ink", "quiet") else ()):
                t.check(contrast(ink, paper) >= 4.5, f"{ink} on {paper}: {contrast(ink, paper)}")
        for lane in LANES + ["other", "accent"]:
            t.check(contrast(lane, "page") >= 3, f"{lane} on the page: {contrast(lane, 'page')}")
            text_on = contrast("bar-ink", lane)
            t.check(text_on >= 4.5, f"text on {lane}: {text_on}")
        bars = [colours[lane] for lane in LANES]
        t.equal(len(set(bars)), len(bars), "colours")


if __name__ == "__main__":
    t.main()
