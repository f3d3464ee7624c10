"""The optimizer as files: what is exported is what the store holds, in any layout, and a run that
begins with it goes on with the same bits, also with other ranks, chunks and forms of the state.

time limit: 300 s
"""
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import time

import support as t

# Equal rows a step, however they are shared out; a schedule that does not depend on --steps.
ROWS = 24
CONSTANT = ["--seq-len", 16, "--lr", "1e-3", "--schedule", "constant", "--warmup", 0, "--digest",
            "--device-threads", 1]
NVME = ["--optimizer", "nvme"]
PARTS = ("master", "momentum", "variance")


def split(ranks):
    return ["--ranks", ranks, "--accumulate", ROWS // ranks]


def train(out, *more, steps, chunk=60000, **options):
    return t.train(out, "--steps", steps, "--chunk", chunk, *CONSTANT, *more, **options)


def export(store, to, *more, model=t.MODEL, rc=0, **options):
    return t.spillway("export", "--model", model, "--from", store, "--to", to, *more, rc=rc,
                      **options)


def digest(run):
    found = re.search(r"^digest: (.*)$", run.stdout, re.M)
    t.check(found, "no digest", run)
    return found.group(1)


def read_export(folder):
    """(optimizer.json, {name: Tensor}); the index must say where each tensor is."""
    with open(f"{folder}/optimizer.json", encoding="utf-8") as file:
        state = json.load(file)
    with open(f"{folder}/optimizer.safetensors.index.json", encoding="utf-8") as file:
        index = json.load(file)
    tensors = {}
    files = sorted(set(index["weight_map"].values()))
    for number, name in enumerate(files, 1):
        t.equal(name, f"optimizer-{number:05}-of-{len(files):05}.safetensors", "a file's name")
        found = t.read_safetensors(f"{folder}/{name}")
        t.equal({k for k, v in index["weight_map"].items() if v == name}, set(found), name)
        tensors.update(found)
    t.equal(sorted(os.listdir(folder)), sorted([*files, "optimizer.json",
                                                "optimizer.safetensors.index.json"]), folder)
    t.equal(index["metadata"]["total_size"], sum(len(x.data) for x in tensors.values()), "size")
    return state, tensors


def whole(folder):
    """All of the tensors' files, byte for byte but for the run's id."""
    return {name: content for name, content in t.exported(folder).items()
            if name.endswith(".safetensors")}


def check_against_model(tensors, out):
    """Names and shapes are the model's, three times; masters, rounded, are its weights."""
    weights = t.read_model(out)[1]
    t.equal(set(tensors), {f"{p}.{n}" for p in PARTS for n in weights}, "names")
    for name, weight in weights.items():
        for part in PARTS:
            t.equal((tensors[f"{part}.{name}"].dtype, tensors[f"{part}.{name}"].shape),
                    ("F32", weight.shape), f"{part}.{name}")
        master = tensors[f"master.{name}"]
        if weight.dtype == "F32":
            t.check(master.data == weight.data, f"{name}: other masters")
            continue
        words = struct.unpack(f"<{len(master.data) // 4}I", master.data)
        rounded = struct.pack(f"<{len(words)}H", *((w + 0x8000) >> 16 & 0xFFFF for w in words))
        t.check(rounded == weight.data, f"{name}: masters do not round to the weights")


def untied(tmp, dtype="bf16"):
    """A model with a head of its own, in several parts."""
    config = {**t.MIDDLE_MODEL, "hidden_size": 64, "intermediate_size": 176,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
              "vocab_size": 1100}
    return t.make_model(f"{tmp}/model-{dtype}", config, "--seed", 7, "--dtype", dtype)


@t.test
def a_kept_store_is_exported_as_the_models_tensors():
    with t.folder() as tmp:
        bf16, fp32 = untied(tmp), untied(tmp, "fp32")
        for number, (model, more) in enumerate((
                (t.MODEL, NVME), (t.MODEL, ["--optimizer", "host", "--chunk", 20000]),
                (bf16, [*NVME, "--ranks", 3, "--chunk", 33333]),
                (bf16, [*NVME, "--master", "split", "--zero", 1, "--ranks", 2]),
                (fp32, ["--dtype", "fp32", "--ranks", 7, *NVME]))):
            out, to = f"{tmp}/{number}", f"{tmp}/to-{number}"
            chunk = [] if "--chunk" in more else ["--chunk", 60000]
            t.train(out, "--steps", 3, *CONSTANT, *chunk, *more, "--keep-store", model=model, rc=0)
            before = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
            told = export(out, to, model=model)
            t.contains(told.stdout, "exported step 3", "what it says")
            state, tensors = read_export(to)
            check_against_model(tensors, out)
            t.check(any(any(tensors[n].data) for n in tensors if n.startswith("variance")), "zeros")
            ranks = more[more.index("--ranks") + 1] if "--ranks" in more else 1
            t.equal((state["schema"], state["step"], state["updates"], state["skips_in_a_row"]),
                    (1, 3, 3, 0), "where the run stood")
            t.equal(state["data"]["rows_taken"], 3 * ranks, "rows taken")
            t.equal(state["options"]["ranks"], ranks, "ranks")
            after = {n: open(f"{out}/{n}", "rb").read() for n in os.listdir(out)}
            t.check(before == after, "the export changed the store")


@t.test
def a_killed_run_is_exported_at_its_last_commit():
    """The same files as those of a run that was to end there, whatever the layout of the store."""
    with t.folder() as tmp:
        train(f"{tmp}/three", *split(4), *NVME, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/three", f"{tmp}/want")
        os.mkdir(f"{tmp}/a")
        os.mkdir(f"{tmp}/b")
        folders = f"{tmp}/a,{tmp}/b"
        for number, more in enumerate(([], ["--chunk", 12288], ["--master", "split"],
                                       ["--nvme", folders], ["--zero", 1, "--params", "host"])):
            base = ["--steps", 8, *CONSTANT, *split(4), *NVME, *more]
            base += [] if "--chunk" in more else ["--chunk", 60000]
            out, store = f"{tmp}/{number}", more if "--nvme" in more else []
            t.train(out, *base, rc=-signal.SIGKILL,
                    env=t.kill_at("pwrite:.commit:4:before"))
            export(out, f"{tmp}/to-{number}", *store)
            t.check(whole(f"{tmp}/to-{number}") == whole(f"{tmp}/want"), f"{more}: other files")
            resumed = t.train(out, *base, "--resume", rc=0)  # the export took nothing from it
            t.contains(resumed.stdout, "going on after step 3", "resume", resumed)


@t.test
def chunks_that_were_never_updated_are_the_models_weights_and_zeros():
    """Non-finite gradients are skipped; what was committed then has no record at all."""
    with t.folder() as tmp:
        model = f"{tmp}/model"
        shutil.copytree(t.MODEL, model)
        tensors = t.read_safetensors(f"{model}/model.safetensors")
        norm = tensors["model.norm.weight"]
        huge = struct.pack("<f", 3e38) if norm.dtype == "F32" else struct.pack("<H", 0x7F61)
        norm.data = huge * (len(norm.data) // len(huge))
        t.write_safetensors(f"{model}/model.safetensors", tensors)
        train(f"{tmp}/out", *split(2), *NVME, "--keep-store", steps=2, model=model, rc=0)
        export(f"{tmp}/out", f"{tmp}/to", model=model)
        state, found = read_export(f"{tmp}/to")
        t.equal((state["step"], state["updates"], state["skips_in_a_row"]), (2, 0, 2), "skips")
        for name, tensor in tensors.items():
            t.check(found[f"master.{name}"].floats() == tensor.floats(), f"{name}: masters")
            for part in PARTS[1:]:
                t.check(not any(found[f"{part}.{name}"].data), f"{part}.{name} is not 0")


LAYOUTS = {  # (ranks, where and how the importing run keeps its state)
    "1 rank": (1, ["--optimizer", "host"]),
    "3 ranks on NVMe": (3, [*NVME, "--params", "nvme", "--chunk", 33333]),
    "8 ranks, split": (8, ["--optimizer", "device:30%,host:40%,nvme", "--master", "split",
                           "--zero", 2, "--chunk", 12288]),
    "4 ranks on the device": (4, ["--optimizer", "device", "--overlap", "none"]),
}


@t.test
def other_ranks_and_placements_hold_the_same_bits():
    with t.folder() as tmp:
        model = untied(tmp)
        for of in (t.MODEL, model):
            name = f"run-{os.path.basename(of)}"
            first = train(f"{tmp}/{name}", *split(4), *NVME, "--keep-store", steps=3, model=of,
                          rc=0)
            export(f"{tmp}/{name}", f"{tmp}/{name}-want", model=of)
            for number, (layout, (ranks, more)) in enumerate(LAYOUTS.items()):
                out, to = f"{tmp}/{name}-{number}", f"{tmp}/{name}-{number}-to"
                chunk = [] if "--chunk" in more else ["--chunk", "1M"]
                run = t.train(out, "--steps", 3, *CONSTANT, *split(ranks), *more, *chunk,
                              "--import", f"{tmp}/{name}-want", "--keep-store", model=of, rc=0)
                t.contains(run.stdout, "imported: going on after step 3", layout, run)
                t.equal(digest(run), digest(first), f"{layout}: digest", run)
                export(out, to, model=of)
                t.check(whole(to) == whole(f"{tmp}/{name}-want"), f"{layout}: other files")
                a, b = read_export(to)[0], read_export(f"{tmp}/{name}-want")[0]
                for key in ("step", "updates", "skips_in_a_row", "data", "model"):
                    t.equal(a[key], b[key], f"{layout}: {key}")
                t.check(t.read_model(out)[1] == t.read_model(f"{tmp}/{name}")[1], "weights")


@t.test
def an_imported_run_goes_on_with_the_bits_of_one_that_never_stopped():
    with t.folder() as tmp:
        want = train(f"{tmp}/whole", *split(4), steps=7, rc=0)
        train(f"{tmp}/out", *split(4), *NVME, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/out", f"{tmp}/to", "--file-size", "500K")
        t.check(len(whole(f"{tmp}/to")) > 4, "one file alone")
        read_export(f"{tmp}/to")
        for number, more in enumerate(([], [*NVME, "--zero", 1, "--overlap", "none"],
                                       ["--params", "host", *NVME, "--commit-every", 0],
                                       ["--master", "split", "--optimizer", "host:50%,nvme"],
                                       ["--optimizer", "device"])):
            log = f"{tmp}/{number}.jsonl"
            run = train(f"{tmp}/{number}", *split(4), *more, "--import", f"{tmp}/to", "--log", log,
                        steps=7, rc=0)
            t.equal(digest(run), digest(want), f"{more}: digest", run)
            steps, others = t.read_log(log)
            t.equal([s["step"] for s in steps], [4, 5, 6, 7], f"{more}: steps")
            t.equal([o["step"] for o in others if o["event"] == "imported"], [3], "event")
        # Other ranks add in another order, and see the same rows.
        logs = {}
        for ranks in (1, 3):
            log = f"{tmp}/r{ranks}.jsonl"
            train(f"{tmp}/r{ranks}", *split(ranks), "--import", f"{tmp}/to", "--log", log, steps=7,
                  rc=0)
            logs[ranks] = [s["loss"] for s in t.read_log(log)[0]]
        whole_log = f"{tmp}/whole.jsonl"
        train(f"{tmp}/again", *split(4), "--log", whole_log, steps=7, rc=0)
        losses = [s["loss"] for s in t.read_log(whole_log)[0]][3:]
        for ranks, got in logs.items():
            for a, b in zip(got, losses):  # BF16 rounds the gradients' sums to 2^-9 of their size
                t.close(a, b, 2e-2, f"{ranks} ranks: a loss")


@t.test
def eight_bits_are_exported_as_what_they_stand_for():
    with t.folder() as tmp:
        coded = [*split(2), *NVME, "--moments", "8bit"]
        want = train(f"{tmp}/whole", *coded, steps=6, rc=0)
        first = train(f"{tmp}/out", *coded, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/out", f"{tmp}/to")
        t.equal(read_export(f"{tmp}/to")[0]["options"]["moments"], "8bit", "form")
        # As FP32 they are the same values; coded again they are the same codes.
        plain = train(f"{tmp}/plain", *split(3), "--import", f"{tmp}/to", steps=3, rc=0)
        t.equal(digest(plain), digest(first), "digest as FP32", plain)
        again = train(f"{tmp}/again", *coded, "--import", f"{tmp}/to", steps=6, rc=0)
        t.contains(again.stderr, "coded anew, which rounds: 0 of ", "codes of codes", again)
        t.equal(digest(again), digest(want), "digest after 8-bit moments were coded anew", again)


@t.test
def moments_are_rounded_to_eight_bits_and_it_is_said():
    with t.folder() as tmp:
        train(f"{tmp}/out", *split(2), *NVME, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/out", f"{tmp}/to")
        run = train(f"{tmp}/coded", *split(4), *NVME, "--moments", "8bit", "--import", f"{tmp}/to",
                    "--keep-store", steps=3, rc=0)
        told = re.search(r"coded anew, which rounds: (\d+) of (\d+) values", run.stderr)
        t.check(told and int(told[1]) > int(told[2]) / 2, "what it says", run)
        export(f"{tmp}/coded", f"{tmp}/back")
        a, b = read_export(f"{tmp}/to")[1], read_export(f"{tmp}/back")[1]
        for name, tensor in a.items():
            if name.startswith("master"):
                t.check(tensor == b[name], f"{name}: other masters")
                continue
            top = max(abs(x) for x in tensor.floats())
            for x, y in zip(tensor.floats(), b[name].floats()):
                # Half of a step of 2^-3 of its power of two; below the normal codes half a step of
                # the smallest; a variance above 0 takes the smallest code at least.
                small = top * (2 ** -17 if name.startswith("momentum") else 2 ** -32)
                t.check(abs(x - y) <= abs(x) / 16 + small, f"{name}: {x} became {y}")
                t.check(x == 0 or y != 0 or name.startswith("momentum"), f"{name}: {x} became 0")


@t.test
def a_crash_after_an_import_goes_on_with_the_same_command():
    with t.folder() as tmp:
        want = train(f"{tmp}/whole", *split(2), steps=7, rc=0)
        train(f"{tmp}/out", *split(2), *NVME, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/out", f"{tmp}/to")
        for number, (kill, begins) in enumerate((
                ("pwrite:.commit:1:before", 0), ("pwrite:.commit:1:after", 3),
                ("pwrite:.commit:3:before", 4))):
            line = [*split(2), *NVME, "--import", f"{tmp}/to", "--resume"]
            out = f"{tmp}/{number}"
            train(out, *line, steps=7, rc=-signal.SIGKILL,
                  env=t.kill_at(kill))
            if begins:
                shutil.move(f"{tmp}/to", f"{tmp}/away")  # it is not even looked at
            again = train(out, *line, steps=7, rc=0)
            if begins:
                shutil.move(f"{tmp}/away", f"{tmp}/to")
                t.contains(again.stdout, f"going on after step {begins}", kill, again)
                t.contains(again.stdout, "is not read: --resume found a commit", kill, again)
            else:
                t.contains(again.stdout, "nothing is committed; starting with --import", kill,
                           again)
            t.equal(digest(again), digest(want), kill, again)
            t.contains(train(out, *line, steps=7, rc=0).stdout, "nothing to do", kill)
        # A store that an import began is like any other: taken up without the option.
        train(f"{tmp}/n", *split(2), *NVME, "--import", f"{tmp}/to", steps=7, rc=-signal.SIGKILL,
              env=t.kill_at("pwrite:.commit:3:before"))
        plain = train(f"{tmp}/n", *split(2), *NVME, "--resume", steps=7, rc=0)
        t.equal(digest(plain), digest(want), "resumed without --import", plain)


def refused(tmp, part, *more, status=1, steps=7, **options):
    run = train(f"{tmp}/refused", *more, steps=steps, rc=status, **options)
    t.contains(run.stderr, part, f"refusal with {more[-2:]}", run)
    t.check(not os.path.exists(f"{tmp}/refused"), "a refused run left its folder", run)


@t.test
def an_import_of_another_run_is_refused_by_name():
    with t.folder() as tmp:
        train(f"{tmp}/out", *split(2), *NVME, "--keep-store", steps=3, rc=0)
        to = f"{tmp}/to"
        export(f"{tmp}/out", to)
        other = f"{tmp}/data.bin"
        t.write_tokens(other, t.read_tokens(t.SHAKESPEARE + "/train.bin")[5:])
        t.spillway("init", "--config", t.MODEL + "/config.json", "--seed", 3, "--out",
                   f"{tmp}/model", rc=0)
        line = ["--import", to]
        refused(tmp, "another model", *split(2), *line, model=f"{tmp}/model")
        refused(tmp, "another data", *split(2), *line, data=other)
        refused(tmp, "--seed 0, and this one", *split(2), *line, "--seed", 4)
        refused(tmp, "--order shuffle", *split(2), *line, "--order", "sequential")
        refused(tmp, "took 24 rows for each step and this one takes 16", "--ranks", 4,
                "--accumulate", 4, *line)
        refused(tmp, "beyond --steps 2", *split(2), *line, steps=2)
        refused(tmp, "optimizer.json", *split(2), "--import", f"{tmp}/model")
        refused(tmp, "--sim-flops trains nothing", *split(2), *line, "--sim-flops", "1G", status=2)
        base = ["--lr", "1e-3", "--import", to, "--seq-len", 24, *split(2)]
        run = t.train(f"{tmp}/refused", "--steps", 7, *base, rc=1)
        t.contains(run.stderr, "had --seq-len 16 and this one has 24", "seq-len", run)


def damaged(tmp, change):
    """A copy of the export whose tensors went through `change`."""
    shutil.rmtree(f"{tmp}/bad", ignore_errors=True)
    shutil.copytree(f"{tmp}/to", f"{tmp}/bad")
    path = f"{tmp}/bad/optimizer-00001-of-00001.safetensors"
    tensors = t.read_safetensors(path)
    change(tensors)
    t.write_safetensors(path, tensors)
    with open(f"{tmp}/bad/optimizer.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump({"weight_map": {name: os.path.basename(path) for name in tensors}}, file)
    with open(f"{tmp}/bad/optimizer.json", encoding="utf-8") as file:
        state = json.load(file)
    del state["run"]  # as in files of another tool: none of them names one
    with open(f"{tmp}/bad/optimizer.json", "w", encoding="utf-8") as file:
        json.dump(state, file)
    return ["--import", f"{tmp}/bad"]


@t.test
def damaged_files_are_refused_by_name():
    with t.folder() as tmp:
        train(f"{tmp}/out", *split(2), *NVME, "--keep-store", steps=3, rc=0)
        export(f"{tmp}/out", f"{tmp}/to")
        name = "variance.model.layers.1.mlp.up_proj.weight"

        def reshape(tensors):
            tensors[name].shape.reverse()

        def set_value(which, value):
            def change(tensors):
                data = bytearray(tensors[which].data)
                data[40:44] = struct.pack("<f", value)
                tensors[which].data = bytes(data)
            return change

        refused(tmp, f"tensor '{name}' is missing", *split(2),
                *damaged(tmp, lambda tensors: tensors.pop(name)))
        refused(tmp, f"tensor '{name}' has shape", *split(2), *damaged(tmp, reshape))
        refused(tmp, "tensor 'more' is not one", *split(2),
                *damaged(tmp, lambda tensors: tensors.update(more=tensors[name])))
        refused(tmp, "layer 1, elements", *split(2), *damaged(tmp, set_value(name, -1.0)))
        momentum = name.replace("variance", "momentum")
        refused(tmp, "--moments 8bit have no such value", *split(2), "--moments", "8bit",
                *damaged(tmp, set_value(momentum, float("nan"))))
        path = damaged(tmp, lambda tensors: None)[1]
        file = f"{path}/optimizer-00001-of-00001.safetensors"
        os.truncate(file, os.path.getsize(file) - 100)
        refused(tmp, "truncated", *split(2), "--import", path)
        os.unlink(file)
        refused(tmp, "optimizer-00001-of-00001.safetensors is missing", *split(2), "--import", path)
        for key, value in (("step", "x"), ("schema", 2), ("updates", 99), ("step", 4)):
            with open(f"{tmp}/to/optimizer.json", encoding="utf-8") as source:
                state = {**json.load(source), key: value}
            with open(f"{tmp}/bad/optimizer.json", "w", encoding="utf-8") as target:
                json.dump(state, target)
            named = "rows_taken" if value == 4 else key
            refused(tmp, f"'{named}'", *split(2), "--import", path)


@t.test
def files_of_two_exports_are_not_mixed():
    """Neither of two runs of the same shape, nor of two steps of one."""
    with t.folder() as tmp:
        line = [*split(2), *NVME, "--keep-store"]
        for run in ("a", "b"):
            train(f"{tmp}/{run}", *line, steps=3, rc=0)
            export(f"{tmp}/{run}", f"{tmp}/{run}-3", "--file-size", "500K")
        train(f"{tmp}/a", *line, "--resume", steps=4, rc=0)
        export(f"{tmp}/a", f"{tmp}/a-4", "--file-size", "500K")
        ids = {e: json.load(open(f"{tmp}/{e}/optimizer.json", encoding="utf-8"))["run"]
               for e in ("a-3", "a-4", "b-3")}
        t.equal(ids["a-3"], ids["a-4"], "a resumed run's id")
        t.check(ids["a-3"] != ids["b-3"], "two runs have one id")
        t.check(t.exported(f"{tmp}/a-3") == t.exported(f"{tmp}/b-3"), "they differ in more")
        name = sorted(whole(f"{tmp}/a-3"))[1]
        for other, step in (("b-3", 3), ("a-4", 4)):
            mixed = f"{tmp}/mixed-{other}"
            shutil.copytree(f"{tmp}/a-3", mixed)
            shutil.copy2(f"{tmp}/{other}/{name}", mixed)
            for part in (f"{mixed}/{name} is of run '{ids[other]}, step {step}'",
                         f"of run '{ids['a-3']}, step 3'"):
                refused(tmp, part, *split(2), "--import", mixed)


@t.test
def what_cannot_be_exported_is_refused_by_name():
    with t.folder() as tmp:
        out, to = f"{tmp}/out", f"{tmp}/to"
        os.mkdir(f"{tmp}/empty")
        t.contains(export(f"{tmp}/empty", to, rc=1).stderr, "no commit lies in", "no store")
        train(out, *split(2), *NVME, "--keep-store", steps=3, rc=0)
        t.spillway("init", "--config", t.MODEL + "/config.json", "--seed", 3, "--out",
                   f"{tmp}/model", rc=0)
        t.contains(export(out, to, model=f"{tmp}/model", rc=1).stderr, "is of another model than",
                   "another model")
        t.contains(export(out, to, "--nvme", f"{out},{tmp}/empty", rc=1).stderr,
                   "lies in 1 folder and 2 are given", "folders")
        t.contains(t.spillway("export", "--from", out, rc=2).stderr, "--model", "no model")
        t.contains(export(out, out, rc=1).stderr, "is not empty", "a folder with files")
        t.contains(export(out, f"{tmp}/no/where", rc=1).stderr, "cannot make the folder", "parent")
        with open(f"{out}/optimizer.0.state", "rb") as store:
            fcntl.flock(store, fcntl.LOCK_EX)
            busy = export(out, to, rc=1)
            t.contains(busy.stderr, f"in use by process {os.getpid()}", "a store in use", busy)
        size = os.path.getsize(f"{out}/optimizer.0.state")
        with open(f"{out}/optimizer.0.state", "r+b") as store:
            for home in (0, 1):  # one of them is committed
                store.seek(home * (size // 2) + 70000)
                byte = store.read(1)
                store.seek(-1, os.SEEK_CUR)
                store.write(bytes([byte[0] ^ 1]))
        bad = export(out, to, rc=1)
        for part in ("optimizer.0.state", "chunk ", "step 3", "CRC-32C"):
            t.contains(bad.stderr, part, "damaged record", bad)
        os.truncate(f"{out}/optimizer.0.state", size - 4096)
        t.contains(export(out, to, rc=1).stderr, "its layout takes", "a store that was cut")
        t.equal(os.path.getsize(f"{out}/optimizer.0.state"), size - 4096, "size of the store")
        os.unlink(f"{out}/optimizer.0.state")
        t.contains(export(out, to, rc=1).stderr, "cannot open", "no records")
        t.check(not os.path.exists(f"{out}/optimizer.0.state"), "the store was made anew")
        t.check(not os.path.exists(to), "a refused export left its folder")


@t.test
def a_run_that_is_at_work_is_not_exported():
    with t.folder() as tmp:
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", f"{tmp}/out", "--steps", 100000, *CONSTANT, *NVME])
        process.wait_for(r"^step 1/")
        run = export(f"{tmp}/out", f"{tmp}/to", rc=1)
        t.contains(run.stderr, f"in use by process {process.pid}", "the owner", run)
        process.signal(signal.SIGINT)
        stopped = process.finish()
        t.equal(stopped.rc, 130, "the run itself", stopped)
        step = int(re.search(r"stopped after step (\d+)", stopped.stdout)[1])
        t.contains(export(f"{tmp}/out", f"{tmp}/to").stdout, f"exported step {step}:", "after it")


@t.test
def exports_and_imports_take_little_memory_and_a_stop_leaves_nothing():
    """60 million parameters: 720 MB in files, through a chunk and a few buffers; an import takes
    what the byte table says, as a run without one does."""
    layers = 1 if t.SANITIZED else 18
    with t.folder() as tmp:
        with open(f"{tmp}/config.json", "w", encoding="utf-8") as file:
            json.dump({**t.MIDDLE_MODEL, "num_hidden_layers": layers}, file)
        t.spillway("init", "--config", f"{tmp}/config.json", "--out", f"{tmp}/model", rc=0)
        made = t.train(f"{tmp}/out", "--steps", 1, "--seq-len", 8, *NVME, "--keep-store",
                       model=f"{tmp}/model", rc=0)
        params = int(re.search(r"^(\d+) parameters", made.stdout, re.M)[1])
        t.check(params > 58e6 or t.SANITIZED, f"{params} parameters")
        args = ["export", "--model", f"{tmp}/model", "--from", f"{tmp}/out", "--to", f"{tmp}/to"]
        process = t.Process(args)
        while process.text() == "" and not os.path.exists(f"{tmp}/to"):
            time.sleep(0.001)
        process.signal(signal.SIGINT)
        stopped = process.finish()
        t.equal(stopped.rc, 130, "exit status of a stopped export", stopped)
        t.contains(stopped.stdout, "nothing was exported", "what it says", stopped)
        t.check(not os.path.exists(f"{tmp}/to"), "a stopped export left its folder")
        run = t.spillway(*args, sample=True, rc=0)
        print(f"   {run.peak_private_bytes / 1e6:.1f} MB for {12 * params / 1e6:.0f} MB, "
              f"{run.seconds:.1f} s")
        program = 24e6  # as the byte table has it
        t.check(t.SANITIZED or run.peak_private_bytes <= program + 64e6,
                f"{run.peak_private_bytes / 1e6:.1f} MB of private memory", run)
        t.equal(sum(map(os.path.getsize, (f"{tmp}/to/{n}" for n in os.listdir(f"{tmp}/to")
                                          if n.endswith(".safetensors")))) // 1000000,
                12 * params // 1000000, "bytes of the files, in MB")
        run = t.train(f"{tmp}/again", "--steps", 1, "--seq-len", 8, *NVME, "--import", f"{tmp}/to",
                      model=f"{tmp}/model", sample=True, rc=0)
        table = t.totals(run.stdout)
        planned = table["device"] + table["host"]
        t.check(t.SANITIZED or run.peak_private_bytes <= 1.05 * planned,
                f"{run.peak_private_bytes / 1e6:.1f} MB of {planned / 1e6:.1f} MB planned", run)
        t.check(t.read_model(f"{tmp}/again")[1] == t.read_model(f"{tmp}/out")[1], "other weights")


if __name__ == "__main__":
    t.main()
