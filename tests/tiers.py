"""Every state in any tier: no placement changes a bit, each moves exactly the bytes of the
arithmetic, and what lies on NVMe for a run's length is checked, found again or made anew.

time limit: 240 s
"""
import json
import os
import re
import signal
import struct

import support as t

STOP = {} if t.SANITIZED else {"SPILLWAY_ALLOC_GUARD": "stop"}
STEPS, SEQ_LEN, MICRO_BATCH = 5, 24, 2
CHUNK = 50000
BASE = ["--seq-len", SEQ_LEN, "--micro-batch", MICRO_BATCH, "--lr", "1e-3", "--digest"]
SHAPE = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
         "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 512,
         "tie_word_embeddings": True}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
          "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "initializer_range": 0.02, "torch_dtype": "bfloat16"}


def tiers(**states):
    """--params, --optimizer, --gradients, --activations."""
    return [word for name, tier in states.items() for word in ("--" + name, tier)]


ALL_NVME = tiers(params="nvme", optimizer="nvme", gradients="nvme", activations="nvme")
MIXED = tiers(params="host:30%,nvme", optimizer="host:40%,nvme",
              gradients="device:30%,host:20%,nvme", activations="device:20%,host:40%,nvme")


def made(tmp, name="model", dtype="bf16", **shape):
    return t.make_model(f"{tmp}/{name}", {**CONFIG, **SHAPE, **shape}, "--seed", 1, "--dtype",
                        dtype)


def arguments(*more, steps=STEPS):
    chunk = [] if "--chunk" in more else ["--chunk", CHUNK]
    return [*BASE, *chunk, "--steps", steps, *more]


def run(out, *more, steps=STEPS, rc=0, env=None, **options):
    """A finished run with its log at OUT.jsonl; no step of it may allocate."""
    return t.train(out, *arguments(*more, steps=steps), "--log", out + ".jsonl", rc=rc,
                   env={**STOP, **(env or {})}, **options)


def long_run(out, *more):
    """A run that is stopped from outside, once it has trained a step."""
    process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                         "--out", out, *arguments(*more, steps=100000)])
    process.wait_for(r"^step \d")
    return process


def end_of(out):
    """What must not depend on tiers: losses, digest, the weights written."""
    steps, others = t.read_log(out + ".jsonl")
    digest = [o for o in others if o.get("event") == "digest"]
    t.equal(len(digest), 1, f"digests of {out}")
    return ([(s["loss"], s["grad_norm"], s["clip_factor"]) for s in steps], digest,
            {n: w.data for n, w in t.read_model(out)[1].items()})


def check_same(tmp, variants, *common, **options):
    """The first variant is what the others are compared with."""
    want = None
    for number, variant in enumerate(variants):
        out = f"{tmp}/{number}"
        finished = run(out, *common, *variant, **options)
        got = end_of(out)
        want = want or got
        for part, a, b in zip(("losses", "state", "weights"), got, want):
            t.check(a == b, f"{part} of {' '.join(map(str, variant))}", finished)
        left = [n for n in os.listdir(out) if n.endswith((".state", ".commit"))]
        t.equal(left, [], "left behind", finished)
    return want


def some_of(variants):
    """Under a sanitizer each takes long, and the release run compares them all."""
    return variants[:1] + variants[-1:0:-3] if t.SANITIZED else variants


def overlapped(variants, *modes):
    return [["--overlap", mode, *v] for v in variants for mode in modes]


SINGLE = [tiers(optimizer="device:30%,host:30%,nvme"), tiers(params="host"), tiers(params="nvme"),
          tiers(gradients="device"), tiers(gradients="nvme"), tiers(activations="host"),
          tiers(activations="nvme"), ["--checkpoint-every", 2]]
SEVERAL = [ALL_NVME, MIXED, [*ALL_NVME, "--checkpoint-every", 2],
           [*MIXED, "--checkpoint-every", 3]]


@t.test
def every_state_in_every_tier_gives_the_same_bits():
    with t.folder() as tmp:
        check_same(tmp, some_of([[]] + overlapped(SINGLE + SEVERAL, "forward")
                                + overlapped(SEVERAL[::3], "none")), "--accumulate", 2)


