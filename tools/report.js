"use strict";
(() => {
const get = id => document.getElementById(id);
const figures = JSON.parse(get("figures").textContent);
const names = JSON.parse(get("names").textContent);
const SPAN_MIN = 1000;  // nanoseconds across the timeline
const GUTTER = 96, NARROW = 560, AXIS = 22, ROW = 26, LABEL = 15, TIER = 58;

// ---- numbers in words ----

const digits = (x, n) => x.toLocaleString("en", {maximumSignificantDigits: n, minimumSignificantDigits: 1});
const scaled = (x, units, step) => {
    let i = 0;
    while (i + 1 < units.length && Math.abs(x) >= step * 0.9995) { x /= step; i++; }
    return digits(x, 3) + " " + units[i];
};
const time = ns => ns >= 1e9 ? digits(ns / 1e9, 4) + " s" : scaled(ns, ["ns", "µs", "ms"], 1000);
const size = bytes => scaled(bytes, ["B", "kB", "MB", "GB", "TB", "PB"], 1000);
const rate = perSecond => size(perSecond) + "/s";
const percent = share => (share > 0 && share < 0.0005 ? "<0.1" : (100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)) + "%";
const whole = x => x.toLocaleString("en");

// ---- the timeline's bytes: tools/report_page.c says what they are ----

const data = (() => {
    const text = atob(get("data").textContent), bytes = new Uint8Array(text.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
    get("data").remove();
    let at = 0;
    const unsigned = () => {
        let value = 0, scale = 1, byte;
        do { byte = bytes[at++]; value += (byte & 127) * scale; scale *= 128; } while (byte & 128);
        return value;
    };
    const signed = () => {
        const value = unsigned();
        return value % 2 ? -(value + 1) / 2 : value / 2;
    };
    const kinds = Array.from({length: unsigned()}, () => (
        {name: names[unsigned()], micro: unsigned(), bytes: unsigned(), eval: unsigned()}));
    const lanes = figures.lanes.map(({lane}) => {
        const n = unsigned();
        const l = {name: lane, count: n, start: new Float64Array(n), end: new Float64Array(n),
                   kind: new Uint32Array(n), step: new Uint32Array(n), path: new Uint8Array(n),
                   busy: new Float64Array(n + 1), onPath: new Float64Array(n + 1)};
        for (let i = 0, now = 0, step = 0; i < n; i++) {
            const mark = unsigned();
            l.kind[i] = Math.floor(mark / 2);
            l.path[i] = mark % 2;
            l.start[i] = now + signed();
            const duration = unsigned();
            l.end[i] = now = l.start[i] + duration;
            l.step[i] = step += signed();
            l.busy[i + 1] = l.busy[i] + duration;
            l.onPath[i + 1] = l.onPath[i] + l.path[i] * duration;
        }
        return l;
    });
    const tiers = figures.memory.map(tier => {
        const n = unsigned(), s = {...tier, at: new Float64Array(n), used: new Float64Array(n), budget: new Float64Array(n)};
        for (let i = 0, now = 0, used = 0, budget = 0; i < n; i++) {
            s.at[i] = now += signed();
            s.used[i] = used += signed();
            s.budget[i] = budget += signed();
        }
        return s;
    });
    return {kinds, lanes, tiers};
})();
const shown = data.lanes.filter(l => l.count > 0);
const total = Math.max(figures.end_ns - figures.begin_ns, SPAN_MIN);

// How many entries of an ascending array are at most x.
const atMost = (array, x) => {
    let low = 0, high = array.length;
    while (low < high) {
        const middle = (low + high) >> 1;
        if (array[middle] <= x) low = middle + 1; else high = middle;
    }
    return low;
};

// ---- colours, from the style sheet and so from the reader's scheme ----

let colours;
const mix = (a, b, part) => "#" + [1, 3, 5].map(i => Math.round(
    parseInt(a.slice(i, i + 2), 16) * (1 - part) + parseInt(b.slice(i, i + 2), 16) * part)
    .toString(16).padStart(2, "0")).join("");
const readColours = () => {
    const style = getComputedStyle(document.documentElement);
    const value = name => style.getPropertyValue("--" + name).trim();
    colours = {font: getComputedStyle(document.body).fontFamily};
    for (const name of ["page", "ink", "quiet", "line", "track", "band", "accent", "bar-ink"])
        colours[name] = value(name);
    const away = colours["bar-ink"] === "#ffffff" ? "#000000" : "#ffffff";
    for (const lane of data.lanes) {
        lane.colour = value(lane.name) || value("other");
        lane.second = mix(lane.colour, away, 0.35);  // of backward, away from the text on it
    }
};

// ---- the chosen step ----

let chosen = -1;  // place in figures.steps; -1: the steady average
const figuresNow = () => chosen < 0 ? figures.steady : figures.steps[chosen];
const windowNow = () => {
    if (!figures.steps.length) return [0, total];
    const first = chosen < 0 ? figures.steps.find(s => s.step === figures.steady.first_step) : figures.steps[chosen];
    const last = chosen < 0 ? figures.steps.find(s => s.step === figures.steady.last_step) : first;
    return [first.begin_ns - figures.begin_ns, last.end_ns - figures.begin_ns];
};

const element = (tag, text, data = {}) => {
    const e = document.createElement(tag);
    e.textContent = text;
    Object.assign(e.dataset, data);
    return e;
};
const swatch = colour => {
    const s = element("span", "");
    s.className = "swatch";
    s.style.setProperty("--swatch", colour);
    return s;
};

const showPath = now => {
    const path = get("path"), legend = get("legend");
    path.replaceChildren();
    legend.replaceChildren();
    const parts = figures.lanes.map((l, i) => ({name: l.lane, ns: now.lane_path_ns[i],
        share: now.path_share[i], colour: data.lanes[i].colour}));
    parts.push({name: "gaps between tasks", ns: now.gap_ns, colour: colours.line});
    for (const part of parts.filter(p => p.ns > 0).sort((a, b) => b.ns - a.ns)) {
        const bar = element("span", "");
        bar.style.flexGrow = part.ns;
        bar.style.background = part.colour;
        const item = element("li", `${part.name} ${time(part.ns)}` + (part.share ? `, ${percent(part.share)}` : ""));
        item.prepend(swatch(part.colour));
        path.append(bar);
        legend.append(item);
    }
};

const cell = (label, raw, words) => {
    const td = element("td", raw === null ? "–" : words(raw), {label});
    if (raw === null) td.className = "empty"; else td.dataset.value = raw;
    return td;
};

const showTable = now => {
    const body = get("table").tBodies[0];
    body.replaceChildren();
    figures.lanes.forEach(({lane, peak_bytes_per_s: peak}, i) => {
        if (!data.lanes[i].count) return;
        const row = element("tr", "", {lane}), head = element("th", lane);
        head.scope = "row";
        head.prepend(swatch(data.lanes[i].colour));
        const bytes = now.bytes[i] || null, fast = bytes && now.bytes_per_busy_s[i];
        row.append(head, cell("Busy", now.busy_ns[i], time),
            cell("of the step", now.busy_share[i], percent),
            cell("Critical path", now.lane_path_ns[i], time),
            cell("of the path", now.path_share[i], percent),
            cell("Moved", bytes, size), cell("Rate, busy", fast, rate),
            cell("Rate, step", bytes && now.bytes_per_s[i], rate),
            cell("Peak", peak, p => rate(p) + (fast ? ` (${percent(fast / p)})` : "")));
        if (lane === now.step_clock) row.className = "clock";
        body.append(row);
    });
};

const choose = place => {
    chosen = Math.max(-1, Math.min(figures.steps.length - 1, place));
    const now = figuresNow(), input = get("step");
    get("steady").setAttribute("aria-pressed", String(chosen < 0));
    get("previous").disabled = chosen <= 0;
    get("next").disabled = chosen + 1 >= figures.steps.length;
    input.value = chosen < 0 ? "" : figures.steps[chosen].step;
    get("sentence").textContent = now ? now.sentence : "The trace holds no task of a step.";
    if (!now) return;
    const what = chosen >= 0 ? `step ${now.step}` : now.steps === 1 ? `step ${now.first_step}`
        : `average of steps ${now.first_step} to ${now.last_step}`;
    get("summary").textContent = `${time(now.step_ns)} a step (${what}), of which ${time(now.gap_ns)} in gaps. ` +
        `The trace has ${whole(figures.steps.length)} step${figures.steps.length === 1 ? "" : "s"} ` +
        `and ${whole(figures.tasks)} task${figures.tasks === 1 ? "" : "s"} in ${time(total)}.`;
    get("summary").dataset.stepNs = now.step_ns;
    showPath(now);
    showTable(now);
};

// ---- drawing ----

const view = {from: 0, to: total};
let cursor = {lane: 0, task: -1}, scheduled = false;
const timeline = get("timeline"), memory = get("memory");
const gutter = () => timeline.clientWidth < NARROW ? 0 : GUTTER;
const rowHeight = () => gutter() ? ROW : ROW + LABEL;
const xOf = (ns, left, width) => left + (ns - view.from) / (view.to - view.from) * width;

const prepare = (canvas, height) => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
        canvas.style.height = height + "px";
        canvas.width = Math.round(width * ratio);
        canvas.height = Math.round(height * ratio);
    }
    const c = canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.fillStyle = colours.page;
    c.fillRect(0, 0, width, height);
    c.font = "12px " + colours.font;
    c.textBaseline = "middle";
    return [c, gutter(), width - gutter()];
};

const drawAxis = (c, left, width, height) => {
    const span = view.to - view.from, rough = span / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
    const [unit, name] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]].find(u => view.to >= u[0]) || [1, "ns"];
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
        const x = xOf(t, left, width), text = digits(Math.round(t / step) * step / unit, 12) + " " + name;
        c.fillStyle = colours.line;
        c.fillRect(Math.round(x), AXIS - 5, 1, height);
        c.fillStyle = colours.quiet;
        if (x + c.measureText(text).width < left + width) c.fillText(text, x + 4, AXIS / 2);
    }
};

