"""`spillway plan`: what it says of a model on a machine, that it counts as train counts, and what
it refuses. And `spillway bench all`, which measures the machine that it plans for."""
import json
import os
import shlex
import signal

import support as t

PEAKS = ("8xh100", "8xh200", "8xa100", "4xa100-40g", "rtx4090", "rtx5090")


def plan(*args, rc=0, env=None):
    run = t.spillway("plan", *args, "--json", rc=rc, env=env)
    return json.loads(run.stdout)


def row(report, scheme):
    return next(r for r in report["schemes"] if r["scheme"] == scheme)


def no_profile(tmp):
    return {"SPILLWAY_PROFILE": os.path.join(tmp, "no.json")}


# ---- the arithmetic ----

@t.test
def known_numbers_stand_in_the_text():
    run = t.spillway("plan", "--model", "7B", "--machine", "8xh100", "--no-search", rc=0)
    t.contains(run.stdout, "112 GB in all, 14 GB per GPU over 8", "7B", run)
    run = t.spillway("plan", "--model", "70B", "--machine", "8xh100", "--no-search", rc=0)
    t.check("placements were looked at" not in run.stdout, "a search that nobody wants", run)
    t.contains(run.stdout, "1,120 GB in all, 140 GB per GPU over 8", "70B", run)
    t.contains(run.stdout, "46.2 GB", "QLoRA with 1% adapters", run)
    for word in ("16", "4 + 12/N", "2 + 14/N", "16/S", "16/N", "2/N", "kept whole", "every K-th",
                 "sqrt(L)", "LoRA", "8-bit moments", "tensor parallel", "pipeline parallel",
                 "1.31 MB", "nearest known", "llama-3-70b"):
        t.contains(run.stdout, word, "the tables", run)


@t.test
def json_has_plain_numbers():
    report = plan("--model", "70B", "--machine", "8xh100", "--seq-len", "4096", "--no-search")
    t.equal(report["search"]["searched"], False, "no search")
    t.equal(report["schema"], 1, "schema")
    t.equal(report["state"], {"bytes_per_param": 16, "bytes": 1120000000000}, "state")
    t.equal(row(report, "ZeRO-3")["gpu_bytes"], 140000000000, "ZeRO-3")
    t.equal(row(report, "ZeRO-1")["gpu_bytes_per_param"], 5.5, "ZeRO-1")
    t.equal(row(report, "ZeRO-2")["gpu_bytes_per_param"], 3.75, "ZeRO-2")
    t.equal([b["gpu_bytes"] for b in report["beside"] if b["beside"].startswith("QLoRA")],
            [46200000000], "QLoRA")
    t.equal(report["activations"][1]["bytes_per_token"], 1310720, "kept inputs")
    t.equal(report["step"]["tokens"], 8 * 4096, "tokens")
    t.equal(report["model"]["kind"], "count", "kind")
    t.equal(report["machine"]["drives"][7]["read_bytes_per_s"], 14e9, "a drive")


@t.test
def a_family_that_train_refuses_is_said_to_be_one():
    run = t.spillway("plan", "--model", "qwen2.5-7b", "--machine", "8xh100", "--no-search", rc=0)
    t.contains(run.stdout, "7,615,616,512 parameters", "the published count", run)
    t.contains(run.stdout, "129,024 of them are biases", "what train does not take", run)
    t.contains(run.stdout, "refuses", "what train does not take", run)


# ---- one count for plan and train ----

@t.test
def bytes_are_those_of_train():
    """The table of every placement, row by row, with the command line that plan offers."""
    for number, args in enumerate((
            [], ["--seq-len", 64, "--micro-batch", 2, "--accumulate", 3],
            ["--ranks", 2, "--zero", 3], ["--ranks", 3, "--optimizer", "nvme"],
            ["--params", "host", "--optimizer", "host:50%,nvme"],
            ["--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme",
             "--activations", "nvme", "--checkpoint-every", 2],
            ["--moments", "8bit", "--master", "split"], ["--dtype", "fp32", "--chunk", "64Ki"],
            ["--freeze", "model.layers.0.*", "--optimizer", "device"])):
        with t.folder() as tmp:
            report = plan("--model", t.MODEL, "--device", "host", "--data",
                          t.STORIES + "/train.bin", "--out", tmp + "/out", *args,
                          env=no_profile(tmp))
            t.check(report["decision"]["fits"], f"case {number} does not fit")
            words = report["decision"]["command"]
            run = t.spillway(*words, "--dry-run", rc=0, env=no_profile(tmp))
            totals = t.totals(run.stdout)
            need = report["decision"]["steps"][-1]["need_bytes"]
            for r in report["decision"]["rows"]:
                t.close(t.table(run.stdout, r["tier"], r["what"]), r["bytes"], 0.005,
                        f"{r['tier']} {r['what']} of case {number}", relative=True, run=run)
            for tier in ("device", "host", "nvme"):
                rows = sum(r["bytes"] for r in report["decision"]["rows"] if r["tier"] == tier)
                t.equal(rows, need[tier], f"{tier} of case {number}", run)
                t.close(totals.get(tier, 0), rows, 0.005, f"{tier} of case {number}",
                        relative=True, run=run)