@t.test
def without_clipping_units_are_updated_as_gradients_arrive():
    with t.folder() as tmp:
        late = [["--late-below", below, "--late-top", top, *MIXED]
                for below, top in ((0, 0), (60, 0), (20, 30), (0, 100))]
        check_same(tmp, some_of([[]] + overlapped(SINGLE[2:4] + SEVERAL, "backward") + late),
                   "--accumulate", 2, "--clip", 0)


@t.test
def chunks_and_formats():
    """Chunks of one block of the norm, of less and of more than a unit; FP32; two thirds of a
    master; 8-bit moments, whose bits are their own."""
    with t.folder() as tmp:
        small = [*MIXED, "--chunk", 12288]
        check_same(tmp, [[], small, [*ALL_NVME, "--chunk", "8M"], [*ALL_NVME, "--chunk", 200000],
                         [*MIXED, "--master", "split"]])
    for more in (["--dtype", "fp32"], ["--moments", "8bit"], ["--grad-dtype", "fp32"]):
        with t.folder() as tmp:
            check_same(tmp, [[], [*MIXED, "--checkpoint-every", 2]], *more)


@t.test
def a_vocabulary_of_several_parts():
    """Of a head of its own, and tied: then its matrix is streamed for both uses."""
    for tied in (True, False):
        with t.folder() as tmp:
            model = made(tmp, vocab_size=2001, num_hidden_layers=3, tie_word_embeddings=tied)
            units = json.loads(t.spillway("inspect", model, "--json", rc=0).stdout)["units"]
            t.equal(len(units), 3 * (1 if tied else 2) + 3 + 1, "units")
            few = [[], *SEVERAL[:2], [*ALL_NVME, "--device-memory", least_memory(tmp, model)]]
            check_same(tmp, overlapped(few, "forward"), "--accumulate", 2, model=model)
            check_same(tmp, overlapped(few[::2], "backward"), "--clip", 0, "--restart", model=model)


def least_memory(tmp, model=t.MODEL):
    """Bytes of the device that the leanest run needs, by its own refusal."""
    refused = run(f"{tmp}/lean", *ALL_NVME, "--accumulate", 2, "--device-memory", 1, "--dry-run",
                  rc=1, model=model)
    number, unit = re.search(r"needs ([\d.]+) (kB|MB) of device", refused.stderr).groups()
    return int(float(number) * {"kB": 1000, "MB": 1000000}[unit] * 1.005)


def table(finished):
    """{(tier, what): bytes} of the printed table."""
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return {(tier, what): float(number) * scale[unit] for tier, what, number, unit in
            re.findall(r"^  (device|host|nvme) +(.*?) {2,}([\d.]+) (\w+)$", finished.stdout, re.M)}


@t.test
def windows_of_three_two_and_one_unit():
    with t.folder() as tmp:
        least = least_memory(tmp)
        most = table(run(f"{tmp}/most", *ALL_NVME, "--accumulate", 2, "--dry-run"))
        whole = int(most["device", "in all"])
        budgets = [whole * 2, whole - 50000, least]
        variants = [[*ALL_NVME, "--device-memory", b] for b in budgets]
        check_same(tmp, [[], *variants], "--accumulate", 2)
        windows = []
        for number, budget in enumerate(budgets):
            shown = table(run(f"{tmp}/dry", *variants[number], "--accumulate", 2, "--dry-run"))
            t.check(shown["device", "in all"] <= budget * 1.005, f"{shown} within {budget}")
            windows.append(round(3 * shown["device", "weight window"] /
                                 most["device", "weight window"]))
        t.equal(windows, [3, 2, 1], "units in the window")


# ---- bytes -------------------------------------------------------------------------------------

def up(count, step):
    return (count + step - 1) // step * step


def deal(shares, count):
    """The tiers of `count` things: each goes to the one that is furthest behind its share."""
    dealt, order = {}, []
    for n in range(1, count + 1):
        tier = max(shares, key=lambda s: n * shares[s] - 100 * dealt.get(s, 0))
        dealt[tier] = dealt.get(tier, 0) + 1
        order.append(tier)
    return order


def shares(text):
    """{tier: percent} from the uppermost down, as --help says it."""
    parts, left = {}, 100
    for part in text.split(","):
        tier, _, percent = part.partition(":")
        parts[tier] = int(percent.rstrip("%")) if percent else left
        left -= parts[tier]
    return parts