const drawSteps = (c, left, width, height) => {
    if (figures.steps.length && (chosen >= 0 || figures.steady.steps < figures.steps.length)) {
        const [from, to] = windowNow().map(t => Math.min(left + width, Math.max(left, xOf(t, left, width))));
        c.fillStyle = colours.band;
        c.fillRect(from, AXIS, to - from, height);
    }
    const inView = figures.steps.filter(s => s.end_ns - figures.begin_ns >= view.from && s.end_ns - figures.begin_ns <= view.to);
    if (inView.length > width / 6) return;
    c.fillStyle = colours.quiet;
    for (const s of inView) c.fillRect(Math.round(xOf(s.end_ns - figures.begin_ns, left, width)), AXIS, 1, height);
};

// The sum of durations up to a moment, from running sums.
const sumTo = (lane, sums, t) => {
    const n = atMost(lane.start, t);
    if (!n) return 0;
    const part = Math.min(sums[n] - sums[n - 1], Math.max(0, lane.end[n - 1] - t));
    return sums[n] - part;
};

// A column of pixels is as strong as its share of busy time: a million tasks cost no more than a thousand.
const drawColumns = (c, lane, left, width, y, height) => {
    const span = (view.to - view.from) / width;
    let busy = sumTo(lane, lane.busy, view.from), path = sumTo(lane, lane.onPath, view.from);
    for (let x = 0; x < width; x++) {
        const end = view.from + (x + 1) * span;
        const busyEnd = sumTo(lane, lane.busy, end), pathEnd = sumTo(lane, lane.onPath, end);
        if (busyEnd > busy) {
            c.globalAlpha = 0.2 + 0.8 * Math.min(1, (busyEnd - busy) / span);
            c.fillStyle = lane.colour;
            c.fillRect(left + x, y, 1, height - 5);
        }
        if (pathEnd > path) {
            c.globalAlpha = 0.3 + 0.7 * Math.min(1, (pathEnd - path) / span);
            c.fillStyle = colours.ink;
            c.fillRect(left + x, y + height - 4, 1, 3);
        }
        busy = busyEnd;
        path = pathEnd;
    }
    c.globalAlpha = 1;
};

