#!/usr/bin/env python3
"""The page of `spillway report` in a headless Chromium: an empty trace, one task, a run with
everything, and a million tasks; on a phone and on a desk, light and dark. No error on the console,
no request but for the page itself, no sideways scrolling; every figure shown equals the trace's;
wheel, drag, pinch, keys and buttons move the timeline, and a million tasks keep it fluent.
Screenshots for a look stay in LONG_DIR/report.

Wants Debian's package chromium (or CHROMIUM=PATH); without it everything is skipped. The browser is
driven through its pipe, with the standard library alone.
"""
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import report  # noqa: E402
import support as t  # noqa: E402

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
FOLDER = os.path.join(os.environ.get("LONG_DIR", "/var/tmp/spillway-long"), "report")
ANSWER_S_MAX = 60
FRAME_MS_MAX = 100  # of a drawing of a million tasks, on a slow machine without a GPU
SCREENS = {"phone": (390, 844, 3, True), "desk": (1280, 900, 1, False)}
report.t._tests.clear()  # that file's tests are not this one's


class Browser:
    """One page; what it complains of is collected."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        read_end, self.to = os.pipe()
        self.from_, write_end = os.pipe()
        self.child = subprocess.Popen(
            ["sh", "-c", f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}', CHROMIUM, "--headless",
             "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             f"--user-data-dir={self.profile}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(read_end, write_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_end)
        os.close(write_end)
        self.number, self.waiting, self.session = 0, b"", None
        self.complaints, self.requests, self.loaded = [], [], False
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(x["targetId"] for x in targets if x["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def close(self):
        self.child.kill()
        self.child.wait()
        os.close(self.to)
        os.close(self.from_)
        shutil.rmtree(self.profile, ignore_errors=True)

    def receive(self, timeout_s):
        end = time.monotonic() + timeout_s
        while b"\0" not in self.waiting:
            ready, _, _ = select.select([self.from_], [], [], max(0, end - time.monotonic()))
            t.check(ready, "the browser does not answer")
            piece = os.read(self.from_, 1 << 20)
            t.check(piece, "the browser has gone")
            self.waiting += piece
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)

    def note(self, message):
        name, values = message.get("method"), message.get("params", {})
        if name == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif name == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{values['type']}: {values['args']}")
        elif name == "Log.entryAdded" and values["entry"]["level"] != "verbose":
            self.complaints.append(values["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
        elif name == "Page.loadEventFired":
            self.loaded = True

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive(ANSWER_S_MAX)
            if answer.get("id") == self.number:
                t.check("error" not in answer, f"{method}: {answer.get('error')}")
                return answer["result"]
            self.note(answer)

    def ask(self, script):
        """The value of an expression, or of the promise that it is."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)
        t.check("exceptionDetails" not in answer, f"{script[:80]}: {answer}")
        return answer["result"].get("value")

    def open(self, path, screen, dark):
        width, height, ratio, mobile = SCREENS[screen]
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=ratio, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.go("about:blank")  # a page that differs in its hash alone would not be loaded
        self.complaints, self.requests = [], []
        start = time.monotonic()
        self.go("file://" + os.path.abspath(path))
        self.frame()
        return time.monotonic() - start

    def go(self, url):
        self.loaded = False
        self.call("Page.navigate", url=url)
        while not self.loaded:
            self.note(self.receive(ANSWER_S_MAX))

    def frame(self):
        """Waits until what was asked for is drawn."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
                 ".then(() => 1)")

    def picture(self, canvas="timeline"):
        self.frame()
        return self.ask(f"document.getElementById('{canvas}').toDataURL()")

    def key(self, key):
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def middle(self, canvas="timeline"):
        box = self.ask(f"(() => {{ const c = document.getElementById('{canvas}'); "
                       "c.scrollIntoView({block: 'center'}); const b = c.getBoundingClientRect(); "
                       "return [b.x, b.y, b.width, b.height]; })()")
        return box[0] + box[2] / 2, box[1] + 40, box[2]

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, name):
        self.ask("(scrollTo(0, 0), 1)")
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={
            "x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 4000),
            "scale": 1})["data"]
        with open(os.path.join(FOLDER, name + ".png"), "wb") as file:
            file.write(base64.b64decode(data))


# ---- what is checked on every page ----

CELLS = """[...document.querySelectorAll("#table tbody tr")].map(row => [row.dataset.lane,
    row.className, Object.fromEntries([...row.querySelectorAll("td")].map(
        cell => [cell.dataset.label, cell.dataset.value === undefined ? null
            : Number(cell.dataset.value)]))])"""
COLUMNS = {"Busy": "busy_ns", "of the step": "busy_share", "Critical path": "lane_path_ns",
           "of the path": "path_share", "Moved": "bytes", "Rate, busy": "bytes_per_busy_s",
           "Rate, step": "bytes_per_s"}


def check_shown(browser, figures, now):
    """The table, the sentence and the summary show this step's figures."""
    t.equal(browser.ask("document.getElementById('sentence').textContent"), now["sentence"],
            "the sentence")
    t.equal(browser.ask("Number(document.getElementById('summary').dataset.stepNs)"),
            now["step_ns"], "the step's time")
    lanes = [entry["lane"] for entry in figures["lanes"]]
    shown = browser.ask(CELLS)
    has_tasks = [lane for i, lane in enumerate(lanes) if any(s["tasks"][i] for s in
                                                             figures["steps"])]
    t.check(set(has_tasks) <= {row[0] for row in shown}, "lanes in the table")
    for lane, mark, cells in shown:
        i = lanes.index(lane)
        moves = now["bytes"][i] > 0
        for label, key in COLUMNS.items():
            want = now[key][i] if moves or "bytes" not in key else None
            t.equal(cells[label], want, f"{label} of {lane}")
        t.equal(cells["Peak"], figures["lanes"][i]["peak_bytes_per_s"], f"peak of {lane}")
        t.equal(mark == "clock", lane == now["step_clock"], f"mark of {lane}")


