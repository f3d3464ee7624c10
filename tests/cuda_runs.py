"""Whole runs on a CUDA device: on the CPU stand-in, where streams run late and threads in any
order. The same training as on the host device, the same bits for every placement and overlap mode.

time limit: 240 s
"""
import json
import os
import re
import signal
import struct

import support as t

PLUGIN = os.environ.get("SPILLWAY_CUDA_PLUGIN") or os.path.join(
    os.path.dirname(t.SPILLWAY), "standin", "libspillway_cuda.so")
BASE = ["--seq-len", 16, "--digest"]


def train(out, *more, env=None, device="cuda", steps=3, rc=0, lr="1e-3", **options):
    return t.train(out, *BASE, "--steps", steps, "--lr", lr, "--device", device, "--log",
                   out + ".jsonl", *more, rc=rc,
                   env={"SPILLWAY_CUDA_PLUGIN": PLUGIN, **(env or {})}, **options)


def outcome(out):
    steps, others = t.read_log(out + ".jsonl")
    digests = [o for o in others if o.get("event") == "digest"]
    return ([(s["loss"], s["grad_norm"]) for s in steps], digests[-1],
            {n: x.data for n, x in t.read_model(out)[1].items()})


def losses_of(out, *more, device, steps):
    run = train(out, *more, device=device, steps=steps, lr="1e-4")
    t.check(re.search(rf"^numerics key: .* operators={device} ", run.stdout, re.M), "the key", run)
    return [s["loss"] for s in t.read_log(out + ".jsonl")[0]]


@t.test
def losses_are_those_of_the_host_device():
    """20 steps. In FP32 only the order of sums differs. In BF16 both devices round, each for
    itself: the GPU's losses must be as near to FP32's as the host's, within a factor of two in the
    root mean square, which twenty independent errors of one spread pass by less than once in
    1,000."""
    with t.folder() as tmp:
        exact = losses_of(f"{tmp}/host", "--dtype", "fp32", device="host", steps=20)
        same = losses_of(f"{tmp}/cuda", "--dtype", "fp32", device="cuda", steps=20)
        worst = max(abs(a - b) for a, b in zip(exact, same))
        print(f"# fp32: losses of 20 steps differ by {worst:.2g} at most", flush=True)
        t.check(worst <= 1e-4, f"fp32: {worst}")
        errors = []
        for device in ("host", "cuda"):
            losses = losses_of(f"{tmp}/{device}-bf16", device=device, steps=20)
            errors.append((sum((a - b) ** 2 for a, b in zip(exact, losses)) / 20) ** 0.5)
        print(f"# bf16: off by {errors[0]:.2g} on the host, {errors[1]:.2g} here", flush=True)
        t.check(errors[1] <= 2 * errors[0], f"bf16: {errors}")


@t.test
def no_placement_overlap_or_order_of_threads_changes_a_bit():
    nvme = [w for name in ("params", "optimizer", "gradients", "activations")
            for w in ("--" + name, "nvme")]
    with t.folder() as tmp:
        for common, variants in (
                ([], [["--overlap", "none"], ["--optimizer", "device"], [*nvme, "--chunk", 50000],
                      ["--params", "host", "--activations", "host", "--checkpoint-every", 2,
                       "--gradients", "device"]]),
                (["--clip", 0, "--accumulate", 2], [["--overlap", "none"], ["--params", "host"],
                                                    ["--optimizer", "host:50%,nvme"]])):
            want = None
            for i, more in enumerate([[], *variants]):
                out = f"{tmp}/{len(common)}{i}"
                run = train(out, *common, *more)
                want = want or outcome(out)
                t.check(outcome(out) == want, f"{common} {more}", run)
        for i, env in enumerate(({"STANDIN_SCHED": "rev"}, {"STANDIN_SCHED": "rand:3"},
                                 {"STANDIN_STREAMS": "sync"}, {"STANDIN_STREAMS": "late:7"})):
            out = f"{tmp}/{i}"
            run = train(out, "--clip", 0, "--accumulate", 2, env=env)
            t.check(outcome(out) == want, f"{env}", run)


def step_ends(tasks):
    ends = {}
    for task in tasks:
        step = task["args"]["step"]
        ends[step] = max(ends.get(step, 0.0), task["ts"] + task["dur"])
    return ends