const drawTasks = (c, lane, first, last, left, width, y, height) => {
    for (let i = first; i < last; i++) {
        const from = Math.max(left, xOf(lane.start[i], left, width));
        const to = Math.min(left + width, xOf(lane.end[i], left, width));
        const wide = Math.max(1, to - from - (to - from > 4 ? 1 : 0));
        const name = data.kinds[lane.kind[i]].name;
        c.fillStyle = name.startsWith("backward") ? lane.second : lane.colour;
        c.fillRect(from, y, wide, height - 5);
        if (lane.path[i]) {
            c.fillStyle = colours.ink;
            c.fillRect(from, y + height - 4, wide, 3);
        }
        if (wide < 40) continue;
        c.fillStyle = colours["bar-ink"];
        const fits = c.measureText(name).width < wide - 8;
        if (fits) c.fillText(name, from + 4, y + (height - 5) / 2 + 0.5);
    }
};

const drawLane = (c, lane, row, left, width) => {
    const top = AXIS + row * rowHeight(), y = top + (left ? 3 : LABEL), height = ROW - 4;
    c.fillStyle = row === cursor.lane && document.activeElement === timeline ? colours.accent : colours.ink;
    c.fillText(lane.name, 6, left ? y + height / 2 - 2 : top + LABEL / 2 + 1);
    const last = atMost(lane.start, view.to);
    let first = Math.max(0, atMost(lane.start, view.from) - 1);
    if (first < last && lane.end[first] < view.from) first++;
    if (last - first > width / 2)
        drawColumns(c, lane, left, width, y, height);
    else
        drawTasks(c, lane, first, last, left, width, y, height);
    if (row !== cursor.lane || cursor.task < 0) return;
    const from = xOf(lane.start[cursor.task], left, width), to = xOf(lane.end[cursor.task], left, width);
    if (to < left || from > left + width) return;
    c.strokeStyle = colours.ink;
    c.lineWidth = 2;
    c.strokeRect(Math.max(left, from) - 1, y - 1, Math.min(left + width, Math.max(to, from + 2)) - Math.max(left, from) + 2, height - 3);
};

