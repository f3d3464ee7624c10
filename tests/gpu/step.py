"""Stage e of gpu-check: steps of a random model with the layers of Llama 3 8B, its optimizer state
in host memory, as many layers as memory, disk and time allow.

The bound is docs/step-clock.md's for --overlap forward: backward + max(forward, Adam, copies up),
with backward no shorter than the gradients' copies down. Forward and backward are what their tasks
took on the GPU, and Adam what its busiest lane took, all from the trace; copies are bytes over the
rates of stage d. Beside them stands what the operations take at the rate that stage d measured for
a layer's products (else at the card's published peak).
"""
import array
import json
import os
import random
import re
import shutil
import struct
import time

import gpu_support as g
import support as t

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
LAYERS_MAX, SEQ_LEN, STEPS = 32, 4096, 5
if g.TINY:
    HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 224, 4, 1, 16, 512
    LAYERS_MAX, SEQ_LEN = 2, 16
# What is taken of what there is. A disk may itself lie in host memory.
SHARES = {"host memory": 0.7, "device memory": 0.8, "disk": 0.8, "time": 0.8}
BLOCK = 1_000_003            # values; a prime, so that rows of a matrix differ
STATE_BYTES, GRAD_BYTES = 12, 2
TRACE_BYTES_MAX = 8 << 20    # to be kept
PREPARE_BYTES_PER_S = 3e9    # of host state: populated, pinned, filled; a cautious guess
UPDATE_BYTES_PER_S = 20e9    # likewise for a step


def layer_params():
    return HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER + 2 * HIDDEN


def params(layers):
    return layers * layer_params() + 2 * VOCAB * HIDDEN + HIDDEN


def config(layers):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
            "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16"}


def tensors(layers):
    """(name, shape) of every tensor; one dimension: a norm's weight."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(layers):
        queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for name, shape in (("input_layernorm", (HIDDEN,)), ("self_attn.q_proj", (queries, HIDDEN)),
                            ("self_attn.k_proj", (keys, HIDDEN)),
                            ("self_attn.v_proj", (keys, HIDDEN)),
                            ("self_attn.o_proj", (HIDDEN, queries)),
                            ("post_attention_layernorm", (HIDDEN,)),
                            ("mlp.gate_proj", (INNER, HIDDEN)), ("mlp.up_proj", (INNER, HIDDEN)),
                            ("mlp.down_proj", (HIDDEN, INNER))):
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def write_model(path, layers):
    """A model folder at the speed of the disk: matrices repeat one block of N(0, 0.02), which
    `spillway init` would draw value by value, half a minute for a billion of them."""
    os.makedirs(path)
    with open(path + "/config.json", "w", encoding="utf-8") as file:
        json.dump(config(layers), file)
    rng = random.Random(1)
    block = array.array("H", (t.bf16_bits(rng.gauss(0.0, 0.02)) for _ in range(BLOCK))).tobytes()
    header, at = {}, 0
    for name, shape in tensors(layers):
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path + "/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in header.values():
            first, last = entry["data_offsets"]
            source = block if len(entry["shape"]) == 2 else struct.pack("<H", t.bf16_bits(1.0))
            left = last - first
            if len(source) == 2:
                file.write(source * (left // 2))
                continue
            while left > 0:
                left -= file.write(source[:left])
    return at


def disk_rate(folder):
    """Bytes per second that get to the disk, by a file of 256 MiB."""
    size = (1 << 20) if g.TINY else 256 << 20
    start = time.monotonic()
    with open(folder + "/rate", "wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1 << 10) * 1024)
        file.flush()
        os.fsync(file.fileno())
    os.unlink(folder + "/rate")
    return size / (time.monotonic() - start)


def available_bytes():
    """What is free, and at most what limits of control groups leave."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":") for line in file if ":" in line)
    free = int(fields.get("MemAvailable", fields["MemTotal"]).split()[0]) * 1024
    checks = json.loads(t.spillway("doctor", "--json").stdout)["checks"]
    said = [c["found"] for c in checks if c["name"] == "memory"][0]
    found = re.match(r"([\d.]+) ([kMGT]?)B may be used", said)
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    return min(free, float(found[1]) * units[found[2]]) if found else free


def seconds_of(layers, rate):
    """What this stage takes with so many layers: the model is written, read, written again."""
    n = params(layers)
    return (2 * 2 * n / rate + STATE_BYTES * n / PREPARE_BYTES_PER_S
            + STEPS * 2 * STATE_BYTES * n / UPDATE_BYTES_PER_S)


def layers_that_fit(tmp, device_free):
    """How many, and what limits them."""
    disk, rate = shutil.disk_usage(tmp).free, disk_rate(tmp)
    needs = {  # what a number of layers takes, and what there is
        "host memory": (lambda n: (STATE_BYTES + GRAD_BYTES) * params(n) + 1e8, available_bytes()),
        # Weights, the head's and a layer's FP32 accumulators, and what is kept of the activations.
        "device memory": (lambda n: 2 * params(n) + 4 * (VOCAB * HIDDEN + 2 * layer_params())
                          + 2 * SEQ_LEN * HIDDEN * (n + 40), device_free),
        "disk": (lambda n: 2 * 2 * params(n), disk),
        "time": (lambda n: seconds_of(n, rate), g.SECONDS),
    }
    limit = "all there are"
    for layers in range(LAYERS_MAX, 0, -1):
        over = [name for name, (need, have) in needs.items() if need(layers) > SHARES[name] * have]
        if not over:
            return layers, limit
        limit = " and ".join(over)
    t.skip(f"not one layer fits: {limit}")
    return 0, ""