@t.test
def the_offered_line_trains():
    with t.folder() as tmp:
        run = t.spillway("plan", "--model", t.MODEL, "--data", t.STORIES + "/train.bin", "--out",
                         tmp + "/out it", "--steps", 2, "--seq-len", 32, "--device", "host", rc=0)
        line = run.stdout.splitlines()[-1].strip()
        t.contains(line, " train ", "the line", run)
        done = t.spillway(*shlex.split(line)[1:], rc=0)
        t.contains(done.stdout, "the model is in", "the training", done)


@t.test
def a_config_file_alone_is_enough():
    with t.folder() as tmp:
        by_folder = plan("--model", t.MODEL, "--machine", "rtx4090")
        by_file = plan("--model", t.MODEL + "/config.json", "--machine", "rtx4090")
        t.equal(by_file["decision"]["rows"], by_folder["decision"]["rows"], "the rows")
        t.equal(by_file["decision"]["command"], by_folder["decision"]["command"], "the line")
        path = tmp + "/run.toml"
        with open(path, "w", encoding="utf-8") as file:
            file.write('seq_len = 64\noptimizer = "nvme"\nnvme = ["/fast"]\n')
        told = plan("--model", t.MODEL, "--machine", "rtx4090", "--config", path)
        t.equal(told["step"]["tokens_per_rank"], 64, "tokens")
        t.equal(told["decision"]["scheme"], "offload optimizer", "scheme")
        t.contains(told["decision"]["command"], "--config", "the line")


# ---- the decision ----

@t.test
def the_rule_in_words():
    for machine, args, words in (
            ("8xh100", ["--model", "smollm2-135m"], "fits with data parallel: use it"),
            ("8xh100", ["--model", "7B"], "The optimizer state is what hurts: stage 1"),
            ("8xh100:gpu-memory=28G", ["--model", "llama-3-8b"], "stage 3 shards them"),
            ("8xh100", ["--model", "llama-3-70b"], "the optimizer leaves them, in RAM"),
            ("8xh100:ram=500G", ["--model", "llama-3-70b"], "in RAM and the rest on NVMe"),
            ("rtx4090", ["--model", "llama-3-70b"], "Not even the weights fit"),
            ("8xh100", ["--model", "llama-3-70b", "--seq-len", 8192, "--micro-batch", 4],
             "Activations bind")):
        run = t.spillway("plan", "--machine", machine, *args, "--no-search", rc=0)
        text = " ".join(run.stdout.split())
        t.contains(text, words, machine, run)
        t.contains(run.stdout.splitlines()[-1], " train ", "the line", run)


@t.test
def what_does_not_fit_ends_with_1_and_says_what_is_missing():
    run = t.spillway("plan", "--model", "llama-3-70b", "--machine", "8xh100:ram=100G,nvme=none",
                     rc=1)
    text = " ".join(run.stdout.split())
    t.contains(text, "Nothing fits", "the conclusion", run)
    t.contains(text, "GB of RAM are missing", "the shortfall", run)
    t.contains(text, "no drives", "the remedy", run)
    t.check("run:" not in run.stdout, "a line for what does not fit", run)
    report = plan("--model", "llama-3-70b", "--machine", "8xh100:ram=100G,nvme=none", rc=1)
    t.equal((report["decision"]["fits"], report["decision"]["command"]), (False, None), "JSON")


@t.test
def names_and_options_are_in_the_help():
    run = t.spillway("plan", "--help", rc=0)
    for word in (*PEAKS, "llama-3-405b", "smollm2-135m", "--machine", "--nodes", "--json",
                 "--tokens", "--trace",
                 "--optimizer", "ram=SIZE", "nvme=NxCLASS", "exit status"):
        t.contains(run.stdout, word, "the help", run)
    bench_help = t.spillway("bench", "all", "--help", rc=0)
    for word in ("--nvme", "--seconds", "--size", "--profile", "--json", "SPILLWAY_PROFILE"):
        t.contains(bench_help.stdout, word, "the help", bench_help)
    t.contains(t.spillway("bench", "--help", rc=0).stdout, "all", "the benchmarks")
    t.check("--dry-run" not in run.stdout, "--dry-run, which plan has not", run)
    t.contains(t.spillway("--help", rc=0).stdout, "plan", "the commands")


