"""Equal numerics key, equal bits: tiers, overlap modes, Adam threads and chunk sizes change no bit.

Every variant must give the losses, masters, momenta, variances and written weights of the plainest
run (state on the device, no overlap). In the same runs the counters prove that the paths differ:
what a tier does not use moves no byte, what it uses moves exactly the bytes of the arithmetic, and
the kernel's own counters agree with the NVMe ones.
"""
import json
import os
import re

import support as t

STEPS = 5
SMALL_CHUNK, LARGE_CHUNK = 50000, 8000000
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 172, 5, 8, 4, 8, 512


def up(count, step):
    return (count + step - 1) // step * step


def unit_elements():
    """Elements of each unit with every tensor on a border of 128, as docs/architecture.md says."""
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = [HIDDEN, HIDDEN * queries, HIDDEN * keys, HIDDEN * keys, queries * HIDDEN, HIDDEN,
             INNER * HIDDEN, INNER * HIDDEN, HIDDEN * INNER]
    return [up(VOCAB * HIDDEN, 128)] + [sum(up(n, 128) for n in layer)] * LAYERS + [up(HIDDEN, 128)]


def record_bytes(chunk_bytes, moments="fp32"):
    """Bytes of all records: 12 per element; with 8-bit moments 6 and two scales per 256. Each is
    rounded up to a page."""
    def record(elements):
        return 12 * elements if moments == "fp32" else 6 * elements + 8 * (up(elements, 256) // 256)

    step, total = chunk_bytes // record(256) * 256, 0
    for elements in unit_elements():
        while elements > 0:
            total += up(record(min(step, elements)), 4096)
            elements -= step
    return total


class Result:
    def __init__(self, tmp, number, dtype, clip, optimizer, overlap, threads=2, chunk=LARGE_CHUNK,
                 master="fp32", moments="fp32"):
        out, log = f"{tmp}/out-{number}", f"{tmp}/{number}.jsonl"
        self.name = f"{dtype} clip {clip} {optimizer} {overlap} threads {threads} chunk {chunk} " \
                    f"{master} {moments}"
        self.run = t.train(out, "--dtype", dtype, "--clip", clip, "--optimizer", optimizer,
                           "--overlap", overlap, "--threads", threads, "--chunk", chunk,
                           "--master", master, "--moments", moments,
                           "--steps", STEPS, "--seq-len", 24, "--micro-batch", 2, "--accumulate", 2,
                           "--lr", "1e-3", "--digest", "--log", log)
        t.equal(self.run.rc, 0, self.name, self.run)
        self.steps, others = t.read_log(log)
        self.digest = [{k: v for k, v in line.items() if k != "event"}
                       for line in others if line.get("event") == "digest"]
        t.equal(len(self.digest), 1, f"{self.name}: digests")
        self.weights = t.read_model(out)[1]
        self.losses = [(s["step"], s["loss"], s["grad_norm"], s["clip_factor"]) for s in self.steps]
        self.tier, self.chunk, self.dtype, self.moments = optimizer, chunk, dtype, moments

    def check_same(self, other):
        t.equal(self.losses, other.losses, f"losses of {self.name}")
        t.equal(self.digest, other.digest, f"state of {self.name}")
        t.check(self.weights == other.weights, f"weights of {self.name} differ")

    def check_bytes(self):
        element = 2 if self.dtype == "bf16" else 4
        down = up_ = sum(unit_elements()) * element
        records = record_bytes(self.chunk, self.moments)
        for s in self.steps:
            got = s["bytes"]
            host = self.tier != "device"
            nvme = self.tier == "nvme"
            want = {"h2d": up_ * host, "d2h": down * host, "comm": 0,
                    # A virgin chunk is not read: its master is the model's weight.
                    "nvme_read": records * (nvme and s["step"] > 1), "nvme_write": records * nvme}
            t.equal(got, want, f"bytes of step {s['step']}, {self.name}")


def check_group(dtype, clip, variants, moments="fp32"):
    with t.folder() as tmp:
        plain = Result(tmp, 0, dtype, clip, "device", "none", threads=1, moments=moments)
        t.equal(len(plain.steps), STEPS, "steps in the log")
        t.check(plain.steps[-1]["loss"] != plain.steps[0]["loss"], "nothing was learnt")
        plain.check_bytes()
        for number, variant in enumerate(variants):
            result = Result(tmp, number + 1, dtype, clip, moments=moments, **variant)
            result.check_same(plain)
            result.check_bytes()


WITH_CLIP = [
    dict(optimizer="device", overlap="forward"),
    dict(optimizer="host", overlap="none", chunk=SMALL_CHUNK),
    dict(optimizer="host", overlap="forward", threads=1),
    dict(optimizer="nvme", overlap="none"),
    dict(optimizer="nvme", overlap="forward", threads=1),
    dict(optimizer="nvme", overlap="forward", chunk=SMALL_CHUNK),
]
WITHOUT_CLIP = [
    dict(optimizer="device", overlap="backward"),
    dict(optimizer="host", overlap="backward", threads=1),
    dict(optimizer="host", overlap="backward", chunk=SMALL_CHUNK),
    dict(optimizer="nvme", overlap="backward"),
    dict(optimizer="nvme", overlap="backward", chunk=SMALL_CHUNK, threads=1),
    dict(optimizer="nvme", overlap="forward", chunk=SMALL_CHUNK),
]


@t.test
def bf16_with_clipping():
    check_group("bf16", 1, WITH_CLIP)


@t.test
def bf16_without_clipping():
    check_group("bf16", 0, WITHOUT_CLIP)


@t.test
def fp32_with_clipping():
    check_group("fp32", 1, WITH_CLIP)


@t.test
def fp32_without_clipping():
    check_group("fp32", 0, WITHOUT_CLIP)


SPLIT = [
    dict(optimizer="device", overlap="forward", master="split"),
    dict(optimizer="host", overlap="forward", master="split", chunk=SMALL_CHUNK),
    dict(optimizer="nvme", overlap="forward", master="split", threads=1),
    dict(optimizer="nvme", overlap="forward", master="split", chunk=SMALL_CHUNK),
]


@t.test
def bf16_split_master():
    check_group("bf16", 1, SPLIT)


@t.test
def fp32_split_master():
    check_group("fp32", 1, SPLIT)


@t.test
def eight_bit_moments():
    """Lossy against FP32 moments, and still the same bits on every path."""
    check_group("bf16", 1, WITH_CLIP + SPLIT, moments="8bit")
    check_group("bf16", 0, WITHOUT_CLIP, moments="8bit")


@t.test
def saving_and_evaluating_in_between_changes_no_bit():
    """A stretch of steps ends with a drain; where stretches end must not matter."""
    with t.folder() as tmp:
        outs = []
        val = tmp + "/val.bin"
        t.write_tokens(val, t.read_tokens(t.SHAKESPEARE + "/val.bin")[:2000])
        for name, more in (("plain", []), ("cut", ["--save-every", 2, "--eval-every", 3,
                                                   "--val", val])):
            log = f"{tmp}/{name}.jsonl"
            run = t.train(f"{tmp}/{name}", "--optimizer", "nvme", "--steps", 7, "--seq-len", 64,
                          "--lr", "1e-3", "--digest", "--log", log, *more)
            t.equal(run.rc, 0, name, run)
            steps, others = t.read_log(log)
            outs.append(([s["loss"] for s in steps], [o for o in others if o["event"] == "digest"],
                         t.read_model(f"{tmp}/{name}")[1]))
        t.check(outs[0] == outs[1], "the runs differ")
        t.equal(sorted(others_steps(f"{tmp}/cut.jsonl", "saved")), [2, 4, 6, 7], "saves")
        t.equal(others_steps(f"{tmp}/cut.jsonl", "eval"), [0, 3, 6, 7], "evaluations")


def others_steps(log, event):
    return [o["step"] for o in t.read_log(log)[1] if o["event"] == event]


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
          "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "initializer_range": 0.02, "tie_word_embeddings": True,
          "torch_dtype": "bfloat16"}