@t.test
def times_are_those_of_the_work_on_the_device():
    """Not of when it was queued: the compute lane is as busy as the stand-in says its stream was,
    the log agrees with the trace, and a step has no gap while the device works."""
    with t.folder() as tmp:
        out, trace = f"{tmp}/out", f"{tmp}/trace.json"
        run = train(out, "--trace", trace, steps=4, env={"STANDIN_TIMES": tmp + "/times"})
        with open(trace, encoding="utf-8") as file:
            tasks = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        by_lane = {}
        for task in tasks:
            by_lane.setdefault(task["args"]["lane"], []).append(task)
        for name in ("compute", "h2d", "d2h", "comm"):
            lane = sorted(by_lane[name], key=lambda task: task["ts"])
            for a, b in zip(lane, lane[1:]):
                t.check(a["ts"] + a["dur"] <= b["ts"] + 0.001, f"{name}, twice: {a} {b}", run)
        if os.path.exists(tmp + "/times"):  # a GPU has none
            with open(tmp + "/times", encoding="ascii") as file:
                work_us = max(int(line.split()[1]) for line in file) / 1000
            busy_us = sum(task["dur"] for task in by_lane["compute"])
            print(f"# compute: busy {busy_us:.0f} us, {work_us:.0f} us of work", flush=True)
            # Four clocks a second are wrong by some us each.
            t.check(busy_us >= 0.99 * work_us, f"{busy_us} < {work_us}", run)
            # A GPU is through with such a model before the next task is there.
            steady = json.loads(t.spillway("report", trace, "--json", rc=0).stdout)["steady"]
            t.check(steady["gap_ns"] < 0.3 * steady["step_ns"], f"gaps: {steady}", run)
        steps, ends = t.read_log(out + ".jsonl")[0], step_ends(tasks)
        for step in steps:
            for lane, busy_s in step["lane_busy_s"].items():
                in_trace = sum(task["dur"] for task in by_lane.get(lane, ())
                               if task["args"]["step"] == step["step"])
                t.close(busy_s * 1e6, in_trace, 1.0, f"step {step['step']}, {lane}")
        for before, step in zip(steps, steps[1:]):
            t.close(step["step_s"] * 1e6, ends[step["step"]] - ends[before["step"]], 1.0,
                    f"time of step {step['step']}")


@t.test
def throttled_lanes_are_never_faster():
    """The time of a copy begins when its stream has come to it, however early it was queued."""
    with t.folder() as tmp:
        out, rate = f"{tmp}/out", 20e6
        run = train(out, "--sim-pcie", "20M")
        for step in t.read_log(out + ".jsonl")[0][1:]:
            for lane in ("h2d", "d2h"):
                least_s = 0.9 * step["bytes"][lane] / rate
                t.check(step["lane_busy_s"][lane] >= least_s > 0.01, f"{lane}: {step}", run)


@t.test
def copies_of_memory_that_is_not_pinned_may_run_late_too():
    """CUDA waits for some of them; kernels/device.h does not promise it. The tiers are such that
    each copy is the last one before its buffer is used again."""
    more = ["--schedule", "constant", "--warmup", 0]
    late = {"STANDIN_PAGEABLE": "late", "STANDIN_STREAMS": "last"}
    with t.folder() as tmp:
        train(f"{tmp}/want", *more, steps=4)
        for begin, then in (("device", "device"), ("host", "device")):
            out = f"{tmp}/{begin}"
            for steps, optimizer, how in ((2, begin, "--keep-store"), (4, then, "--resume")):
                run = train(out, *more, "--params", "device", "--optimizer", optimizer, how,
                            steps=steps, env=late)
            t.contains(run.stdout, "going on after step 2", "resume", run)
            t.check(outcome(out)[1:] == outcome(f"{tmp}/want")[1:], f"{begin}, {then}", run)
        run = train(f"{tmp}/streamed", *more, "--params", "host", steps=4, env=late)
        t.check(outcome(f"{tmp}/streamed")[1:] == outcome(f"{tmp}/want")[1:], "streamed", run)


def direct_bytes(out):
    return sum(s["bytes"].get("nvme_direct", 0) for s in t.read_log(out + ".jsonl")[0])


