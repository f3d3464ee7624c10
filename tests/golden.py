"""The program's own training against PyTorch's: the five runs of models/stories260k/golden.json.

Each run is `spillway train` in FP32 on the same tokens, with the limits that
models/stories260k/README.md derives: 1e-5 for the first loss, 1e-4 for the later ones, 1e-4
relative for gradient norms, 3e-3 relative for the norms of what changed. The sum and the cosine
projection of a change get the same relative limit against its norm times sqrt(count), the most that
an error of that norm can move them. BF16 runs must stay within a bound derived below.
"""
import json
import math

import support as t

GOLDEN = json.load(open(t.ROOT + "/models/stories260k/golden.json", encoding="utf-8"))
ROWS, TIME, STEPS = GOLDEN["batch"], GOLDEN["time"], GOLDEN["steps"]
FIRST_LOSS, LATER_LOSS, NORM, CHANGE = 1e-5, 1e-4, 1e-4, 3e-3


def options(run, steps, dtype):
    return ["--dtype", dtype, "--grad-dtype", "fp32" if dtype == "fp32" else "bf16",
            "--seq-len", TIME, "--micro-batch", ROWS, "--order", "sequential", "--steps", steps,
            "--lr", GOLDEN["lr"], "--schedule", "constant", "--warmup", "0",
            "--weight-decay", GOLDEN["weight_decay"], "--beta1", GOLDEN["betas"][0],
            "--beta2", GOLDEN["betas"][1], "--eps", GOLDEN["eps"],
            "--clip", run["clip"] or 0, "--decay",
             "all" if "decay2d" not in run["name"] else "matrices"]


def train(tmp, run, steps, dtype, more=()):
    """The log's steps and the output folder of one run."""
    data = t.STORIES + "/train.bin"
    if not run["batch_advances"]:
        tokens = t.read_tokens(data)[:ROWS * TIME + 1]
        t.equal(sum(tokens), GOLDEN["token_sum"], "sum of the first tokens")
        data = tmp + "/first.bin"
        t.write_tokens(data, tokens)
    out, log = f"{tmp}/out-{steps}-{dtype}", f"{tmp}/{steps}-{dtype}.jsonl"
    done = t.train(out, *options(run, steps, dtype), "--log", log, *more, data=data)
    t.equal(done.rc, 0, "exit status", done)
    return t.read_log(log)[0], out


def sums(values):
    wave = math.fsum(v * math.cos(0.37 * i) for i, v in enumerate(values))
    return math.fsum(values), math.sqrt(math.fsum(v * v for v in values)), wave


def check_losses(steps, run):
    for i, want in enumerate(run["losses"]):
        t.close(steps[i]["loss"], want, FIRST_LOSS if i == 0 else LATER_LOSS,
                f"loss of step {i + 1}")
    for i, want in enumerate(run["grad_norms_before_clip"]):
        t.close(steps[i]["grad_norm"], want, NORM, f"gradient norm of step {i + 1}", relative=True)


def check_changes(out, run):
    """What the steps changed in every tensor; returns the worst relative error of a norm."""
    before, after = t.read_model(t.MODEL)[1], t.read_model(out)[1]
    t.equal(sorted(after), sorted(run["tensors"]), "tensor names")
    worst = 0.0
    for name, want in run["tensors"].items():
        old, new = before[name].floats(), after[name].floats()
        got = sums([b - a for a, b in zip(old, new)])
        total, norm, wave = want["change_sum_l2_wave"]
        worst = max(worst, abs(got[1] - norm) / norm)
        t.close(got[1], norm, CHANGE, f"norm of the change of {name}", relative=True)
        spread = CHANGE * norm * math.sqrt(len(old))
        t.close(got[0], total, spread, f"sum of the change of {name}")
        t.close(got[2], wave, spread, f"cosine projection of the change of {name}")
    return worst