def on_every_tier(tmp, model, *more, steps=2, chunk=12289):
    """Runs that must end with the same state and weights; the lines of the NVMe run."""
    ends, text = set(), ""
    for tier in ("device", "host", "nvme"):
        out = f"{tmp}/{tier}"
        run = t.train(out, "--optimizer", tier, "--steps", steps, "--seq-len", 16, "--lr", "1e-3",
                      "--chunk", chunk, "--digest", *more, model=model)
        t.equal(run.rc, 0, tier, run)
        digest = re.search("^digest: .*", run.stdout, re.M).group(0)
        ends.add((digest, tuple(sorted((n, w.data) for n, w in t.read_model(out)[1].items()))))
        t.equal(len(ends), 1, f"different ends up to {tier}", run)
        text = run.stdout
    return text


def made(tmp, **shape):
    with open(tmp + "/config.json", "w", encoding="utf-8") as file:
        json.dump({**CONFIG, **shape}, file)
    t.spillway("init", "--config", tmp + "/config.json", "--seed", 1, "--out", tmp + "/model", rc=0)
    return tmp + "/model"


@t.test
def twenty_steps_learn_the_same_on_every_tier():
    with t.folder() as tmp:
        text = on_every_tier(tmp, t.MODEL, "--warmup", 0, steps=20)
        t.contains(text, "store: ", "the mode of the NVMe run's store")
        before, after = t.read_model(t.MODEL)[1], t.read_model(tmp + "/nvme")[1]
        t.equal([n for n in before if before[n].data == after[n].data], [], "tensors not learnt")