@t.test
def weights_on_nvme_go_past_the_hosts_memory():
    """Through the stand-in's cuFile: the same bits, also where it brings a read in parts or has no
    memory of its own to it, and where copies of memory that is not pinned run late; and every byte
    is counted. What it cannot do the host does as ever."""
    with t.folder() as tmp:
        cufile = {"SPILLWAY_CUFILE": t.preload("cufile")["LD_PRELOAD"],
                  "STANDIN_DEVICES": "2"}
        os.mkdir(f"{tmp}/a")
        os.mkdir(f"{tmp}/b")
        for i, more in enumerate((["--optimizer", "nvme"],
                                  ["--ranks", 2, "--accumulate", 2, "--nvme",
                                   f"{tmp}/a,{tmp}/b"],
                                  ["--clip", 0, "--chunk", 50000, "--dtype", "fp32"])):
            more = ["--params", "nvme", *more]
            train(f"{tmp}/{i}", *more, env={**cufile, "SPILLWAY_CUFILE": "/none.so"})
            t.equal(direct_bytes(f"{tmp}/{i}"), 0, "bytes without the library")
            for fault in ("", "short", "memory", "start", "file"):
                if i > 0 and fault not in ("", "short"):
                    continue
                out, count = f"{tmp}/{i}{fault or 'none'}", f"{tmp}/{i}{fault}.count"
                late = {} if fault else {"STANDIN_PAGEABLE": "late", "STANDIN_STREAMS": "last"}
                run = train(out, *more, env={**cufile, **late, "CUFILE_FAULT": fault,
                                             "CUFILE_COUNT": os.path.join(t.ROOT, count)})
                t.check(outcome(out) == outcome(f"{tmp}/{i}"), f"{more} {fault}: other bits", run)
                with open(count, encoding="ascii") as file:
                    read = sum(int(line) for line in file)
                t.equal(direct_bytes(out), read, f"bytes, {fault}", run)
                t.equal(read == 0, fault in ("start", "file"), f"{fault}: {read} bytes", run)
                t.equal("past the host's memory" in run.stderr, read > 0, "what is said", run)


@t.test
def what_a_gpu_reads_wrong_is_not_trained_on():
    with t.folder() as tmp:
        cufile = {"SPILLWAY_CUFILE": t.preload("cufile")["LD_PRELOAD"]}
        for fault, says in (("flip:7", r"weights in \S+ at byte \d+ are not what was written: sum"),
                            ("error:9", r"weights could not be read from \S+ at byte \d+")):
            out = f"{tmp}/{fault[:4]}"
            run = train(out, "--params", "nvme", rc=1, env={**cufile, "CUFILE_FAULT": fault})
            t.check(re.search("error: step [12]: " + says, run.stderr), fault, run)
            t.check(not os.path.exists(out + "/config.json"), "a model was written", run)


@t.test
def the_doctor_tells_whether_a_gpu_reads_files():
    with t.folder() as tmp:
        library = t.preload("cufile")["LD_PRELOAD"]
        for name, fault, state, part in ((library, "", "ok", "past the host's memory"),
                                         (library, "file", "info", "its error 5008"),
                                         ("/none.so", "", "info", "/none.so is not installed")):
            run = t.spillway("doctor", "--nvme", tmp, "--json",
                             env={"SPILLWAY_CUDA_PLUGIN": PLUGIN, "SPILLWAY_CUFILE": name,
                                  "CUFILE_FAULT": fault})
            check = [c for c in json.loads(run.stdout)["checks"] if c["name"] == "GPU reads"][0]
            t.equal(check["state"], state, "state", run)
            t.contains(check["found"] + check["why"], part, "what was found", run)
            t.equal(os.listdir(tmp), [], "files left behind", run)