def golden_run(name):
    run = dict(GOLDEN["runs"][name], name=name)
    with t.folder() as tmp:
        # The fourth loss is taken after three updates, so four steps give all losses and three
        # steps give the weights.
        steps, _ = train(tmp, run, STEPS + 1, "fp32")
        check_losses(steps, run)
        _, out = train(tmp, run, STEPS, "fp32")
        worst = check_changes(out, run)
        print(f"   {name}: losses {[round(s['loss'], 6) for s in steps]}, worst change {worst:.2e}")


@t.test
def first_loss():
    """Of the model as it comes, before any update: the cheapest, where a GPU is played by a CPU."""
    run = dict(GOLDEN["runs"]["noclip"], name="noclip")
    with t.folder() as tmp:
        steps, _ = train(tmp, run, 1, "fp32")
        t.close(steps[0]["loss"], run["losses"][0], FIRST_LOSS, "first loss")


@t.test
def fp32_noclip():
    golden_run("noclip")


@t.test
def fp32_clip1():
    golden_run("clip1")


@t.test
def fp32_noclip_decay2d():
    golden_run("noclip_decay2d")


@t.test
def fp32_clip1_decay2d():
    golden_run("clip1_decay2d")


@t.test
def fp32_clip1_advance_on_the_whole_file():
    golden_run("clip1_advance")


@t.test
def sharded_and_single_files_train_alike():
    run = dict(GOLDEN["runs"]["clip1"], name="clip1")
    with t.folder() as tmp:
        _, single = train(tmp, run, STEPS, "fp32")
        data = tmp + "/first.bin"
        out = tmp + "/sharded"
        done = t.train(out, *options(run, STEPS, "fp32"), model=t.MODEL + "/sharded", data=data)
        t.equal(done.rc, 0, "exit status", done)
        t.check(t.read_model(single)[1] == t.read_model(out)[1], "the weights differ")


@t.test
def bf16_stays_within_its_rounding():
    """Rounding to BF16 (8 significant bits) is off by at most u = 2^-8 relative, uniformly spread:
    u / sqrt(3) in the root mean square, with independent signs.

    The residual stream is rounded twice in each of L = 5 layers. Inside each of its 2 L branches
    lie about 8 more roundings, which reach the stream scaled by the branch's share of it, at
    most a half: together 2 L + 2 L * 8 / 4 = 30 roundings, so the final state is off by
    e = sqrt(30) u / sqrt(3) relative. A loss feels the logits' differences, weighted by softmax -
    onehot (L1 norm at most 2 (1 - p), in the mean about 1), so it moves by about e times the
    spread s of the logits, which golden.json gives by their sum and norm. Over 512 tokens that
    is s e / sqrt(512) of first order, independent between tokens, and (s e)^2 / 2 of second
    order, always upwards. The limit is their sum. The gradient's norm moves by the error of forward
    and backward, three times the operations; twice sqrt(3) e is its limit.
    """
    layers, u = 5, 2.0 ** -8
    state = math.sqrt(2 * layers + 2 * layers * 8 / 4) * u / math.sqrt(3)
    total, norm, _ = GOLDEN["logits"]["sum_l2_wave"]
    count = ROWS * TIME * 512
    logit = state * math.sqrt(norm ** 2 / count - (total / count) ** 2)
    limit = logit / math.sqrt(ROWS * TIME) + logit ** 2 / 2
    run = dict(GOLDEN["runs"]["clip1"], name="clip1")
    with t.folder() as tmp:
        steps, _ = train(tmp, run, STEPS + 1, "bf16")
        worst = 0.0
        for step, want in zip(steps, run["losses"]):
            worst = max(worst, abs(step["loss"] - want))
            t.close(step["loss"], want, limit, f"BF16 loss of step {step['step']}")
        t.close(steps[0]["grad_norm"], run["grad_norms_before_clip"][0], 2 * math.sqrt(3) * state,
                "BF16 gradient norm", relative=True)
        print(f"   bf16: worst loss error {worst:.2e}, limit {limit:.2e}")


if __name__ == "__main__":
    t.main()