@t.test
def one_tensor_fifty_times_the_rest_goes_through_small_slots():
    """Of odd lengths, too: 8211 x 16 and 37 x 16 elements, in chunks of 1024."""
    with t.folder() as tmp:
        model = made(tmp, hidden_size=16, intermediate_size=37, num_hidden_layers=1,
                     num_attention_heads=2, vocab_size=8211)
        sizes = sorted(len(w.data) for w in t.read_model(model)[1].values())
        t.check(sizes[-1] > 50 * sum(sizes[:-1]), f"the largest of {sizes}")
        text = on_every_tier(tmp, model, steps=4)
        slots = float(re.search(r"^  host     optimizer state slots +([\d.]+) kB", text,
                                re.M).group(1))
        t.check(slots * 1e3 < 12 * sizes[-1] / 2 / 4, f"{slots} kB of slots")


@t.test
def ten_thousand_tensors_share_one_file_of_the_store():
    with t.folder() as tmp:
        model = made(tmp, hidden_size=8, intermediate_size=9, num_hidden_layers=1112,
                     num_attention_heads=1, vocab_size=512)
        t.check(len(t.read_model(model)[1]) >= 10000, "too few tensors")
        on_every_tier(tmp, model, "--keep-store")
        t.equal(sorted(n for n in os.listdir(tmp + "/nvme") if n.startswith("optimizer")),
                ["optimizer.0.state", "optimizer.commit"], "files of the store")


@t.test
def the_kernel_counts_the_same_bytes():
    """read_bytes and write_bytes of /proc/PID/io against nvme_read and nvme_write, within 2%. What
    the run writes besides is its output (dirtied pages count) and the log; the model and the text
    are read once before, so that they are cached, which counts as nothing read."""
    steps = 30
    with t.folder() as tmp:
        log = tmp + "/log.jsonl"
        for attempt in ("warm", "out"):
            run = t.train(f"{tmp}/{attempt}", "--optimizer", "nvme", "--steps", steps,
                          "--seq-len", 16, "--log", log)
            t.equal(run.rc, 0, "exit status", run)
        if "O_DIRECT" not in run.stdout:
            t.skip("no O_DIRECT on this file system")
        lines, _ = t.read_log(log)
        read = sum(s["bytes"]["nvme_read"] for s in lines)
        written = sum(s["bytes"]["nvme_write"] for s in lines)
        t.equal(read, record_bytes(8 * 1024 * 1024) * (steps - 1), "nvme_read of the log")
        t.close(run.io["read_bytes"], read, 0.02, "read_bytes", relative=True, run=run)
        t.close(run.io["write_bytes"], written, 0.02, "write_bytes", relative=True, run=run)


if __name__ == "__main__":
    t.main()
