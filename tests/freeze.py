"""Frozen tensors: they keep their bits and cost nothing but their weights, what is trained gets the
gradient that it gets when all is trained, and no placement changes a bit.

time limit: 200 s
"""
import fnmatch
import json
import os
import re
import shutil

import support as t

BASE = ["--seq-len", 16, "--micro-batch", 2, "--lr", "1e-3", "--digest", "--device-threads", 1]
SHAPE = {**t.MIDDLE_MODEL, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}
# From the first layer up, in the middle, within layers, all but one tensor, the ends alone.
PATTERNS = ["model.embed_tokens.*", "model.layers.[013].*", "*.mlp.*", "*norm.weight",
            "*,!model.layers.2.self_attn.k_proj.weight", "model.layers.*", "*,!model.norm.weight",
            "model.embed_tokens.*,model.layers.[01].*,model.layers.2.mlp.*"]
ALL_NVME = [w for name in ("params", "optimizer", "gradients", "activations")
            for w in ("--" + name, "nvme")]


def made(tmp, tied):
    return t.make_model(f"{tmp}/{'tied' if tied else 'untied'}",
                        {**SHAPE, "tie_word_embeddings": tied}, "--seed", 1, "--dtype", "bf16")


def patterns(tied):
    return PATTERNS + ([] if tied else ["*,!lm_head.*", "lm_head.*,model.norm.weight"])


def frozen(name, pattern):
    is_frozen = False
    for word in pattern.split(","):
        if fnmatch.fnmatchcase(name, word.lstrip("!")):
            is_frozen = not word.startswith("!")
    return is_frozen


def run(model, out, *more, steps=3, rc=0, **options):
    return t.train(out, *BASE, "--steps", steps, "--log", out + ".jsonl", *more, model=model, rc=rc,
                   **options)


def weights(path):
    return {name: tensor.data for name, tensor in t.read_model(path)[1].items()}


def outcome(out):
    steps, others = t.read_log(out + ".jsonl")
    digests = [o for o in others if o.get("event") == "digest"]
    return [(s["loss"], s["grad_norm"]) for s in steps], digests[-1], weights(out)


@t.test
def frozen_tensors_keep_their_bits_and_others_get_the_same_gradient():
    """Without clipping the first step of a tensor depends on its own gradient alone."""
    with t.folder() as tmp:
        for tied in (True, False):
            model = made(tmp, tied)
            before = weights(model)
            run(model, f"{tmp}/all", "--clip", 0, steps=1)
            want = weights(f"{tmp}/all")
            for i, pattern in enumerate(patterns(tied)):
                out = f"{tmp}/{tied}{i}"
                done = run(model, out, "--clip", 0, "--freeze", pattern, steps=1)
                for name, data in weights(out).items():
                    expected = before if frozen(name, pattern) else want
                    t.check(data == expected[name], f"{name} with --freeze {pattern}", done)
                t.check(any(frozen(name, pattern) for name in want), f"{pattern} froze nothing")
            shutil.rmtree(f"{tmp}/all")


@t.test
def no_placement_changes_a_bit():
    variants = [["--overlap", "none"], [*ALL_NVME, "--chunk", 20000],
                ["--params", "host", "--activations", "host", "--checkpoint-every", 2],
                ["--params", "host:50%,nvme", "--activations", "nvme", "--checkpoint-every", 3,
                 "--optimizer", "host:50%,nvme", "--overlap", "none", "--chunk", 15000],
                ["--optimizer", "device", "--checkpoint-every", 2]]
    late = ["--clip", 0]  # and with it --overlap backward, where a variant has no other
    with t.folder() as tmp:
        models = [made(tmp, tied) for tied in (True, False)]
        for i, pattern in enumerate(patterns(False)):
            model = models["lm_head" in pattern or i % 2]
            freeze = ["--freeze", pattern, "--accumulate", 1 + i % 2]
            for common in ([], late) if i % 3 == 0 else ([],):
                found = []
                # A few of all pairs, others for each pattern.
                for more in ([], variants[i % 5], variants[(i + 2) % 5]):
                    out = f"{tmp}/out"
                    run(model, out, *freeze, *more, *common)
                    found.append(outcome(out))
                    shutil.rmtree(out)
                t.check(all(f == found[0] for f in found), f"{freeze} {common}")


@t.test
def stages_and_ranks():
    with t.folder() as tmp:
        model = made(tmp, False)
        for i, pattern in enumerate((PATTERNS[1], PATTERNS[2], "*,!lm_head.*", PATTERNS[7])):
            ranks = (3, 2, 4, 3)[i]
            found = []
            for more in ([], ["--zero", 0], ["--zero", 1, "--optimizer", "nvme"],
                         ["--zero", 3, *ALL_NVME]):
                out = f"{tmp}/out"
                run(model, out, "--ranks", ranks, "--freeze", pattern, *more)
                found.append(outcome(out))
                shutil.rmtree(out)
            t.check(all(f == found[0] for f in found), f"--freeze {pattern} on {ranks} ranks")
            before = weights(model)
            for name, data in found[0][2].items():
                t.check(data == before[name] or not frozen(name, pattern), f"{name} has changed")