@t.test
def copies_are_cut_as_the_profile_says_of_this_gpu():
    """`bench all` puts the sizes there; whatever they are, the bits are the same."""
    with t.folder() as tmp:
        path = os.path.join(t.ROOT, tmp, "machine.json")
        bench = t.Process(["bench", "all", "--seconds", "0.2", "--nvme", tmp],
                          env={"SPILLWAY_CUDA_PLUGIN": PLUGIN, "SPILLWAY_PROFILE": path})
        bench.wait_for("^copies ")  # kept by then; the stand-in is slow at a GPU's products
        bench.signal(signal.SIGKILL)
        run = bench.finish()
        with open(path, encoding="utf-8") as file:
            profile = json.load(file)
        copies = profile["copies"]
        sizes = {0, 1 << 18, 1 << 20, 1 << 22, 1 << 24}
        t.check({copies[way + "_piece_bytes"] for way in ("h2d", "d2h")} <= sizes, f"{copies}", run)
        train(f"{tmp}/want", "--params", "host")
        for name, changes, cut in (("cut", {}, True), ("other", {"gpu": "another one"}, False),
                                   ("wild", {"h2d_piece_bytes": 1, "d2h_piece_bytes": -5}, False)):
            profile["copies"] = {**copies, "h2d_piece_bytes": 4096, "d2h_piece_bytes": 12289,
                                 **changes}
            with open(path, "w", encoding="utf-8") as file:
                json.dump(profile, file)
            run = train(f"{tmp}/{name}", "--params", "host", env={"SPILLWAY_PROFILE": path})
            t.equal("copies in pieces of 4.10 kB up and 12.3 kB down" in run.stderr, cut, name, run)
            t.check(outcome(f"{tmp}/{name}") == outcome(f"{tmp}/want"), name, run)


@t.test
def frozen_tensors_evaluation_and_resume():
    with t.folder() as tmp:
        more = ["--freeze", "model.layers.[01].*,*norm.weight,model.embed_tokens.*,*up_proj*",
                "--optimizer", "nvme",
                "--schedule", "constant", "--warmup", 0]
        train(f"{tmp}/want", *more, steps=4)
        train(f"{tmp}/out", *more, "--keep-store", steps=2)
        run = train(f"{tmp}/out", *more, "--resume", steps=4)
        t.contains(run.stdout, "going on after step 2", "resume", run)
        t.check(outcome(f"{tmp}/out")[1:] == outcome(f"{tmp}/want")[1:], "after a resume", run)
        t.write_tokens(f"{tmp}/val", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:80])
        evals = []
        for device in ("host", "cuda"):
            out = f"{tmp}/eval-{device}"
            train(out, "--val", f"{tmp}/val", "--dtype", "fp32", device=device, steps=1)
            evals.append([o["val_loss"] for o in t.read_log(out + ".jsonl")[1]
                          if o.get("event") == "eval"][-1])
        t.close(evals[1], evals[0], 1e-4, "loss of an evaluation")


@t.test
def documents_are_kept_apart():
    """In FP32 the host device's losses up to the order of sums; the same bits in every placement,
    also where the layers are the last to read where documents begin."""
    with t.folder() as tmp:
        with open(f"{tmp}/documents", "wb") as file:
            file.write(struct.pack("<60Q", *(i * i for i in range(60))))
        more = ["--documents", f"{tmp}/documents", "--dtype", "fp32", "--order", "sequential"]
        host = losses_of(f"{tmp}/host", *more, device="host", steps=4)
        for a, b in zip(host, losses_of(f"{tmp}/cuda", *more, device="cuda", steps=4)):
            t.close(b, a, 1e-4, "loss")
        frozen = ["--freeze", "model.embed_tokens.*,model.layers.0.*"]
        for common in (["--accumulate", 2], [*frozen, "--clip", 0]):
            want = None
            for i, other in enumerate(([], ["--params", "host", "--activations", "host"])):
                out = f"{tmp}/{common[0]}{i}"
                run = train(out, *more[:2], *common, *other)
                want = want or outcome(out)
                t.check(outcome(out) == want, f"{common} {other}", run)


@t.test
def several_gpus_are_several_ranks():
    """Two ranks add two gradients, as one does over two micro-batches: the order says nothing."""
    with t.folder() as tmp:
        env = {"STANDIN_DEVICES": "4"}
        train(f"{tmp}/one", "--ranks", 1, "--accumulate", 2, env=env)
        one, want = outcome(f"{tmp}/one"), None
        for i, more in enumerate(([], ["--zero", 1, "--overlap", "none"],
                                  ["--params", "nvme", "--optimizer", "nvme", "--gradients",
                                   "nvme"])):
            run = train(f"{tmp}/{i}", "--ranks", 2, *more, env=env)
            want = want or outcome(f"{tmp}/{i}")
            t.check(outcome(f"{tmp}/{i}") == want, f"2 ranks, {more}", run)
        t.check(want[1:] == one[1:], "two ranks and one", run)
        want = None
        for i, more in enumerate(([], ["--zero", 2, "--optimizer", "device"], ["--zero", 0])):
            run = train(f"{tmp}/four{i}", "--ranks", 4, *more, env=env, steps=2)
            t.check(re.search(r"^numerics key: .*, NCCL \d+\.\d+\.\d+$", run.stdout, re.M),
                    "who sums, in the numerics key", run)
            want = want or outcome(f"{tmp}/four{i}")
            t.check(outcome(f"{tmp}/four{i}") == want, f"4 ranks, {more}", run)
        host = train(f"{tmp}/host", "--ranks", 4, device="host", steps=2)
        for (a, _), (b, _) in zip(outcome(f"{tmp}/host")[0], want[0]):
            t.close(b, a, 0.02, "loss of four ranks in BF16", run=host)