const drawTimeline = () => {
    const height = AXIS + shown.length * rowHeight() + 4;
    const [c, left, width] = prepare(timeline, height);
    drawSteps(c, left, width, height);
    drawAxis(c, left, width, height);
    shown.forEach((lane, row) => drawLane(c, lane, row, left, width));
};

const drawTier = (c, tier, row, left, width) => {
    const label = left ? 0 : LABEL, top = row * (TIER + label) + label + 6, height = TIER - 12;
    c.fillStyle = colours.ink;
    c.fillText(tier.tier, 6, left ? top + height / 2 : top - LABEL / 2);
    const most = Math.max(tier.used_bytes_max, tier.budget_bytes, 1);
    c.fillStyle = colours.track;
    c.fillRect(left, top, width, height);
    const yOf = bytes => top + height - bytes / most * (height - 2);
    const first = Math.max(0, atMost(tier.at, view.from) - 1), last = atMost(tier.at, view.to);
    let x = left, used = 0, budget = tier.budget[0];  // samples of one column: the highest counts
    const flush = end => {
        c.fillStyle = colours.accent;
        c.fillRect(x, yOf(used), end - x, top + height - yOf(used));
        c.fillStyle = colours.ink;
        for (let dash = x; budget && dash < end; dash += 8) c.fillRect(dash, yOf(budget), Math.min(4, end - dash), 1.5);
    };
    for (let i = first; i < last; i++) {
        const at = Math.max(left, Math.round(xOf(tier.at[i], left, width)));
        if (at - x >= 1) { flush(at); x = at; used = tier.used[i]; } else used = Math.max(used, tier.used[i]);
        budget = tier.budget[i];
    }
    if (tier.at.length) flush(left + width);
};