def check_page(browser, name, path, page):
    figures = json.loads(t.spillway("report", path, "-o", page, "--json", rc=0).stdout)
    for screen in SCREENS:
        for dark in (False, True):
            seconds = browser.open(page, screen, dark)
            what = f"{name} on a {screen}, {'dark' if dark else 'light'}"
            t.equal(browser.ask("document.body.dataset.ready"), "1", what + ": ready")
            wide = browser.ask("[document.documentElement.scrollWidth, innerWidth]")
            t.check(wide[0] <= wide[1], f"{what}: {wide[0]} pixels wide in {wide[1]}")
            background = browser.ask("getComputedStyle(document.body).backgroundColor")
            t.equal(background, "rgb(18, 22, 27)" if dark else "rgb(255, 255, 255)", what)
            if figures["steps"]:
                check_shown(browser, figures, figures["steady"])
            for s in figures["steps"][::max(1, len(figures["steps"]) // 3)]:
                browser.ask(f"(location.hash = '#step={s['step']}', new Promise(done => "
                            "setTimeout(done, 50)).then(() => 1))")
                check_shown(browser, figures, s)
            tiers = browser.ask("[...document.querySelectorAll('#tiers li')].map(x => [x.dataset."
                                "tier, Number(x.dataset.used), Number(x.dataset.budget)])")
            t.equal(tiers, [[m["tier"], m["used_bytes_max"], m["budget_bytes"]]
                            for m in figures["memory"]], what + ": memory")
            browser.screenshot(f"{name}-{screen}-{'dark' if dark else 'light'}")
            t.equal(browser.complaints, [], what + ": the console")
            t.equal([r.split("#")[0] for r in browser.requests],
                    ["file://" + os.path.abspath(page)], what + ": requests")
            t.check(seconds < 20, f"{what}: {seconds:.1f} s until it is drawn")
    return figures


def with_browser(check):
    def run():
        if not CHROMIUM:
            t.skip("not checked here: no chromium (apt-get install chromium)")
        os.makedirs(FOLDER, exist_ok=True)
        browser = Browser()
        try:
            with t.folder() as tmp:
                check(browser, tmp)
        finally:
            browser.close()
    run.__name__ = check.__name__
    return t.test(run)


# ---- the checks ----

@with_browser
def an_empty_trace_and_one_task(browser, tmp):
    report.write_trace(f"{tmp}/empty.json", [])
    check_page(browser, "empty", f"{tmp}/empty.json", f"{tmp}/empty.html")
    report.write_trace(f"{tmp}/one.json", [report.task("adam", 9, 0, 1_500_000, 12 << 20)])
    check_page(browser, "one-task", f"{tmp}/one.json", f"{tmp}/one.html")


@with_browser
def a_trace_with_everything(browser, tmp):
    report.sample_trace(f"{tmp}/trace.json")
    check_page(browser, "everything", f"{tmp}/trace.json", f"{tmp}/r.html")


@with_browser
def a_run(browser, tmp):
    t.train(f"{tmp}/out", "--steps", 8, "--seq-len", 64, "--accumulate", 2, "--optimizer", "nvme",
            "--sim-nvme", "300M,100M", "--sim-pcie", "2G", "--trace", f"{tmp}/trace.json", rc=0)
    check_page(browser, "run", f"{tmp}/trace.json", f"{tmp}/r.html")


@with_browser
def a_cut_trace_says_so(browser, tmp):
    report.sample_trace(f"{tmp}/trace.json")
    os.truncate(f"{tmp}/trace.json", os.path.getsize(f"{tmp}/trace.json") // 2)
    t.spillway("report", f"{tmp}/trace.json", "-o", f"{tmp}/r.html", rc=0)
    browser.open(f"{tmp}/r.html", "phone", False)
    t.equal(browser.ask("document.getElementById('truncated').hidden"), False, "the note")
    t.equal(browser.complaints, [], "the console")


@with_browser
def everything_moves_the_timeline(browser, tmp):
    report.sample_trace(f"{tmp}/trace.json", steps=20)
    t.spillway("report", f"{tmp}/trace.json", "-o", f"{tmp}/r.html", rc=0)
    browser.open(f"{tmp}/r.html", "desk", False)

    def changes(what, action, want=True):
        before = browser.picture(), browser.picture("memory")
        action()
        after = browser.picture(), browser.picture("memory")
        t.equal(before != after, want, f"{what} changes the picture")

    x, y, width = browser.middle()
    changes("the wheel", lambda: browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300))

    def drag():
        browser.mouse("mousePressed", x, y, button="left", clickCount=1)
        browser.mouse("mouseMoved", x - 90, y, button="left")
        browser.mouse("mouseReleased", x - 90, y, button="left", clickCount=1)
    changes("dragging", drag)
    for button in ("zoom-in", "zoom-out", "next", "show-all", "steady"):
        changes(button, lambda b=button: browser.ask(f"document.getElementById('{b}').click()"))
    browser.ask("document.getElementById('show-all').click()")
    browser.ask("document.getElementById('timeline').focus()")
    for key in ("+", "ArrowRight", "ArrowLeft", "-", "ArrowDown", "."):
        changes("the key " + key, lambda k=key: browser.key(k))
    t.contains(browser.ask("document.getElementById('detail').textContent"), "step ", "the detail")
    browser.ask("document.getElementById('show-all').click()")
    changes("0 where all is shown", lambda: browser.key("0"), want=False)
    # By Tab alone: every control is reached, the timeline among them, and left again.
    reached = []
    browser.ask("(document.activeElement.blur(), 1)")
    for _ in range(14):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab",
                     windowsVirtualKeyCode=9)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab")
        reached.append(browser.ask("document.activeElement.id || document.activeElement.tagName"))
    for name in ("steady", "step", "zoom-in", "zoom-out", "show-all", "timeline", "SUMMARY"):
        t.check(name in reached, f"Tab does not reach {name}: {reached}")

    browser.open(f"{tmp}/r.html", "phone", False)
    x, y, width = browser.middle()

    def pinch():
        for kind, apart in (("touchStart", 30), ("touchMove", 60), ("touchMove", 90)):
            browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=[
                {"x": x - apart, "y": y, "id": 1}, {"x": x + apart, "y": y, "id": 2}])
        browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    changes("pinching", pinch)
    t.equal(browser.ask("visualViewport.scale"), 1, "the page's own zoom")
    t.equal(browser.complaints, [], "the console")