@t.test
def gradients_carried_as_bf16_are_summed_as_the_hosts():
    """In the ranks' order, whatever the library's: the numerics key says so. In FP32, the losses of
    host ranks but for the order of sums within a rank."""
    with t.folder() as tmp:
        env = {"STANDIN_DEVICES": "3"}
        more = ["--ranks", 3, "--reduce-dtype", "bf16", "--dtype", "fp32"]
        want = None
        for i, other in enumerate(([], ["--zero", 1, "--overlap", "none"], ["--params", "host"])):
            run = train(f"{tmp}/{i}", *more, *other, env=env)
            t.check(re.search(r"^numerics key: .*, sums in the order of ranks$", run.stdout, re.M),
                    "who sums, in the numerics key", run)
            t.contains(run.stdout, "reduce_dtype=bf16", "numerics key", run)
            want = want or outcome(f"{tmp}/{i}")
            t.check(outcome(f"{tmp}/{i}") == want, f"{other}", run)
        host = train(f"{tmp}/host", *more, device="host")
        for (a, _), (b, _) in zip(outcome(f"{tmp}/host")[0], want[0]):
            t.close(b, a, 1e-4, "loss", run=host)
        exact = train(f"{tmp}/exact", "--ranks", 3, "--dtype", "fp32", env=env)
        t.check(outcome(f"{tmp}/exact")[1] != want[1], "nothing was rounded", exact)


def calls_of(path):
    with open(path, encoding="ascii") as file:
        return [(n, int(d), int(b)) for n, d, b in (line.split() for line in file)]


def first(calls, name, device=None):
    return next(i for i, c in enumerate(calls) if c[0] == name and device in (None, c[1]))


def last(calls, name, device=None):
    return len(calls) - 1 - first(calls[::-1], name, device)


@t.test
def a_run_starts_in_an_order():
    """Each step on all devices before the next. Everything that libraries and groups take is taken
    before the free memory is read; then each device gives one allocation, which is the table's,
    and host memory is registered; from where the devices are settled nothing is called but work,
    or the stand-in stops the run."""
    with t.folder() as tmp:
        path, ranks = f"{tmp}/calls", range(3)
        env = {"STANDIN_DEVICES": "3", "STANDIN_CALLS": path}
        for more in ([], ["--reduce-dtype", "bf16", "--params", "host", "--accumulate", 2,
                          "--val", t.SHAKESPEARE + "/val.bin"]):
            if os.path.exists(path):
                os.remove(path)
            if "--val" in more:
                t.write_tokens(f"{tmp}/val", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:80])
                more = [*more[:-1], f"{tmp}/val"]
            run = train(f"{tmp}/out{len(more)}", "--ranks", 3, *more, env=env)
            calls = calls_of(path)
            calls = calls[:first(calls, "cudaProfilerStop")]
            steps = ["cudaGetDeviceProperties", "cudaDeviceEnablePeerAccess", "cublasLtCreate",
                     "cublasLtMatmulAlgoGetHeuristic", "ncclCommInitRank"]
            for before, after in zip(steps, steps[1:]):
                t.check(last(calls, before) < first(calls, after), f"{before}, {after}", run)
            measured = first(calls[last(calls, "ncclCommInitRank"):], "cudaMemGetInfo")
            measured += last(calls, "ncclCommInitRank")
            # The trial of collectives gives its memory back before it is measured.
            t.check(last(calls[:measured], "cudaFree") > last(calls, "ncclCommInitRank"), "tries",
                    run)
            arenas = [last(calls, "cudaMalloc", r) for r in ranks]
            for r in ranks:
                count = sum(c[0] == "cudaMalloc" and c[1] == r for c in calls[measured:])
                t.equal(count, 1, f"allocations of device {r} behind that", run)
                t.check(last(calls, "cublasLtMatmulAlgoGetHeuristic", r) < measured, "shapes", run)
            t.check(max(arenas) < first(calls, "cudaHostRegister"), "arenas, then host memory", run)
            t.check(max(last(calls, n) for n in ("cudaHostRegister", "cudaEventCreateWithFlags"))
                    < first(calls, "cudaProfilerStart"), "all that before the devices settle", run)
            t.equal(sum(c[0] == "cudaProfilerStart" for c in calls), 3, "settled devices", run)
            t.check(re.search(r"^  device +CUDA context and libraries +\S+ [kMG]?B$", run.stdout,
                              re.M), "the row of what libraries took", run)


