"""Bad input of every kind to the whole program: each ends with the right exit status and a message
that names what is wrong, and nothing that was there before is touched.

Exit status 2 means the command line or the configuration file is wrong, 1 that an input file or
folder is. Messages go to standard error. Mounts need root and are skipped without it.
"""
import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess

import support as t

TRAIN = t.SHAKESPEARE + "/train.bin"
SHORT = ["--steps", "2", "--seq-len", "32"]


def picture(folder):
    """Every path under a folder with a hash of what it holds."""
    found = {}
    for top, folders, files in os.walk(folder):
        for name in folders:
            found[os.path.join(top, name)] = "folder"
        for name in files:
            path = os.path.join(top, name)
            with open(path, "rb") as file:
                found[path] = hashlib.sha256(file.read()).hexdigest()
    return found


def entries(folder):
    """What stands in a folder, each entry by what replacing or writing it would change.

    Its time of access is not among that: looking at a link or a pipe changes it.
    """
    found = {}
    for name in sorted(os.listdir(folder)):
        state = os.lstat(os.path.join(folder, name))
        found[name] = (state.st_mode, state.st_ino, state.st_size, state.st_mtime_ns)
    return found


def refused(tmp, rc, parts, *args, **options):
    """One run of train that must be refused, in words, before it writes anything."""
    out = tmp + "/out"
    before = picture(tmp)
    run = t.train(out, *SHORT, *args, **options)
    t.equal(run.rc, rc, "exit status", run)
    for part in [parts] if isinstance(parts, str) else parts:
        t.contains(run.stderr, part, "the message", run)
    t.contains(run.stderr, "spillway: error: ", "the message", run)
    t.equal(picture(tmp), before, "the files afterwards", run)
    return run


def copy_model(tmp, name="model"):
    model = f"{tmp}/{name}"
    os.makedirs(model)
    for file in ("config.json", "model.safetensors"):
        shutil.copy(f"{t.MODEL}/{file}", model)
    return model


def rewrite_header(model, change):
    """Applies change(header) to the JSON of a model's file; the data stays as it is."""
    path = model + "/model.safetensors"
    with open(path, "rb") as file:
        content = file.read()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + size])
    change(header)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + content[8 + size:])