# From all of it to a microsecond and back: the longest time that a drawing took.
ZOOM = """new Promise(done => {
    const canvas = document.getElementById("timeline"), times = [];
    const step = () => {
        const key = times.length < 40 ? "+" : "-", start = performance.now();
        canvas.dispatchEvent(new KeyboardEvent("keydown", {key}));
        requestAnimationFrame(() => {
            times.push(performance.now() - start);
            if (times.length < 80) setTimeout(step, 0); else done(times.sort((a, b) => a - b));
        });
    };
    step();
})"""


@with_browser
def a_million_tasks(browser, tmp):
    report.large_trace(f"{tmp}/trace.json", 1_000_000)
    figures = check_page(browser, "million", f"{tmp}/trace.json", f"{tmp}/r.html")
    t.equal(figures["tasks"], 1_000_000, "tasks")
    seconds = browser.open(f"{tmp}/r.html", "desk", False)
    browser.ask("document.getElementById('show-all').click()")
    times = browser.ask(ZOOM)
    print(f"drawn after {seconds:.1f} s; a zoom takes {times[len(times) // 2]:.0f} ms, "
          f"{times[-1]:.0f} at most")
    t.check(times[int(0.9 * len(times))] < FRAME_MS_MAX, f"slow drawings: {times[-10:]}")


if __name__ == "__main__":
    t.main()