@t.test
def bad_command_lines_are_refused():
    with t.folder() as tmp:
        for args, word, rc in (
                ([], "--model", 2),
                (["--model", "llama-4"], "llama-3-8b", 1),
                (["--model", "7B", "--machine", "9xh100"], "8xh100", 1),
                (["--model", "7B", "--machine", "8xh100:ram=1T,nvme"], "NAME=VALUE", 1),
                (["--model", "7B", "--machine", "8xh100", "--ranks", 9], "8 GPUs", 2),
                (["--model", "7B", "--machine", "8xh100", "--nodes", 9], "64", 2),
                (["--model", "7B", "--machine", "8xh100:gpus=0", "--device", "cuda"], "no GPU", 2),
                (["--model", "7B", "--machine", "8xh100", "--seq-len", 99999], "limit", 2),
                (["--model", "7B", "--machine", "8xh100", "--freeze", "nothing"], "nothing", 2),
                (["--model", "7B", "--machine", "8xh100", "--params", "host", "--optimizer",
                  "device"], "leave some", 2),
                (["--model", "7B", "--machine", "8xh100", "--resume", "--restart"], "exclude", 2),
                (["--model", "7B", "--machine", "8xh100", "--overlap", "backward"], "--clip 0", 2),
                (["--model", "7B", "--machin", "8xh100"], "--machine", 2)):
            run = t.spillway("plan", *args, rc=rc, env=no_profile(tmp))
            t.contains(run.stderr, word, "the message", run)
            t.equal(run.stdout, "", "standard output", run)


# ---- bench all ----

def bench(tmp, *args):
    return ("bench", "all", "--seconds", "0.4", "--size", "8Mi", "--nvme", tmp, *args)


@t.test
def this_machine_is_measured_into_a_profile_that_plan_reads():
    with t.folder() as tmp:
        path = tmp + "/my machine.json"
        run = t.spillway(*bench(tmp, "--profile", path), rc=0)
        t.contains(run.stderr, "about 2 seconds", "what it will take", run)
        t.contains(run.stderr, path, "where it is kept", run)
        for word in ("memory", "copies", "both at once", "pageable", "products", "ranks", "mixed",
                     "commits"):
            t.contains(run.stdout, word, "the figures", run)
        with open(os.path.join(t.ROOT, path), encoding="utf-8") as file:
            kept = json.load(file)
        machine = kept["machine"]
        for figure in ("cores", "cpus", "memory_bytes", "flops_per_s", "h2d_bytes_per_s",
                       "d2h_bytes_per_s", "both_bytes_per_s", "h2d_pageable_bytes_per_s",
                       "d2h_pageable_bytes_per_s", "gather_bytes_per_s", "scatter_bytes_per_s",
                       "round_bytes_per_s", "commit_s"):
            t.check(machine[figure] > 0, f"{figure} is {machine[figure]}", run)
        for node in kept["numa_nodes"]:
            t.check(min(node.values()) > 0, f"a figure of {node}", run)
        drive = kept["drives"][0]
        for figure in ("read", "write", "mixed"):
            t.check(drive[figure + "_bytes_per_s"] > 0, f"{figure} of {drive}", run)
        report = plan("--model", t.MODEL, "--machine", path)
        t.check(machine["commit_s"] < 1, f"a commit of {machine['commit_s']} s", run)
        t.equal([n for n in os.listdir(os.path.join(t.ROOT, tmp)) if n != "my machine.json"], [],
                "what is left")
        for figure in ("cores", "flops_per_s", "both_bytes_per_s", "commit_s"):
            t.equal(report["machine"][figure], machine[figure], figure)
        t.equal(report["machine"]["measured"], machine["measured"], "the date")
        t.close(report["machine"]["adam_bytes_per_s"],
                sum(n["adam_bytes_per_s"] for n in kept["numa_nodes"]), 1e-9, "adam", relative=True)
        t.equal(report["machine"]["drives"][0]["read_bytes_per_s"], drive["read_bytes_per_s"],
                "the drive")
        text = t.spillway("plan", "--model", t.MODEL, "--machine", path, rc=0).stdout
        t.contains(text, "measured on " + machine["measured"], "the text")
        t.contains(text, kept["about"], "the text")