def change_config(model, **fields):
    with open(model + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config.update(fields)
    with open(model + "/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)


# ---- models ------------------------------------------------------------------------------------

@t.test
def a_model_folder_that_is_missing():
    with t.folder() as tmp:
        refused(tmp, 1, [tmp + "/no-model", "No such file"], model=tmp + "/no-model")


@t.test
def a_model_without_weights():
    with t.folder() as tmp:
        model = copy_model(tmp)
        os.remove(model + "/model.safetensors")
        refused(tmp, 1, [model, "model.safetensors"], model=model)


@t.test
def a_safetensors_file_that_is_cut():
    with t.folder() as tmp:
        model = copy_model(tmp)
        size = os.path.getsize(model + "/model.safetensors")
        for length in (size - 1, size // 2, 3000, 8, 5, 0):
            os.truncate(model + "/model.safetensors", 0)
            with open(f"{t.MODEL}/model.safetensors", "rb") as whole, \
                    open(model + "/model.safetensors", "wb") as cut:
                cut.write(whole.read(length))
            refused(tmp, 1, [model + "/model.safetensors", "truncated"], model=model)


@t.test
def a_header_that_lies():
    name = "model.layers.2.mlp.up_proj.weight"

    def wrong_shape_for_size(header):
        header[name]["shape"] = [172, 65]

    def overlap(header):
        first, last = header[name]["data_offsets"]
        header[name]["data_offsets"] = [first - 4, last - 4]

    def unknown_dtype(header):
        header[name]["dtype"] = "I32"

    def past_the_end(header):
        for entry in header.values():
            if "data_offsets" in entry:
                entry["data_offsets"] = [offset + 2 ** 40 for offset in entry["data_offsets"]]

    for change, part in ((wrong_shape_for_size, name), (overlap, "overlaps"),
                         (unknown_dtype, "I32"), (past_the_end, "hole")):
        with t.folder() as tmp:
            model = copy_model(tmp)
            rewrite_header(model, change)
            refused(tmp, 1, [model + "/model.safetensors", part], model=model)


@t.test
def a_tensor_of_the_wrong_shape():
    def transpose(header):
        header["model.layers.1.mlp.up_proj.weight"]["shape"].reverse()

    with t.folder() as tmp:
        model = copy_model(tmp)
        rewrite_header(model, transpose)
        refused(tmp, 1, ["model.layers.1.mlp.up_proj.weight", "[64, 172]", "[172, 64]"],
                model=model)


@t.test
def a_tensor_that_is_missing():
    def rename(header):
        header["model.layers.3.mlp.up.weight"] = header.pop("model.layers.3.mlp.up_proj.weight")

    with t.folder() as tmp:
        model = copy_model(tmp)
        rewrite_header(model, rename)
        refused(tmp, 1, "'model.layers.3.mlp.up_proj.weight' is missing", model=model)


@t.test
def a_tensor_with_a_name_of_300_characters_is_named_in_full():
    """No file is named after a tensor, so no length of names can fail later than here."""
    name = "n" * 300
    with t.folder() as tmp:
        model = copy_model(tmp)
        tensors = t.read_model(model)[1]
        t.write_safetensors(model + "/model.safetensors",
                            {**tensors, name: t.Tensor("BF16", [2], bytes(4))})
        refused(tmp, 1, [name, "is not part of the model"], "--optimizer", "nvme", model=model)


@t.test
def a_shard_that_is_missing():
    with t.folder() as tmp:
        shutil.copytree(t.MODEL + "/sharded", tmp + "/model")
        os.remove(tmp + "/model/model-00002-of-00003.safetensors")
        refused(tmp, 1, ["model-00002-of-00003.safetensors", "missing"], model=tmp + "/model")


@t.test
def a_configuration_that_is_not_honoured():
    for field, value in (("attention_bias", True), ("model_type", "qwen2"), ("sliding_window", 16),
                         ("hidden_act", "gelu"), ("quantization_config", {"bits": 4}),
                         ("logit_scale", 0.5)):
        with t.folder() as tmp:
            model = copy_model(tmp)
            change_config(model, **{field: value})
            refused(tmp, 1, [model + "/config.json", field], model=model)
    with t.folder() as tmp:
        model = copy_model(tmp)
        with open(model + "/config.json", "w", encoding="utf-8") as file:
            file.write("{\n  \"hidden_size\": ,\n}\n")
        refused(tmp, 1, [model + "/config.json", "line 2"], model=model)


# ---- data --------------------------------------------------------------------------------------

@t.test
def a_token_outside_the_vocabulary():
    with t.folder() as tmp:
        tokens = t.read_tokens(TRAIN)[:5000]
        tokens[4321] = 512
        t.write_tokens(tmp + "/bad.bin", tokens)
        refused(tmp, 1, [tmp + "/bad.bin", "token 4321 ", " 512"], data=tmp + "/bad.bin")


@t.test
def token_files_that_are_missing_empty_odd_or_short():
    with t.folder() as tmp:
        data = tmp + "/data.bin"
        refused(tmp, 1, [data, "No such file"], data=data)
        for content, part in ((b"", "empty"), (b"\1\0" * 100 + b"\1", "odd length"),
                              (b"\1\0" * 32, "too few")):
            with open(data, "wb") as file:
                file.write(content)
            refused(tmp, 1, [data, part], data=data)
        refused(tmp, 1, [data, "too few"], "--val", data)


@t.test
def masks_that_do_not_fit():
    with t.folder() as tmp:
        mask, count = tmp + "/mask", os.path.getsize(TRAIN) // 2
        refused(tmp, 1, [mask, "No such file"], "--mask", mask)
        for content, part in ((b"\1" * (count - 1), f"{count - 1} entries"),
                              (b"\1" * (count + 1), f"{count + 1} entries"),
                              (b"\1" * (count - 1) + b"\2", f"entry {count - 1} is 2"),
                              (b"", "empty")):
            with open(mask, "wb") as file:
                file.write(content)
            refused(tmp, 1, [mask, part], "--mask", mask)


@t.test
def documents_that_do_not_fit():
    with t.folder() as tmp:
        path, count = tmp + "/documents", os.path.getsize(TRAIN) // 2
        refused(tmp, 1, [path, "No such file"], "--documents", path)
        for offsets, part in (([0, 9, 9], "entry 2 is 9, the one before it 9"),
                              ([0, 9, 5, 20], "entry 2 is 5, the one before it 9"),
                              ([0, 9, count], f"entry 2 is {count}"),
                              ([1 << 63], f"has {count} tokens"), ([], "is empty")):
            with open(path, "wb") as file:
                file.write(struct.pack(f"<{len(offsets)}Q", *offsets))
            refused(tmp, 1, [path, part], "--documents", path)
        with open(path, "ab") as file:
            file.write(bytes(12))
        refused(tmp, 1, [path, "odd length: 12 bytes"], "--documents", path)
        refused(tmp, 1, ["--log", path], "--documents", path, "--log", path)


@t.test
def a_sequence_beyond_the_models_limit():
    with t.folder() as tmp:
        run = t.train(tmp + "/out", "--steps", "2", "--seq-len", "513")
        t.check(run.rc in (1, 2), "exit status", run)
        t.contains(run.stderr, "513", "the message", run)
        t.contains(run.stderr, "512", "the message", run)
        t.equal(picture(tmp), {}, "the files afterwards", run)


# ---- the store ---------------------------------------------------------------------------------

@contextlib.contextmanager
def mounted(path, options):
    os.makedirs(path)
    made = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True).returncode == 0
    if not made:
        t.skip("mounting needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@t.test
def an_nvme_folder_that_is_missing():
    with t.folder() as tmp:
        refused(tmp, 1, [tmp + "/no-drive", "No such file"], "--optimizer", "nvme", "--nvme",
                tmp + "/no-drive")


@t.test
def an_nvme_folder_that_is_a_file():
    with t.folder() as tmp:
        with open(tmp + "/file", "wb") as file:
            file.write(b"precious")
        refused(tmp, 1, tmp + "/file", "--optimizer", "nvme", "--nvme", tmp + "/file")


@t.test
def an_nvme_folder_of_the_model():
    with t.folder() as tmp:
        model = copy_model(tmp)
        os.mkdir(model + "/store")
        for path in (model, model + "/store", model + "/store/../"):
            refused(tmp, 1, ["--nvme " + path, "the model's own folder"], "--optimizer", "nvme",
                    "--nvme", path, model=model)


@t.test
def an_nvme_folder_that_is_read_only():
    with t.folder() as tmp, mounted(tmp + "/drive", "ro,size=64m") as drive:
        refused(tmp, 1, [drive, "ead-only"], "--optimizer", "nvme", "--nvme", drive)


@t.test
def an_output_folder_without_room_for_the_model():
    """Found before the first step; what a restart replaces counts as free."""
    with t.folder() as tmp, mounted(tmp + "/drive", "size=1100k") as drive:
        with open(drive + "/filler", "wb") as file:
            file.write(bytes(800 << 10))
        run = t.train(drive + "/out", *SHORT, "--optimizer", "host", rc=1)
        for part in ("the model needs", "307 kB", "free"):
            t.contains(run.stderr, part, "the message", run)
        t.check("step" not in run.stdout.split("bytes:")[1], "a step was made", run)
        t.equal(os.listdir(drive), ["filler"], "the files afterwards", run)
        os.remove(drive + "/filler")
        t.train(drive + "/out", *SHORT, "--optimizer", "host", rc=0)
        t.train(drive + "/out", *SHORT, "--optimizer", "host", "--restart", rc=0)


@t.test
def a_restart_that_is_refused_for_a_full_disk_keeps_the_commit():
    more = ["--optimizer", "nvme", "--keep-store", "--schedule", "constant"]
    with t.folder() as tmp, mounted(tmp + "/drive", "size=1100k") as drive:
        os.mkdir(tmp + "/store")
        more += ["--nvme", tmp + "/store"]
        t.train(drive + "/out", *SHORT, *more, rc=0)
        shutil.rmtree(drive + "/out")
        with open(drive + "/filler", "wb") as file:
            file.write(bytes(900 << 10))
        run = t.train(drive + "/out", *SHORT, *more, "--restart", rc=1)
        t.contains(run.stderr, "the model needs", "the message", run)
        os.remove(drive + "/filler")
        run = t.train(drive + "/out", *SHORT, *more, "--resume", rc=0)
        t.contains(run.stdout, "going on after step", "the commit is there", run)


@t.test
def an_nvme_folder_that_is_full():
    with t.folder() as tmp, mounted(tmp + "/drive", "size=256k") as drive:
        run = refused(tmp, 1, drive, "--optimizer", "nvme", "--nvme", drive)
        t.check("full" in run.stderr or "space" in run.stderr, "the message names the cause", run)


def has_direct_io(folder):
    try:
        os.close(os.open(folder + "/probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(folder + "/probe")
    return True


@t.test
def an_nvme_folder_on_tmpfs_works():
    with t.folder() as tmp, mounted(tmp + "/drive", "size=64m") as drive:
        run = t.train(tmp + "/out", *SHORT, "--optimizer", "nvme", "--nvme", drive, rc=0)
        if not has_direct_io(drive):
            t.contains(run.stderr, "O_DIRECT", "the warning", run)
        t.equal(sorted(t.read_model(tmp + "/out")[1]), sorted(t.read_model(t.MODEL)[1]), "tensors")


# ---- the command line --------------------------------------------------------------------------

@t.test
def no_command_or_an_unknown_one():
    run = t.spillway(rc=2)
    t.contains(run.stderr, "usage: spillway", "the message", run)
    run = t.spillway("trian", rc=2)
    t.contains(run.stderr, "the nearest is 'train'", "the message", run)
    for args in (["--help"], ["help"], ["-h"]):
        run = t.spillway(*args, rc=0)
        for command in ("train", "inspect", "init", "doctor"):
            t.contains(run.stdout, command, "the help", run)
    t.contains(t.spillway("--version", rc=0).stdout, "spillway ", "the version")


@t.test
def help_everywhere():
    for command in ("train", "inspect", "init"):
        run = t.spillway(command, "--help", rc=0)
        t.contains(run.stdout, f"usage: spillway {command}", "the help", run)
        t.equal(run.stderr, "", "standard error", run)


@t.test
def shares_that_leave_none():
    with t.folder() as tmp:
        for text in ("host:100%,nvme", "host:100%,nvme:5%"):
            run = refused(tmp, 2, "no share is left for 'nvme", "--optimizer", text)
            t.check("host:60%" not in run.stderr, "an example that does not help", run)
        refused(tmp, 2, "as in host:60%,nvme", "--optimizer", "host,nvme")


@t.test
def unknown_options_and_keys():
    with t.folder() as tmp:
        refused(tmp, 2, ["--sequence-length", "--seq-len"], "--sequence-length", "64")
        with open(tmp + "/run.toml", "w", encoding="utf-8") as file:
            file.write("lr = 1e-3\nweight-decy = 0.1\n")
        refused(tmp, 2, [tmp + "/run.toml", "line 2", "weight-decay"], "--config",
                tmp + "/run.toml")
        with open(tmp + "/run.toml", "w", encoding="utf-8") as file:
            file.write("lr = = 3\n")
        refused(tmp, 2, [tmp + "/run.toml", "line 1, column "], "--config", tmp + "/run.toml")
        refused(tmp, 2, tmp + "/none.toml", "--config", tmp + "/none.toml")


@t.test
def bad_values_and_what_is_missing():
    with t.folder() as tmp:
        refused(tmp, 2, ["--lr", "'fast'"], "--lr", "fast")
        refused(tmp, 2, ["--schedule", "'step'", "cosine"], "--schedule", "step")
        refused(tmp, 2, ["--micro-batch", "0"], "--micro-batch", "0")
        refused(tmp, 2, ["--steps", "twice"], "--steps", "5")
        refused(tmp, 2, ["--log", "needs a value"], "--log")
        run = t.spillway("train", "--model", t.MODEL, "--data", TRAIN, rc=2)
        t.contains(run.stderr, "--out", "the message", run)


@t.test
def contradictory_options():
    with t.folder() as tmp:
        refused(tmp, 2, ["--overlap backward", "--clip 0"], "--overlap", "backward")
        refused(tmp, 2, ["--nvme", "placement on nvme"], "--nvme", tmp)
        refused(tmp, 2, ["--write-budget", "placement on nvme"], "--write-budget", "1G")
        refused(tmp, 2, ["--sqpoll", "placement on nvme"], "--sqpoll")
        refused(tmp, 2, ["--iopoll", "placement on nvme"], "--iopoll")
        refused(tmp, 2, ["--keep-store", "--commit-every 0"], "--keep-store", "--commit-every", "0")
        refused(tmp, 2, ["--resume", "--restart"], "--resume", "--restart")
        refused(tmp, 2, ["--eval-every", "--val"], "--eval-every", "1")
        refused(tmp, 2, ["--min-lr", "constant"], "--schedule", "constant", "--min-lr", "1e-6")
        refused(tmp, 2, ["--min-lr", "--lr"], "--min-lr", "1", "--lr", "1e-3")
        refused(tmp, 2, ["--warmup", "--steps"], "--warmup", "3")


@t.test
def an_output_folder_that_is_not_empty():
    with t.folder() as tmp:
        os.makedirs(tmp + "/out")
        with open(tmp + "/out/thesis.txt", "w", encoding="utf-8") as file:
            file.write("do not lose this")
        refused(tmp, 1, [tmp + "/out", "not empty", "--restart"])
        with open(tmp + "/file", "w", encoding="utf-8") as file:
            file.write("nor this")
        before = picture(tmp)
        t.train(tmp + "/file", *SHORT, rc=1)
        t.equal(picture(tmp), before, "the files afterwards")


@t.test
def what_is_no_file_is_not_replaced_by_one():
    """--trace is renamed into its place. Never a real device: as root it would be gone."""
    with t.folder() as tmp:
        os.mkfifo(tmp + "/pipe")
        os.mkfifo(tmp + "/b.partial")
        os.symlink("/dev/null", tmp + "/null")
        os.mkdir(tmp + "/folder")
        before = entries(tmp)
        for option, name, part in (("--trace", "pipe", "pipe"), ("--trace", "null", "device"),
                                   ("--trace", "folder", "folder"), ("--log", "folder", "folder"),
                                   ("--trace", "b", "b.partial")):
            run = t.train(tmp + "/out", *SHORT, option, f"{tmp}/{name}", rc=1, timeout_s=20)
            t.contains(run.stderr, f"error: {option} {tmp}/{name}", "the message", run)
            t.contains(run.stderr, part, "the message", run)
            t.equal(entries(tmp), before, f"the files after {option} {name}", run)
        t.train(tmp + "/out", *SHORT, "--log", tmp + "/null", rc=0)  # discards it


@t.test
def restart_replaces_an_earlier_run():
    with t.folder() as tmp:
        t.train(tmp + "/out", *SHORT, rc=0)
        refused(tmp, 1, ["not empty", "--restart"])
        t.train(tmp + "/out", *SHORT, "--restart", rc=0)
        t.spillway("inspect", tmp + "/out", rc=0)


@t.test
def inspect_and_init_refuse_too():
    with t.folder() as tmp:
        run = t.spillway("inspect", rc=2)
        t.contains(run.stderr, "DIR", "the message", run)
        run = t.spillway("inspect", tmp, rc=1)
        t.contains(run.stderr, "config.json", "the message", run)
        config = t.MODEL + "/config.json"
        os.makedirs(tmp + "/full")
        with open(tmp + "/full/config.json", "w", encoding="utf-8") as file:
            file.write("{}")
        before = picture(tmp)
        run = t.spillway("init", "--config", config, "--out", tmp + "/full", rc=1)
        t.contains(run.stderr, "not empty", "the message", run)
        run = t.spillway("init", "--config", tmp + "/full/config.json", "--out", tmp + "/new", rc=1)
        t.contains(run.stderr, "model_type", "the message", run)
        run = t.spillway("init", "--config", config, "--out", tmp + "/no/parent", rc=1)
        t.contains(run.stderr, tmp + "/no/parent", "the message", run)
        t.spillway("init", "--config", config, rc=2)
        t.equal(picture(tmp), before, "the files afterwards")


@t.test
def init_and_inspect_agree():
    with t.folder() as tmp:
        t.spillway("init", "--config", t.MODEL, "--out", tmp + "/a", "--seed", "5", rc=0)
        t.spillway("init", "--config", t.MODEL, "--out", tmp + "/b", "--seed", "5", rc=0)
        t.spillway("init", "--config", t.MODEL, "--out", tmp + "/c", "--seed", "6", rc=0)
        weights = [t.read_model(f"{tmp}/{name}")[1] for name in "abc"]
        t.check(weights[0] == weights[1], "equal seeds give different weights")
        t.check(weights[0] != weights[2], "different seeds give equal weights")
        report = json.loads(t.spillway("inspect", tmp + "/a", "--json", rc=0).stdout)
        t.equal(report["schema"], 1, "schema")
        t.equal(report["parameters"], 260032, "parameters")
        t.equal(sum(unit["parameters"] for unit in report["units"]), 260032,
                "parameters of the units")
        t.equal([file["dtype"] for file in report["files"]], ["BF16"], "dtype")
        t.contains(t.spillway("inspect", tmp + "/a", rc=0).stdout, "260032 parameters", "the text")


if __name__ == "__main__":
    t.main()