def write_tokens(path):
    rng = random.Random(2)
    tokens = [rng.randrange(VOCAB) for _ in range(SEQ_LEN * (STEPS + 1) + 1)]
    t.write_tokens(path, tokens, wide=VOCAB > 65536)


def products_s(numerics, layers):
    """Seconds of forward and backward at the rate of the products; {} where none is known."""
    compute = g.figures_of("products").get("mean of the layers") or g.peak_of(numerics)
    if not compute:
        return {}
    weights = layers * (layer_params() - 2 * HIDDEN) + VOCAB * HIDDEN
    scores = 2 * layers * SEQ_LEN * SEQ_LEN * HEADS * HEAD_DIM
    forward = (2.0 * weights * SEQ_LEN + scores) / (compute * 1e12)
    return {"forward, products' rate": forward, "backward, products' rate": 3 * forward}


def compute_s(trace, steady):
    """Seconds of forward and backward in a steady step, by the tasks' times on the GPU. A head that
    is done at once has a third of its products in forward."""
    with open(trace, encoding="utf-8") as file:
        tasks = [e for e in json.load(file)["traceEvents"]
                 if e["ph"] == "X" and e["args"]["lane"] == "compute"
                 and steady["first_step"] <= e["args"]["step"] <= steady["last_step"]]
    parts = {"forward": 0.0, "backward": 0.0}
    for task in tasks:
        kind = task["name"].removesuffix(" " + task["args"]["unit"])
        forward = {"forward": 1.0, "head forward": 1.0, "head": 1 / 3}.get(kind, 0.0)
        parts["forward"] += forward * task["dur"]
        parts["backward"] += (1 - forward) * task["dur"]
    return {name: us * 1e-6 / steady["steps"] for name, us in parts.items()}


def bound_s(steady):
    """Seconds, and the parts."""
    copies = g.figures_of("copies")
    lane = {name: i for i, name in enumerate(steady["lanes"])}
    adam_ns = max(steady["busy_ns"][i] for name, i in lane.items() if name.startswith("adam"))
    parts = {**steady["compute"], "adam": adam_ns * 1e-9}
    for name, rate in (("h2d", "to the device"), ("d2h", "from the device")):
        moved = steady["bytes"][lane[name]] if name in lane else 0
        parts[name] = moved / (copies[rate] * 1e9) if rate in copies else 0.0
    return (max(parts["backward"], parts["d2h"])
            + max(parts["forward"], parts["adam"], parts["h2d"])), parts


def steps_of(tmp, layers):
    """The steady steps of a run, as `spillway report` has them; page and trace go where results
    go."""
    model = f"{tmp}/model-{layers}"
    log, trace = model + ".jsonl", model + ".json"
    print(f"{layers} layers, {write_model(model, layers)} bytes of weights", flush=True)
    run = t.train(model + "-out", "--device", "cuda", "--optimizer", "host", "--gradients", "host",
                  "--params", "device", "--steps", STEPS, "--seq-len", SEQ_LEN, "--log", log,
                  "--trace", trace, model=model, data=tmp + "/tokens.bin", timeout_s=g.SECONDS)
    print(run.text[-4000:])
    t.equal(run.rc, 0, "exit status", run)
    steps = t.read_log(log)[0]
    t.equal(len(steps), STEPS, "steps", run)
    t.check(all(0 < s["loss"] < 100 for s in steps), "a loss", run)
    report = t.spillway("report", trace, "-o", os.path.join(g.OUT, "step-report.html"), "--json",
                        rc=0)
    if os.path.getsize(trace) < TRACE_BYTES_MAX:
        shutil.copy(trace, os.path.join(g.OUT, "step-trace.json"))
    whole = json.loads(report.stdout)
    steady = {**whole["steady"], "lanes": [x["lane"] for x in whole["lanes"]]}
    return {**steady, "compute": compute_s(trace, steady)}


@t.test
def a_step_of_an_8b_model():
    start = time.monotonic()
    numerics, _, free = g.device()
    with t.folder() as tmp:
        layers, limited_by = layers_that_fit(tmp, free)
        write_tokens(tmp + "/tokens.bin")
        failure = None
        try:
            steady = steps_of(tmp, layers)
        except t.Failed as error:  # a quarter of it may still tell something
            if layers < 4 or time.monotonic() - start > g.SECONDS / 2:
                raise
            failure, layers, limited_by = error, layers // 4, f"as {layers} failed"
            steady = steps_of(tmp, layers)
    say(steady, numerics, layers, limited_by)
    if failure:
        raise failure


def say(steady, numerics, layers, limited_by):
    step = steady["step_ns"] * 1e-9
    bound, parts = bound_s(steady)
    for name, value in {**parts, **products_s(numerics, layers), "step": step,
                        "gap": steady["gap_ns"] * 1e-9, "bound": bound}.items():
        g.figure(name, value, "s")
    g.figure("layers", layers, "")
    g.figure("parameters", params(layers), "")
    near = f", {step / bound:.2f} of its bound of {bound:.3g} s"
    g.result(f"{layers} of {LAYERS_MAX} layers ({limited_by}), {params(layers) / 1e9:.3g}e9 "
             f"parameters: {step:.3g} s a step of {SEQ_LEN} tokens{near}; {steady['sentence']}")


if __name__ == "__main__":
    t.main()