class Arithmetic:
    """Bytes of a step by lane, from the units and the tiers alone; BF16, one part of a tied
    vocabulary, `--optimizer` without a share of the device."""

    def __init__(self, states, micros, every=1, overlap="forward"):
        self.micros, self.every, self.overlap = micros, every, overlap
        self.layers = SHAPE["num_hidden_layers"]
        hidden, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
        queries = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
        keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
        layer = sum(up(n, 128) for n in (hidden, hidden * queries, 2 * hidden * keys,
                                         hidden * queries, hidden, 3 * hidden * inner))
        embedding = up(SHAPE["vocab_size"] * hidden, 128)
        self.units = [embedding] + [layer] * self.layers + [up(hidden, 128)]
        self.states = {name: shares(tier) for name, tier in states.items()}
        self.input_bytes = SEQ_LEN * MICRO_BATCH * hidden * 2
        step = 256
        while step * 2 * 12 <= CHUNK:
            step *= 2
        self.chunks = [[min(step, n - first) for first in range(0, n, step)] for n in self.units]

    def on_nvme(self):
        """Bytes of all weights and of all records there."""
        return [sum(up(size * count, 4096) for chunks in self.chunks for count in chunks)
                for size in (2, 12)]

    def groups(self):
        return -(-self.layers // self.every)

    def loads(self, unit):
        """How often a unit's weights cross to the device: forward and backward, however many
        micro-batches. The tied embedding also for the head, whose forward and backward share the
        window. A layer that is recomputed inside its group once more: all but the last of a group,
        but for the last group, which forward has just left."""
        if unit == 0:
            return 3
        if unit > self.layers:
            return 2
        group, place = (unit - 1) // self.every, (unit - 1) % self.every
        again = group + 1 < self.groups() and place + 1 < self.every
        return 3 if again else 2

    def tiers_of(self, state, unit):
        return deal(self.states[state], len(self.chunks[unit]))

    def step(self, number):
        sums = dict.fromkeys(("h2d", "d2h", "comm", "nvme_read", "nvme_write"), 0)
        for unit, chunks in enumerate(self.chunks):
            of = zip(chunks, self.tiers_of("params", unit), self.tiers_of("optimizer", unit),
                     self.tiers_of("gradients", unit))
            for count, weight, record, grad in of:
                self.add_weight(sums, 2 * count, weight, self.loads(unit), number)
                sums["d2h"] += 2 * count
                if grad == "nvme":
                    sums["nvme_read"] += up(2 * count, 4096)
                    sums["nvme_write"] += up(2 * count, 4096)
                if record == "nvme":  # one never updated is not read
                    sums["nvme_read"] += up(12 * count, 4096) * (number > 1)
                    sums["nvme_write"] += up(12 * count, 4096)
        self.add_inputs(sums)
        return sums

    def add_weight(self, sums, size, tier, loads, number):
        if tier == "device":
            sums["h2d"] += size  # the update's
            return
        sums["h2d"] += size * loads
        if tier == "nvme":
            # From the second step on forward finds them where Adam has just left them.
            late = self.overlap == "forward" and number > 1
            sums["nvme_read"] += up(size, 4096) * (loads - late)
            sums["nvme_write"] += up(size, 4096)

    def add_inputs(self, sums):
        for tier in deal(self.states["activations"], self.groups() * self.micros):
            if tier == "device":
                continue
            sums["d2h"] += self.input_bytes
            sums["h2d"] += self.input_bytes
            if tier == "nvme":
                sums["nvme_read"] += up(self.input_bytes, 4096)
                sums["nvme_write"] += up(self.input_bytes, 4096)


NVME_STATES = dict(params="nvme", optimizer="nvme", gradients="nvme", activations="nvme")
MIXED_STATES = dict(params="host:30%,nvme", optimizer="host:40%,nvme",
                    gradients="device:30%,host:20%,nvme", activations="device:20%,host:40%,nvme")
HOST_STATES = dict(params="host", optimizer="host", gradients="host", activations="host")
TOP_STATES = dict(params="device", optimizer="host", gradients="device", activations="device")


def check_bytes(tmp, name, states, micros, *more, every=1, overlap="forward"):
    want = Arithmetic(states, micros, every, overlap)
    out = f"{tmp}/{name}"
    finished = run(out, *tiers(**states), "--accumulate", micros, "--checkpoint-every", every,
                   "--overlap", overlap, *more, steps=3)
    for line in t.read_log(out + ".jsonl")[0]:
        t.equal(line["bytes"], want.step(line["step"]), f"{name}: bytes of step {line['step']}",
                finished)


@t.test
def bytes_are_those_of_the_arithmetic():
    with t.folder() as tmp:
        for micros in (1, 2, 8):
            for name, states in (("nvme", NVME_STATES), ("mixed", MIXED_STATES)):
                check_bytes(tmp, f"{name}-{micros}", states, micros)
        check_bytes(tmp, "host", HOST_STATES, 2)
        check_bytes(tmp, "top", TOP_STATES, 2)
        check_bytes(tmp, "serial", NVME_STATES, 2, overlap="none")
        for every in (2, 3, 9):
            check_bytes(tmp, f"every-{every}", MIXED_STATES if every == 3 else NVME_STATES, 2,
                        every=every)


@t.test
def the_trace_has_the_same_bytes():
    with t.folder() as tmp:
        check_bytes(tmp, "traced", MIXED_STATES, 2, "--trace", f"{tmp}/trace.json", every=2)
        want = Arithmetic(MIXED_STATES, 2, 2)
        with open(f"{tmp}/trace.json", encoding="utf-8") as file:
            tasks = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
        for number in (1, 2, 3):
            mine = [e["args"] for e in tasks if e["args"]["step"] == number]
            for lane, size in want.step(number).items():
                t.equal(sum(a["bytes"] for a in mine if a["lane"] == lane), size,
                        f"{lane} of step {number}")


@t.test
def the_kernel_counts_the_same_bytes():
    """Within 2%. The model and the text are cached by a run before."""
    with t.folder() as tmp:
        for name, steps in (("warm", 1), ("out", 20)):
            finished = run(f"{tmp}/{name}", *ALL_NVME, steps=steps)
        if "O_DIRECT" not in finished.stdout:
            t.skip("no O_DIRECT on this file system")
        lines = t.read_log(f"{tmp}/out.jsonl")[0]
        weights, records = Arithmetic(NVME_STATES, 1).on_nvme()
        # Saved and put into the digest, with the records; begun with, and the output itself.
        for kind, own in (("read", 2 * weights + records), ("write", 2 * weights)):
            want = sum(s["bytes"]["nvme_" + kind] for s in lines) + own
            t.close(finished.io[kind + "_bytes"], want, 0.02, kind + "_bytes", relative=True,
                    run=finished)


# ---- in between --------------------------------------------------------------------------------

@t.test
def evaluations_and_saves_in_between():
    with t.folder() as tmp:
        val = tmp + "/val.bin"
        t.write_tokens(val, t.read_tokens(t.SHAKESPEARE + "/val.bin")[:500])
        common = ["--accumulate", 2, "--save-every", 2, "--eval-every", 3, "--val", val]
        check_same(tmp, [[], ALL_NVME, [*MIXED, "--checkpoint-every", 2]], *common, steps=6)
        evals = [[o for o in t.read_log(f"{tmp}/{i}.jsonl")[1] if o.get("event") == "eval"]
                 for i in range(3)]
        t.equal([o["step"] for o in evals[0]], [0, 3, 6], "steps evaluated")
        t.equal(evals[1:], evals[:1] * 2, "evaluations")
        for step in ("step-2", "step-4"):
            saved = [t.read_model(f"{tmp}/{i}/{step}")[1] for i in range(3)]
            t.check(saved[1] == saved[0] and saved[2] == saved[0], f"weights of {step}")


@t.test
def a_model_with_one_chunk_on_nvme_is_saved_as_it_is():
    """Of all units the first part of the embedding alone has two chunks."""
    with t.folder() as tmp:
        model = made(tmp, hidden_size=48, intermediate_size=16, num_hidden_layers=2,
                     num_attention_heads=6, num_key_value_heads=1, vocab_size=324)
        common = ["--chunk", 98304, "--save-every", 2]
        want = check_same(tmp, [[], tiers(params="host:50%,nvme")], *common, model=model,
                          data=tokens_below(tmp, 324))
        t.check(len(want[0]) == STEPS, "steps")
        on_nvme = table(run(f"{tmp}/dry", *common, *tiers(params="host:50%,nvme"), "--dry-run",
                            model=model, data=tokens_below(tmp, 324)))["nvme", "weights"]
        t.check(on_nvme < 5000, f"{on_nvme} bytes of weights on NVMe")
        for step in ("step-2", "step-4"):
            t.check(t.read_model(f"{tmp}/0/{step}")[1] == t.read_model(f"{tmp}/1/{step}")[1],
                    f"weights of {step}")


def tokens_below(tmp, vocab):
    path = tmp + "/below.bin"
    t.write_tokens(path, [v % vocab for v in t.read_tokens(t.SHAKESPEARE + "/train.bin")[:5000]])
    return path


@t.test
def skipped_steps_leave_everything_as_it_was():
    """Rows that do not count make steps 2 and 4 nothing, while the others train."""
    with t.folder() as tmp:
        rows = MICRO_BATCH * SEQ_LEN
        data, mask = tmp + "/data.bin", tmp + "/mask.bin"
        t.write_tokens(data, t.read_tokens(t.SHAKESPEARE + "/train.bin")[:STEPS * rows + 1])
        with open(mask, "wb") as file:
            file.write(b"\1" + b"".join(bytes([step % 2 == 0]) * rows for step in range(STEPS)))
        common = ["--mask", mask, "--order", "sequential"]
        some = [ALL_NVME, MIXED, tiers(params="nvme"), tiers(params="host", optimizer="nvme")]
        check_same(tmp, [[]] + overlapped(some, "forward") + overlapped(some[1:2], "none"),
                   *common, data=data)
        steps = t.read_log(f"{tmp}/1.jsonl")[0]
        t.equal([len(s["events"]) for s in steps], [0, 1, 0, 1, 0], "steps that were skipped")
        whole = Arithmetic(NVME_STATES, 1)
        for number in (2, 4):
            t.equal(steps[number - 1]["bytes"]["nvme_write"],
                    whole.step(number)["nvme_write"] - sum(whole.on_nvme()),
                    f"bytes written in step {number}, which was skipped")
        check_same(tmp, [[]] + overlapped(some[:2], "backward"), *common, "--clip", 0, "--restart",
                   data=data)


@t.test
def a_loss_that_is_not_a_number_changes_no_weight():
    with t.folder() as tmp:
        model = made(tmp, dtype="fp32", tie_word_embeddings=False)
        path = model + "/model.safetensors"
        tensors = t.read_safetensors(path)
        head = tensors["lm_head.weight"]
        head.data = struct.pack("<f", float("nan")) + head.data[4:]
        t.write_safetensors(path, tensors)
        for number, variant in enumerate(overlapped([ALL_NVME, MIXED], "none", "forward")):
            out = f"{tmp}/{number}"
            run(out, *variant, "--dtype", "fp32", model=model, steps=3)
            t.equal([s["loss"] for s in t.read_log(out + ".jsonl")[0]], [None] * 3, "losses")
            t.check(t.read_model(out)[1] == tensors, f"{variant}: a skipped step changed weights")


# ---- kills, damage, other runs -----------------------------------------------------------------

SCRATCH = ["gradients.0.state", "inputs.0.state", "weights.0.state"]


def states(folder):
    return sorted(n for n in os.listdir(folder) if n.endswith((".state", ".commit")))


def killed(out, *more):
    """A run that was killed before its fourth commit."""
    run(out, *ALL_NVME, "--checkpoint-every", 2, *more, rc=-signal.SIGKILL,
        env=t.kill_at("pwrite:.commit:4:before"))


@t.test
def a_killed_run_goes_on_or_begins_again_with_the_same_bits():
    with t.folder() as tmp:
        want = check_same(tmp, [[]])
        for number, more in enumerate((["--resume", *MIXED], ["--restart", *MIXED],
                                       ["--restart"])):
            out = f"{tmp}/killed-{number}"
            killed(out)
            t.equal(states(out), sorted(SCRATCH + ["optimizer.0.state", "optimizer.commit"]),
                    "what a killed run leaves")
            shown = t.spillway("inspect", out, rc=0).stdout
            t.contains(shown, f"step 3 of {STEPS}", "inspect")
            refused = run(out, *ALL_NVME, rc=1)
            for part in ("step 3", "--resume", "--restart"):
                t.contains(refused.stderr, part, "a new run's refusal")
            os.remove(out + ".jsonl")
            finished = run(out, *more)
            t.equal("going on after step 3" in finished.stdout, number == 0, "resumed", finished)
            t.equal(states(out), [], "left behind", finished)
            got = end_of(out)
            t.equal(got[1:], want[1:], f"state and weights after {more}", finished)


@t.test
def scratch_of_a_killed_run_is_in_nobodys_way():
    """Without a commit there is nothing to go on from: a new run may take the folder."""
    with t.folder() as tmp:
        want, store = check_same(tmp, [[]]), tmp + "/store"
        os.mkdir(store)
        scratch = tiers(params="nvme", optimizer="host", gradients="nvme", activations="nvme")
        for number, more in enumerate(([], ["--resume"], ["--restart"])):
            process = long_run(f"{tmp}/dead-{number}", *scratch, "--nvme", store)
            process.signal(signal.SIGKILL)
            process.finish()
            t.equal(states(store), SCRATCH, "what a killed run leaves")
            out = f"{tmp}/next-{number}"
            finished = run(out, *scratch, "--nvme", store, *more)
            t.equal(end_of(out), want, f"the next run {more}", finished)
            t.equal(states(store), [], "left behind", finished)


@t.test
def two_runs_in_one_folder_are_refused():
    with t.folder() as tmp:
        store = tmp + "/store"
        os.mkdir(store)
        for state in ("params", "gradients", "activations"):
            first = long_run(f"{tmp}/first-{state}", "--" + state, "nvme", "--nvme", store)
            second = run(f"{tmp}/second-{state}", "--" + state, "nvme", "--nvme", store, rc=1)
            first.signal(signal.SIGINT)
            t.equal(first.finish().rc, 130, "exit status of the first")
            t.contains(second.stderr, "in use", f"the reason, {state}")
            t.check(not os.path.exists(f"{tmp}/second-{state}"), "an output folder", second)
            t.equal(states(store), [], f"left behind, {state}")


@t.test
def wrong_bytes_of_scratch_are_named_and_never_trained_on():
    """Of each kind of file a record read wrong, and one that never reached the drive."""
    with t.folder() as tmp:
        for state, file in (("params", "weights"), ("gradients", "gradients"),
                            ("activations", "inputs")):
            for fault in ("flip_read:50", "lost:50", "flip_write:50"):
                out = f"{tmp}/{file}-{fault[:6]}"
                failed = run(out, *tiers(**{state: "nvme"}), rc=1, steps=20,
                             env={**t.preload("faulty_device"), "FAULT": fault})
                kind = fault.partition(":")[0]
                (at,) = re.findall(rf"^faulty device: {kind}, \d+ bytes at (\d+)$", failed.stderr,
                                   re.M)
                told = re.search(rf"error: step (\d+): {file} in {re.escape(out)}/{file}\.0\.state "
                                 rf"at byte {at} are not what was written: CRC-32C", failed.stderr)
                t.check(told, f"{file}, {fault}: the message", failed)
                done = [s["step"] for s in t.read_log(out + ".jsonl")[0]]
                t.check(not done or done[-1] < int(told[1]), "its step was reported", failed)
                t.check("saved" not in failed.stdout, "it trained on", failed)
                t.check(not os.path.exists(out), "something was left in the output folder", failed)


@t.test
def a_transfer_of_scratch_that_fails_is_named():
    with t.folder() as tmp:
        for state, what in (("params", "weights"), ("gradients", "gradient"),
                            ("activations", "kept input")):
            # Weights are written once before the first step.
            writes = 100 if state == "params" else 50
            for fault, verb in (("eio_read:50", "read"), (f"eio_write:{writes}", "written")):
                failed = run(f"{tmp}/{state}-{verb}", *tiers(**{state: "nvme"}), rc=1, steps=20,
                             env={**t.preload("faulty_device"), "FAULT": fault})
                t.check(re.search(rf"step \d+: the {what} of .+ could not be {verb}: Input/output",
                                  failed.stderr), f"{state}, {fault}: the message", failed)


if __name__ == "__main__":
    t.main()