@t.test
def what_is_frozen_costs_its_weights_alone():
    with t.folder() as tmp:
        model = made(tmp, False)
        sizes = {n: len(d) // 2 for n, d in weights(model).items()}
        for i, pattern in enumerate(PATTERNS):
            trained = sum(n for name, n in sizes.items() if not frozen(name, pattern))
            out = f"{tmp}/out"
            done = run(model, out, "--freeze", pattern, "--optimizer", "nvme", "--chunk", 4000000)
            t.contains(done.stdout, f"{sum(sizes.values())} parameters, {trained} of them trained",
                       "what is trained", done)
            state = t.table(done.stdout, "nvme", "optimizer state, two homes")
            # Two homes of 12 bytes, rounded up to 4 KiB for each unit; printed in three digits.
            least = 24 * trained
            t.check(0.99 * least <= state <= 1.01 * (least + 8 * 2 * 8192 + 8 * 9 * 128 * 24),
                    f"{state} bytes of state for {trained} parameters with {pattern}", done)
            shutil.rmtree(out)


@t.test
def nothing_is_done_for_what_no_gradient_needs():
    """Kinds of tasks, and the units that they are for."""
    ends = {"embedding": {"adam", "grad", "norms", "reduce"}, "layer 1": {"backward", "recompute"}}
    with t.folder() as tmp:
        for pattern, moved, absent in (
                ("model.layers.[01].*,model.embed_tokens.*", ["layer 2", "norm"],
                 {"embedding": ends["embedding"],
                  "layer 1": ends["embedding"] | ends["layer 1"] | {"spill", "fetch"}}),
                ("*,!model.norm.weight", ["norm"],
                 {"layer 4": ends["embedding"] | ends["layer 1"] | {"spill", "fetch"}}),
                ("*.mlp.*", ["layer 1", "embedding", "norm"], {})):
            t.train(f"{tmp}/out", *BASE, "--steps", 3, "--trace", f"{tmp}/trace", "--activations",
                    "host", "--freeze", pattern, "--restart", rc=0)
            with open(f"{tmp}/trace", encoding="utf-8") as file:
                done = {e["name"] for e in json.load(file)["traceEvents"] if e.get("ph") == "X"}
            for unit in moved:
                t.check(f"adam {unit}" in done, f"no update of {unit} with --freeze {pattern}")
            for unit, kinds in absent.items():
                for kind in kinds:
                    t.check(f"{kind} {unit}" not in done, f"{kind} {unit} with --freeze {pattern}")


@t.test
def a_store_remembers_what_is_frozen():
    with t.folder() as tmp:
        model = made(tmp, True)
        freeze = ["--freeze", PATTERNS[7], "--optimizer", "nvme", "--schedule", "constant"]
        run(model, f"{tmp}/want", *freeze, steps=6)
        run(model, f"{tmp}/out", *freeze, "--keep-store", steps=3)
        shutil.copytree(f"{tmp}/out", f"{tmp}/kept")
        for other in ([], ["--freeze", PATTERNS[1]]):
            refused = run(model, f"{tmp}/out", "--optimizer", "nvme", "--schedule", "constant",
                          *other, "--resume", steps=6, rc=1)
            t.contains(refused.stderr, "its shapes is", "the message", refused)
            t.contains(refused.stderr, f", frozen {PATTERNS[7]}'", "the message", refused)
        run(model, f"{tmp}/out", *freeze, "--resume", steps=6)
        t.equal(outcome(f"{tmp}/out")[1:], outcome(f"{tmp}/want")[1:], "after the resume")
        # Out and in again: as files of what is trained, and no others.
        to = f"{tmp}/files"
        t.spillway("export", "--model", model, "--from", f"{tmp}/kept", "--to", to, rc=0)
        with open(to + "/optimizer.json", encoding="utf-8") as file:
            t.equal(json.load(file)["options"]["freeze"], PATTERNS[7], "what is frozen")
        names = {n for f in os.listdir(to) if f.endswith(".safetensors")
                 for n in t.read_safetensors(f"{to}/{f}")}
        expected = {n for n in weights(model) if not frozen(n, PATTERNS[7])}
        t.equal({re.sub(r"^\w+\.(?=model|lm_head)", "", n) for n in names}, expected, "tensors")
        again = [*freeze[:2], "--schedule", "constant", "--import", to]
        run(model, f"{tmp}/again", *again, steps=6)
        t.equal(outcome(f"{tmp}/again")[1:], outcome(f"{tmp}/want")[1:], "after the import")
        run(model, f"{tmp}/no", "--schedule", "constant", "--import", to, steps=6, rc=1)


@t.test
def what_makes_no_sense_is_refused():
    with t.folder() as tmp:
        model = made(tmp, True)
        for pattern, part in (("lm_head.*", "'lm_head.*'; names are those of its files, and the "
                               "head's matrix is model.embed_tokens.weight"),
                              ("model.layers.9.*", "'model.layers.9.*'"),
                              ("*,", "''"), ("*", "leaves no tensor"),
                              ("model.norm.weight,*", "leaves no tensor")):
            refused = run(model, f"{tmp}/out", "--freeze", pattern, rc=1)
            t.contains(refused.stderr, part, "the message", refused)
        refused = run(model, f"{tmp}/out", "--freeze", "*," * 200, rc=2)
        t.contains(refused.stderr, "--freeze is longer than 383", "the message", refused)
        t.check(not os.path.exists(f"{tmp}/out"), "something was made")


if __name__ == "__main__":
    t.main()