const drawMemory = () => {
    if (!data.tiers.length) return;
    const [c, left, width] = prepare(memory, data.tiers.length * (TIER + (gutter() ? 0 : LABEL)) + 4);
    data.tiers.forEach((tier, row) => drawTier(c, tier, row, left, width));
};

const redraw = () => {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
        scheduled = false;
        drawTimeline();
        drawMemory();
    });
};

// ---- moving about ----

const show = (from, to) => {
    const span = Math.min(total, Math.max(SPAN_MIN, to - from));
    view.from = Math.min(total - span, Math.max(0, (from + to) / 2 - span / 2));
    view.to = view.from + span;
    redraw();
};
const zoom = (factor, at = (view.from + view.to) / 2) =>
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
const pan = part => {
    const by = (view.to - view.from) * part;
    show(Math.max(0, view.from + by), Math.max(0, view.from + by) + (view.to - view.from));
};
const timeAt = (canvas, clientX) => {
    const left = gutter(), box = canvas.getBoundingClientRect();
    return view.from + (clientX - box.left - left) / (canvas.clientWidth - left) * (view.to - view.from);
};
const showStep = () => {
    const [from, to] = windowNow();
    show(from - (to - from) * 0.02, to + (to - from) * 0.02);
};

const detail = () => {
    const lane = shown[cursor.lane], i = cursor.task;
    if (!lane || i < 0) { get("detail").textContent = "\u00a0"; return; }
    const kind = data.kinds[lane.kind[i]], duration = lane.end[i] - lane.start[i];
    const parts = [kind.name, lane.name, kind.eval ? "evaluation" : `step ${lane.step[i]}`, `micro-batch ${kind.micro}`,
                   `${time(duration)} from ${time(lane.start[i])}`];
    if (kind.bytes) parts.push(size(kind.bytes) + (duration ? ` at ${rate(kind.bytes / duration * 1e9)}` : ""));
    if (lane.path[i]) parts.push("on the critical path");
    get("detail").textContent = parts.join(" · ");
};
const pick = event => {
    const box = timeline.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - AXIS) / rowHeight()), lane = shown[row];
    if (!lane) return;
    const t = timeAt(timeline, event.clientX), slack = (view.to - view.from) / timeline.clientWidth * 2;
    const i = atMost(lane.start, t + slack) - 1;
    cursor = {lane: row, task: i >= 0 && lane.end[i] >= t - slack ? i : -1};
    detail();
    redraw();
};
const stepTask = by => {
    const lane = shown[cursor.lane];
    if (!lane) return;
    const middle = atMost(lane.start, (view.from + view.to) / 2) - 1;
    cursor.task = Math.min(lane.count - 1, Math.max(0, cursor.task < 0 ? middle : cursor.task + by));
    const from = lane.start[cursor.task], to = lane.end[cursor.task], span = view.to - view.from;
    if (from < view.from || to > view.to) show((from + to) / 2 - span / 2, (from + to) / 2 + span / 2);
    detail();
    redraw();
};

const keys = {
    ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), "+": () => zoom(0.7), "=": () => zoom(0.7),
    "-": () => zoom(1 / 0.7), 0: () => show(0, total), Home: () => show(0, total),
    ArrowUp: () => { cursor = {lane: Math.max(0, cursor.lane - 1), task: -1}; redraw(); },
    ArrowDown: () => { cursor = {lane: Math.min(shown.length - 1, cursor.lane + 1), task: -1}; redraw(); },
    ",": () => stepTask(-1), ".": () => stepTask(1),
    Escape: () => { cursor.task = -1; detail(); redraw(); },
};
timeline.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
});