@t.test
def what_libraries_take_counts():
    """--device-memory is for all of it."""
    with t.folder() as tmp:
        rows = re.compile(r"^  device +(.*?) +([\d.]+ [kMG]?B)$", re.M)
        run = train(f"{tmp}/a", steps=1)
        table = dict(rows.findall(run.stdout))
        units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
        bytes_of = {k: float(v.split()[0]) * units[v.split()[1]] for k, v in table.items()}
        taken = bytes_of["CUDA context and libraries"]
        t.check(taken >= 32 << 20, "the workspace of products at least", run)
        rest = bytes_of["in all"] - taken
        run = train(f"{tmp}/b", "--device-memory", int(taken), rc=1)
        t.contains(run.stderr, "device memory, and --device-memory allows", "error", run)
        t.contains(run.stderr, "CUDA context and libraries", "the row", run)
        train(f"{tmp}/c", "--device-memory", int(taken + 1.3 * rest), steps=1)
        by_dtype = []
        for dtype in ("fp32", "bf16"):
            run = train(f"{tmp}/{dtype}", "--ranks", 2, "--reduce-dtype", dtype, steps=1,
                        env={"STANDIN_DEVICES": "2"})
            value, unit = dict(rows.findall(run.stdout))["CUDA context and libraries"].split()
            by_dtype.append(float(value) * units[unit])
        t.close(by_dtype[1] - by_dtype[0], 16 << 20, 1e6, "gradients on their way", run=run)
        steps = t.read_log(f"{tmp}/c.jsonl")[0]
        t.close(steps[0]["memory_bytes"]["device"], bytes_of["in all"], 0.02 * bytes_of["in all"],
                "what the log says of the device's memory")


@t.test
def ways_between_gpus_are_tried_before_they_are_used():
    with t.folder() as tmp:
        env = {"STANDIN_DEVICES": "2"}
        train(f"{tmp}/want", "--ranks", 2, env=env)
        run = train(f"{tmp}/out", "--ranks", 2, env={**env, "STANDIN_PEER": "wrong"})
        t.contains(run.stderr, "warning: GPU 0 brings wrong bytes into the memory of GPU 1", "a",
                   run)
        t.check(outcome(f"{tmp}/out") == outcome(f"{tmp}/want"), "through the host", run)
        for name, value, says in (
                ("STANDIN_PEER", "lost", "on the way through the host's memory, too"),
                ("STANDIN_PEER", "stuck", "within a second, on the way through the host's memory"),
                ("STANDIN_NCCL", "wrong", "the first all-gather of the GPUs brings wrong values"),
                ("STANDIN_NCCL", "hang", "the first all-gather of the GPUs has not ended")):
            run = train(f"{tmp}/{name}{value}", "--ranks", 2, env={**env, name: value}, rc=1)
            t.contains(run.stderr, says, f"{name}={value}", run)
            t.equal(run.stderr.count("error: "), 1, "told once", run)
            t.check(run.seconds < 30, f"{run.seconds:.1f} s", run)
            t.check(not os.path.exists(f"{tmp}/{name}{value}"), "something was made", run)