@t.test
def operations_of_a_model_are_measured_for_its_plans():
    """Beside what the profile has; a plan of these rows takes them, one of others does not."""
    with t.folder() as tmp:
        path = os.path.join(tmp, "m.json")
        rates = {"cores": 2, "memory_bytes": 8e9, "memory_bytes_per_s": 1e13,
                 "adam_bytes_per_s": 1e13, "h2d_bytes_per_s": 1e13, "d2h_bytes_per_s": 1e13,
                 "both_bytes_per_s": 1e13, "flops_per_s": 1e15}
        with open(os.path.join(t.ROOT, path), "w", encoding="utf-8") as file:
            json.dump({"schema": 1, "about": "made up", "machine": rates, "drives": []}, file)
        args = ("--seq-len", 32, "--micro-batch", 2)
        run = t.spillway("bench", "model", t.MODEL, *args, "--seconds", "0.5", "--profile", path,
                         "--json", rc=0)
        times = json.loads(run.stdout)["times"]
        t.check(min(times.values()) > 0, f"times that are nothing: {times}", run)
        with open(os.path.join(t.ROOT, path), encoding="utf-8") as file:
            kept = json.load(file)
        t.equal(kept["machine"], rates, "what was there before")
        t.equal(list(kept["models"].values()), [times], "what is kept")
        t.spillway("bench", "model", t.MODEL, *args, "--ranks", 2, "--seconds", "0.3", "--profile",
                   path, rc=0)
        with open(os.path.join(t.ROOT, path), encoding="utf-8") as file:
            shared = json.load(file)["models"]
        t.equal(sorted(key.endswith(", 2 ranks") for key in shared), [False, True], "of two ranks")
        placed = ("--params", "device", "--optimizer", "device", "--gradients", "device",
                  "--activations", "device", "--overlap", "none", "--checkpoint-every", 2)
        fixed = ("--model", t.MODEL, "--machine", path, "--device", "host", *placed)
        told = plan(*fixed, *args)["search"]["compute_s"]
        # Five layers in groups of two: two of them are computed forward again.
        t.close(told, 7 * times["layer_forward_s"] + 5 * times["layer_backward_s"] +
                times["embed_forward_s"] + times["embed_backward_s"] + times["norm_forward_s"] +
                times["norm_backward_s"] + times["head_whole_s"], 1e-6, "a step", relative=True)
        t.check(plan(*fixed, "--seq-len", 64)["search"]["compute_s"] < told / 10, "other rows")
        for wrong, word in ((("llama-4",), "llama-3-8b"), ((t.MODEL, "--seq-len", 9999), "limit"),
                            ((), "MODEL")):
            run = t.spillway("bench", "model", *wrong)
            t.check(run.rc in (1, 2), f"exit status {run.rc}", run)
            t.contains(run.stderr, word, "the message", run)


@t.test
def without_a_name_it_is_the_users_profile():
    with t.folder() as tmp:
        env = {"SPILLWAY_PROFILE": os.path.join(tmp, "config", "machine.json")}
        run = t.spillway(*bench(tmp, "--json"), env=env, rc=0)
        report = json.loads(run.stdout)
        t.equal((report["schema"], len(report["done"])), (1, 6), "the parts", run)
        planned = plan("--model", t.MODEL, env=env)
        t.equal(planned["machine"]["flops_per_s"], report["machine"]["flops_per_s"], "products")
        t.equal(planned["machine"]["name"], "this machine", "the name")
        t.equal(len(planned["machine"]["drives"]), 1, "drives")
        unknown = plan("--model", t.MODEL, env=no_profile(tmp))
        t.equal(unknown["machine"]["flops_per_s"], 0, "products that nobody has measured")


@t.test
def an_interrupt_keeps_what_was_measured():
    with t.folder() as tmp:
        path = tmp + "/m.json"
        process = t.Process(["bench", "all", "--seconds", "2", "--size", "8Mi", "--nvme", tmp,
                             "--profile", path])
        process.wait_for("^memory ")
        process.signal(signal.SIGINT)
        run = process.finish(60)
        t.equal(run.rc, 130, "exit status", run)
        t.contains(run.stderr, "stopped after 1 of 6 parts, in copies", "the message", run)
        with open(os.path.join(t.ROOT, path), encoding="utf-8") as file:
            kept = json.load(file)
        t.check(kept["numa_nodes"][0]["adam_bytes_per_s"] > 0, "the update's rate", run)
        t.check("flops_per_s" not in kept["machine"], "a part that was not measured", run)
        planned = plan("--model", t.MODEL, "--machine", path)
        t.equal(planned["machine"]["flops_per_s"], 0, "what is unknown")


@t.test
def a_bench_that_cannot_be_is_refused():
    with t.folder() as tmp:
        for args, word, rc in ((["--seconds", "0"], "--seconds", 2), (["x"], "x", 2),
                               (["--size", "1M"], "--size", 2)):
            run = t.spillway("bench", "all", *args, rc=rc)
            t.contains(run.stderr, word, "the message", run)
        run = t.spillway("bench", "all", "--seconds", "0.2", "--nvme", tmp + "/absent", "--profile",
                         tmp + "/m.json", rc=1)
        t.contains(run.stderr, tmp + "/absent", "the message", run)
        t.check(os.path.exists(os.path.join(t.ROOT, tmp, "m.json")), "what came before is lost",
                run)


if __name__ == "__main__":
    t.main()