const pointers = new Map();  // of fingers and buttons that are down: the moment each of them holds
let moved = false;
const drag = (canvas, event) => {
    if (!pointers.has(event.pointerId)) return;
    pointers.get(event.pointerId).x = event.clientX;
    const [a, b] = pointers.values(), left = gutter(), width = canvas.clientWidth - left;
    const part = x => (x - canvas.getBoundingClientRect().left - left) / width;
    moved = moved || Math.abs(event.clientX - pointers.get(event.pointerId).down) > 3;
    if (b && Math.abs(part(a.x) - part(b.x)) > 0.01 && a.at !== b.at) {
        const span = Math.abs((b.at - a.at) / (part(b.x) - part(a.x)));
        show(a.at - part(a.x) * span, a.at - part(a.x) * span + span);
    } else if (!b && moved) {
        const span = view.to - view.from, from = Math.max(0, a.at - part(a.x) * span);
        show(from, from + span);
    }
};
for (const canvas of [timeline, memory]) {
    canvas.addEventListener("wheel", event => {
        const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
        if (!sideways && event.deltaY > 0 && view.to - view.from >= total) return;  // the page scrolls
        event.preventDefault();
        const lines = event.deltaMode ? 30 : 1, by = (event.deltaX || event.deltaY) * lines;
        if (sideways) pan(by / 1000); else zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY * lines)) / 400), timeAt(canvas, event.clientX));
    }, {passive: false});
    canvas.addEventListener("pointerdown", event => {
        canvas.setPointerCapture(event.pointerId);
        pointers.set(event.pointerId, {at: timeAt(canvas, event.clientX), x: event.clientX, down: event.clientX});
        moved = false;
    });
    canvas.addEventListener("pointermove", event => {
        if (pointers.size) drag(canvas, event);
        else if (canvas === timeline && event.pointerType === "mouse") pick(event);
    });
    for (const name of ["pointerup", "pointercancel"])
        canvas.addEventListener(name, event => {
            pointers.delete(event.pointerId);
            if (name === "pointerup" && !moved && canvas === timeline) pick(event);
        });
}
for (const name of ["focus", "blur"]) timeline.addEventListener(name, redraw);

get("zoom-in").onclick = () => zoom(0.5);
get("zoom-out").onclick = () => zoom(2);
get("show-all").onclick = () => show(0, total);
get("show-step").onclick = showStep;
const chooseAndShow = place => { choose(place); showStep(); };
get("steady").onclick = () => chooseAndShow(-1);
get("previous").onclick = () => chooseAndShow(chosen - 1);
get("next").onclick = () => chooseAndShow(chosen + 1);
const chooseNumber = wanted => {
    const place = figures.steps.findIndex(s => s.step >= wanted);
    chooseAndShow(place < 0 ? figures.steps.length - 1 : place);
};
get("step").onchange = () => { if (get("step").value) chooseNumber(Number(get("step").value)); };
// report.html#step=7 opens at that step.
const follow = () => {
    const wanted = /^#step=(\d+)$/.exec(location.hash);
    if (wanted) chooseNumber(Number(wanted[1]));
};
addEventListener("hashchange", follow);

// ---- the start ----

const start = () => {
    readColours();
    get("trace-name").textContent = "of " + figures.trace;
    document.title = `Spillway report of ${figures.trace}`;
    get("truncated").hidden = !figures.truncated;
    get("memory-section").hidden = !data.tiers.length;
    get("choice").hidden = get("figures-section").hidden = !figures.steps.length;
    for (const tier of data.tiers)
        get("tiers").append(element("li", `${tier.tier}: at most ${size(tier.used_bytes_max)} of ${size(tier.budget_bytes)}`,
            {tier: tier.tier, used: tier.used_bytes_max, budget: tier.budget_bytes}));
    if (figures.steps.length) {
        get("step").min = figures.steps[0].step;
        get("step").max = figures.steps[figures.steps.length - 1].step;
    }
    chooseAndShow(-1);
    follow();
    drawTimeline();
    drawMemory();
    new ResizeObserver(redraw).observe(timeline);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); choose(chosen); redraw(); });
    document.body.dataset.ready = "1";
};
start();
})();