@t.test
def a_direct_copy_that_never_ends_is_one_through_the_host_in_the_next_start():
    """In the same process, as far as others see."""
    with t.folder() as tmp:
        env = {"STANDIN_DEVICES": "3"}
        train(f"{tmp}/want", "--ranks", 3, env=env)
        run = train(f"{tmp}/out", "--ranks", 3, env={**env, "STANDIN_PEER": "hang:2>1"})
        t.contains(run.stderr, "warning: GPU 2: a copy of its memory to GPU 1 has not ended", "a",
                   run)
        t.equal(run.stderr.count("starting again, with NCCL_P2P_DISABLE=1"), 1, "starts", run)
        t.equal(run.stdout.count("numerics key: "), 1, "runs", run)
        t.check(outcome(f"{tmp}/out") == outcome(f"{tmp}/want"), "through the host", run)
        run = train(f"{tmp}/again", "--ranks", 3, env={**env, "STANDIN_PEER": "hang:2>1",
                                                       "NCCL_P2P_DISABLE": "1"})
        t.check("starting again" not in run.stderr, "not where it is known", run)


@t.test
def an_error_of_the_library_between_gpus_ends_the_run():
    with t.folder() as tmp:
        run = train(f"{tmp}/out", "--ranks", 2, env={"STANDIN_DEVICES": "2",
                                                     "STANDIN_NCCL_FAIL": "7"}, rc=1)
        t.contains(run.stderr, "NCCL, a call that was queued", "error", run)
        t.check(run.seconds < 30, f"{run.seconds:.1f} s", run)


@t.test
def a_call_that_fails_ends_the_run():
    with t.folder() as tmp:
        for i, call in enumerate(("cudaMalloc:1", "cudaHostRegister:1", "cudaMemcpyAsync:60",
                                  "cudaStreamWaitEvent:20", "cudaEventSynchronize:20", "launch:200",
                                  "cublasLtMatmul:50")):
            run = train(f"{tmp}/{i}", env={"STANDIN_FAIL": call}, rc=1)
            t.contains(run.stderr, "CUDA device 0: ", call, run)
            t.check(not os.path.exists(f"{tmp}/{i}/config.json"), f"{call}: a model", run)


@t.test
def a_plugin_that_is_not_there_or_of_another_version():
    with t.folder() as tmp:
        run = train(f"{tmp}/a", env={"SPILLWAY_CUDA_PLUGIN": tmp + "/none.so"}, rc=1)
        t.contains(run.stderr, "CUDA needs a plugin that cannot be loaded", "error", run)
        mpi = os.path.join(os.path.dirname(t.SPILLWAY), "libspillway_mpi.so")
        if os.path.exists(mpi):
            run = train(f"{tmp}/b", env={"SPILLWAY_CUDA_PLUGIN": mpi}, rc=1)
            t.contains(run.stderr, "none of this version", "error", run)
        run = train(f"{tmp}/c", env={"SPILLWAY_CUDA_PLUGIN": tmp + "/none.so"}, device="auto",
                    steps=1)
        t.contains(run.stdout, "operators=host", "auto goes on with the host", run)
        t.contains(run.stderr, "cannot be loaded", "and says why", run)
        run = train(f"{tmp}/d", device="auto", steps=1)
        t.contains(run.stdout, "operators=cuda", "auto takes what is there", run)
        run = train(f"{tmp}/f", device="auto", steps=1, env={"STANDIN_DEVICES": "2"})
        t.check(re.search(r"^  ranks +2$", run.stdout, re.M), "a rank for each GPU", run)
        run = train(f"{tmp}/g", device="host", steps=1, env={"STANDIN_DEVICES": "2"})
        t.check(re.search(r"^  ranks +1$", run.stdout, re.M), "the host is one", run)
        run = train(f"{tmp}/e", "--ranks", 2, rc=1)
        t.contains(run.stderr, "--ranks 2: there is 1 GPU, one for each rank", "error", run)
        t.check(not os.path.exists(f"{tmp}/e"), "something was made", run)


@t.test
def the_doctor_names_the_device():
    for plugin, state, part in ((PLUGIN, "ok", "CUDA device"), ("/none.so", "info", "host")):
        run = t.spillway("doctor", "--json", env={"SPILLWAY_CUDA_PLUGIN": plugin})
        check = [c for c in json.loads(run.stdout)["checks"] if c["name"] == "device"][0]
        t.equal(check["state"], state, "state", run)
        t.contains(check["found"], part, "found", run)


if __name__ == "__main__":
    t.main()
