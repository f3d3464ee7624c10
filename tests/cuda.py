"""Whole runs on a CUDA device: on the CPU stand-in, where streams run late and threads in any
order. The same training as on the host device, the same bits for every placement and overlap mode.

time limit: 240 s
"""
import json
import os
import re
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
        run = train(f"{tmp}/e", "--ranks", 2, "--reduce-dtype", "bf16", rc=1,
                    env={"STANDIN_DEVICES": "2"})
        t.contains(run.stderr, "GPUs carry gradients as FP32", "error", run)
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
