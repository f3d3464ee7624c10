"""What a step means: batches, masks, order, schedule, clipping, skipped steps, signals, saving.

Where two runs must agree up to the order of sums, the limit is derived: FP32 sums of n terms in
another order differ by at most n * 2^-24 relative to the sum of magnitudes; gradients here are
means over a few hundred terms with some cancellation, so 1e-4 relative leaves two orders of
magnitude, and a lost or repeated micro-batch shows as 10% and more.
"""
import json
import math
import os
import re
import shlex
import shutil
import signal
import struct

import support as t

ORDER_OF_SUMS = 1e-4


def train(tmp, name, *args, rc=0, **options):
    log = f"{tmp}/{name}.jsonl"
    run = t.train(f"{tmp}/{name}", "--log", log, *args, **options)
    t.equal(run.rc, rc, f"exit status of {name}", run)
    return run, *(t.read_log(log) if os.path.exists(log) else ([], []))


def first_tokens(tmp, count, name="first.bin", source=t.SHAKESPEARE + "/train.bin"):
    path = f"{tmp}/{name}"
    t.write_tokens(path, t.read_tokens(source)[:count])
    return path


FP32 = ["--dtype", "fp32", "--order", "sequential", "--schedule", "constant", "--warmup", "0"]


# ---- batches -----------------------------------------------------------------------------------

def compare_splits(tmp, extra, data):
    """8 rows a step as 1, 2, 4 and 8 micro-batches: the same losses and norms over several
    steps."""
    reference = None
    for micro, accumulate in ((8, 1), (4, 2), (2, 4), (1, 8)):
        _, steps, _ = train(tmp, f"split-{micro}", *FP32, "--seq-len", 32, "--micro-batch", micro,
                            "--accumulate", accumulate, "--steps", 4, "--lr", "1e-3", *extra,
                            data=data)
        got = [(s["loss"], s["grad_norm"], s["tokens"]) for s in steps]
        reference = reference or got
        for (loss, norm, tokens), (want_loss, want_norm, want_tokens) in zip(got, reference):
            t.equal(tokens, want_tokens, f"tokens with {accumulate} micro-batches")
            t.close(loss, want_loss, ORDER_OF_SUMS, f"loss with {accumulate} micro-batches", True)
            t.close(norm, want_norm, ORDER_OF_SUMS, f"norm with {accumulate} micro-batches", True)
    return reference


@t.test
def micro_batches_add_up_to_the_batch():
    with t.folder() as tmp:
        compare_splits(tmp, [], first_tokens(tmp, 3000))


@t.test
def ragged_masks_are_one_mean_over_all_tokens():
    """Every micro-batch has another number of tokens that count, one of them none at all."""
    with t.folder() as tmp:
        data = first_tokens(tmp, 3001)
        mask = bytearray(3001)
        for i in range(3001):
            row = (i - 1) // 32 % 8  # byte i is about the prediction OF token i
            mask[i] = row != 5 and i % (row + 1) == 0
        with open(tmp + "/mask.bin", "wb") as file:
            file.write(mask)
        reference = compare_splits(tmp, ["--mask", tmp + "/mask.bin"], data)
        counts = [sum(mask[1 + 256 * s:257 + 256 * s]) for s in range(4)]
        t.equal([tokens for _, _, tokens in reference], counts, "tokens that count")


@t.test
def masked_rows_do_not_weigh():
    """A batch of a row and a fully masked row is that one row: the same loss and gradient norm."""
    with t.folder() as tmp:
        data = first_tokens(tmp, 65)
        with open(tmp + "/half.bin", "wb") as file:
            file.write(b"\1" * 33 + b"\0" * 32)
        common = [*FP32, "--seq-len", 32, "--steps", 1]
        _, one, _ = train(tmp, "one", *common, data=first_tokens(tmp, 33, "row.bin"))
        _, half, _ = train(tmp, "half", *common, "--micro-batch", 2, "--mask", tmp + "/half.bin",
                           data=data)
        for key in ("loss", "grad_norm"):
            t.close(half[0][key], one[0][key], ORDER_OF_SUMS, key, relative=True)


@t.test
def a_mask_of_ones_is_no_mask():
    with t.folder() as tmp:
        data = first_tokens(tmp, 1000)
        with open(tmp + "/ones.bin", "wb") as file:
            file.write(b"\1" * 1000)
        common = ["--seq-len", 32, "--steps", 3, "--digest"]
        plain = train(tmp, "plain", *common, data=data)
        masked = train(tmp, "masked", *common, "--mask", tmp + "/ones.bin", data=data)
        t.equal([s["loss"] for s in masked[1]], [s["loss"] for s in plain[1]], "losses")


@t.test
def a_batch_without_tokens_that_count_is_skipped():
    with t.folder() as tmp:
        data = first_tokens(tmp, 65)
        with open(tmp + "/zeros.bin", "wb") as file:
            file.write(b"\0" * 33 + b"\1" * 32)
        run, steps, _ = train(tmp, "half", "--seq-len", 32, "--steps", 2, "--order", "sequential",
                              "--mask", tmp + "/zeros.bin", data=data)
        t.equal([len(s["events"]) for s in steps], [1, 0], "skipped", run)
        t.contains(steps[0]["events"][0], "skipped", "event of step 1")


@t.test
def rows_follow_the_file_and_wrap_into_the_next_epoch():
    """193 tokens are 6 rows of 32; 4 rows a step: steps 1 and 4 see the same rows, as do 2 and 5.
    With a learning rate of 0 equal rows give equal losses."""
    with t.folder() as tmp:
        data = first_tokens(tmp, 193)
        _, steps, _ = train(tmp, "wrap", *FP32, "--seq-len", 32, "--micro-batch", 4, "--steps", 6,
                            "--lr", "0", data=data)
        losses = [s["loss"] for s in steps]
        t.equal(losses[3:], losses[:3], "losses of the second round")
        t.check(len(set(losses)) == 3, f"three different batches: {losses}")


@t.test
def one_batch_exactly_is_enough():
    with t.folder() as tmp:
        _, steps, _ = train(tmp, "exact", "--seq-len", 32, "--micro-batch", 2,
                            data=first_tokens(tmp, 65))
        t.equal([s["tokens"] for s in steps], [64], "one epoch is one step")


@t.test
def shuffle_is_a_function_of_the_seed():
    with t.folder() as tmp:
        losses = [[s["loss"] for s in train(tmp, f"seed-{i}", "--seq-len", 32, "--steps", 3,
                                            "--seed", seed)[1]]
                  for i, seed in enumerate((7, 7, 8))]
        t.equal(losses[0], losses[1], "losses with one seed")
        t.check(losses[0] != losses[2], "two seeds gave the same order")


# ---- schedule and clipping ---------------------------------------------------------------------

@t.test
def schedules_follow_their_formulas():
    steps, warmup, lr, low = 12, 3, 1e-3, 1e-4
    with t.folder() as tmp:
        for schedule in ("constant", "linear", "cosine"):
            floor = [] if schedule == "constant" else ["--min-lr", low]
            _, log, _ = train(tmp, schedule, "--seq-len", 8, "--steps", steps, "--lr", lr,
                              "--schedule", schedule, "--warmup", warmup, *floor)
            for s in log:
                done = s["step"] - 1
                progress = (done - warmup) / (steps - warmup)
                want = {"constant": lr, "linear": lr + (low - lr) * progress,
                        "cosine": low + (lr - low) * 0.5 * (1 + math.cos(math.pi * progress))}
                expected = lr * (done + 1) / warmup if done < warmup else want[schedule]
                t.close(s["lr"], expected, 1e-12, f"{schedule}, step {s['step']}", relative=True)


@t.test
def clipping_is_by_the_exact_global_norm():
    """The factor of the log is clip / (norm + 1e-6); a clip above every norm changes nothing."""
    with t.folder() as tmp:
        common = ["--seq-len", 32, "--steps", 3, "--lr", "1e-3", "--digest"]
        _, tight, _ = train(tmp, "tight", *common, "--clip", "0.5")
        for s in tight:
            want = min(1.0, 0.5 / (s["grad_norm"] + 1e-6))
            t.close(s["clip_factor"], want, 1e-12, "clip factor", relative=True)
            t.check(want < 1, "the clip took no effect, so this test says nothing")
        loose, off = (train(tmp, name, *common, "--clip", clip)[2][-2:]
                      for name, clip in (("loose", "1e9"), ("off", "0")))
        t.equal(loose[-1], off[-1], "digest with a loose clip and with none")


# ---- non-finite steps --------------------------------------------------------------------------

def overflowing_model(tmp):
    """A model whose loss is finite and whose gradient of the last down projection is not: the MLP's
    inner activations are near 1e37 and meet a zero matrix, the residual stream is tiny, so its
    gradient is large, and their product overflows FP32."""
    config = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
      "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
      "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
      "rms_norm_eps": 1e-20, "rope_theta": 10000.0, "hidden_act": "silu", "initializer_range": 0.02,
      "tie_word_embeddings": false, "torch_dtype": "float32"}"""
    with open(tmp + "/config.json", "w", encoding="utf-8") as file:
        file.write(config)
    t.spillway("init", "--config", tmp + "/config.json", "--seed", 1, "--out", tmp + "/model",
               "--dtype", "fp32", rc=0)
    path = tmp + "/model/model.safetensors"
    tensors = t.read_safetensors(path)

    def scale(name, factor):
        tensors[name].data = struct.pack(f"<{len(tensors[name].data) // 4}f",
                                         *(v * factor for v in tensors[name].floats()))

    scale("model.embed_tokens.weight", 1e-6)
    for layer in (0, 1):
        scale(f"model.layers.{layer}.self_attn.o_proj.weight", 0)
        scale(f"model.layers.{layer}.mlp.down_proj.weight", 0)
    scale("model.layers.1.mlp.gate_proj.weight", 1e20)
    scale("model.layers.1.mlp.up_proj.weight", 1e18)
    t.write_safetensors(path, tensors)
    return tmp + "/model"


OVERFLOW = "model.layers.1.mlp.down_proj.weight"


@t.test
def a_gradient_that_is_not_finite_skips_the_whole_step():
    with t.folder() as tmp:
        model = overflowing_model(tmp)
        common = ["--seq-len", 16, "--steps", 3, "--dtype", "fp32", "--lr", "1e-3"]
        for overlap in ("none", "forward"):
            for tier in ("device", "host", "nvme"):
                name = f"{overlap}-{tier}"
                _, steps, _ = train(tmp, name, *common, "--overlap", overlap, "--optimizer", tier,
                                    model=model)
                for s in steps:
                    t.check(math.isfinite(s["loss"]), "the loss itself is finite")
                    t.equal(len(s["events"]), 1, f"events of step {s['step']}")
                    t.contains(s["events"][0], OVERFLOW, "the event names the tensor")
                    t.contains(s["events"][0], "rank 0", "the event names the rank")
                before, after = t.read_model(model)[1], t.read_model(f"{tmp}/{name}")[1]
                t.check(before == after, f"{name}: a skipped step changed weights")
                t.check(len({s["loss"] for s in steps}) == 3, "the data did not advance")


@t.test
def too_many_skips_end_the_run():
    with t.folder() as tmp:
        run, steps, _ = train(tmp, "skips", "--seq-len", 16, "--steps", 9, "--dtype", "fp32",
                              "--max-skips", "2", model=overflowing_model(tmp), rc=1)
        t.contains(run.stderr, "--max-skips", "the message")
        t.equal(len(steps), 2, "steps in the log before the end", run)
        t.check(not os.path.exists(tmp + "/skips"), "something was left in the output folder", run)


@t.test
def backward_mode_stops_at_a_gradient_that_is_not_finite():
    with t.folder() as tmp:
        model = overflowing_model(tmp)
        for tier in ("device", "host", "nvme"):
            run, _, _ = train(tmp, f"backward-{tier}", "--seq-len", 16, "--steps", 3, "--dtype",
                              "fp32", "--clip", 0, "--overlap", "backward", "--optimizer", tier,
                              model=model, rc=1)
            t.contains(run.stderr, OVERFLOW, "the message names the tensor")


@t.test
def a_loss_that_is_not_finite_skips_the_step():
    with t.folder() as tmp:
        model = overflowing_model(tmp)
        path = model + "/model.safetensors"
        tensors = t.read_safetensors(path)
        values = [math.nan] + list(tensors["lm_head.weight"].floats())[1:]
        tensors["lm_head.weight"].data = struct.pack(f"<{len(values)}f", *values)
        t.write_safetensors(path, tensors)
        for overlap, clip in (("none", 1), ("forward", 1), ("backward", 0)):
            run, steps, _ = train(tmp, overlap, "--seq-len", 16, "--steps", 2, "--dtype", "fp32",
                                "--overlap", overlap, "--clip", clip, "--optimizer", "nvme",
                                model=model)
            t.equal([s["loss"] for s in steps], [None, None], "a NaN is null in the log")
            t.contains(steps[0]["events"][0], "loss", "the event")
            t.contains(run.stdout, "loss nan", "the line of progress", run)
            t.check("-nan" not in run.stdout, "a sign of what is no number", run)
            t.check(t.read_model(model)[1] == t.read_model(f"{tmp}/{overlap}")[1],
                    "a skipped step changed weights")


# ---- precision ---------------------------------------------------------------------------------

@t.test
def small_updates_move_the_master_of_a_bf16_run():
    """A learning rate of 1e-5 is far below the spacing of BF16 weights; over 60 steps the masters
    must add it up, so that some weights do move."""
    with t.folder() as tmp:
        run, _, _ = train(tmp, "slow", "--seq-len", 16, "--steps", 60, "--lr", "1e-5", "--schedule",
                          "constant", "--weight-decay", 0)
        t.contains(run.stdout, "dtype=bf16", "types are printed at start")
        t.contains(run.stdout, "grad_dtype=bf16", "types are printed at start")
        before, after = t.read_model(t.MODEL)[1], t.read_model(tmp + "/slow")[1]
        moved = total = 0
        for name in before:
            for a, b in zip(before[name].floats(), after[name].floats()):
                moved += t.bf16_bits(a) != t.bf16_bits(b)
                total += 1
        # 60 steps of about 1e-5 are 6e-4 of a weight near 1 and more of a smaller one, the spacing
        # is 2^-8 relative: at least one weight in 20 must have crossed a border.
        t.check(moved > total / 20, f"{moved} of {total} weights moved")


# ---- threads -----------------------------------------------------------------------------------

@t.test
def device_threads_are_in_the_numerics_key():
    """The operators' team may change the order of sums in a product, so it is part of the key; the
    losses agree up to that order."""
    with t.folder() as tmp:
        keys, losses = [], []
        for threads in (1, 2):
            _, steps, others = train(tmp, f"threads-{threads}", *FP32, "--seq-len", 64,
                                     "--steps", 3, "--lr", "1e-3", "--device-threads", threads)
            keys.append(others[0]["numerics_key"])
            losses.append([s["loss"] for s in steps])
            t.equal(others[0]["options"]["device_threads"], threads, "effective option")
        t.contains(keys[0], "1 thread", "the key with one thread")
        t.contains(keys[1], "2 threads", "the key with two threads")
        for one, two in zip(*losses):
            t.close(one, two, ORDER_OF_SUMS, "loss", relative=True)


# ---- formats of the state ----------------------------------------------------------------------

@t.test
def moments_are_in_the_numerics_key_and_the_master_is_not():
    """8-bit moments change bits, a split master none. The second step is the first that reads a
    moment back."""
    with t.folder() as tmp:
        keys, losses = {}, {}
        for name, more in (("plain", []), ("split", ["--master", "split"]),
                           ("8bit", ["--moments", "8bit"])):
            _, steps, others = train(tmp, name, *FP32, "--seq-len", 64, "--steps", 4,
                                     "--lr", "1e-3", *more)
            keys[name] = others[0]["numerics_key"]
            losses[name] = [s["loss"] for s in steps]
        t.equal(keys["split"], keys["plain"], "the key with a split master")
        t.contains(keys["8bit"], "moments=8bit", "the key with 8-bit moments")
        t.equal(losses["split"], losses["plain"], "losses with a split master")
        t.equal(losses["8bit"][:2], losses["plain"][:2], "losses before a moment is read back")
        t.check(losses["8bit"][3] != losses["plain"][3], "8-bit moments lost nothing")


# ---- trace -------------------------------------------------------------------------------------

@t.test
def the_trace_holds_every_task_with_the_bytes_of_the_log():
    with t.folder() as tmp:
        _, steps, _ = train(tmp, "traced", "--seq-len", 32, "--steps", 4, "--optimizer", "nvme",
                            "--accumulate", 2, "--trace", tmp + "/trace.json")
        with open(tmp + "/trace.json", encoding="utf-8") as file:
            trace = json.load(file)
        tasks = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        t.equal(trace["schema"], 1, "schema")
        for step in steps:
            mine = [e for e in tasks if e["args"]["step"] == step["step"]]
            for lane, bytes_ in step["bytes"].items():
                got = sum(e["args"]["bytes"] for e in mine if e["args"]["lane"] == lane)
                t.equal(got, bytes_, f"bytes of {lane} in step {step['step']}")
            for lane, busy in step["lane_busy_s"].items():
                got = sum(e["dur"] for e in mine if e["args"]["lane"] == lane) * 1e-6
                t.close(got, busy, 1e-6 * (len(mine) + 1), f"busy time of {lane}")
            names = [e["name"] for e in mine if e["args"]["lane"] == "compute"]
            # 7 units, 2 micro-batches: forward and backward of each, between them the tied head.
            t.equal(len(names), 2 * (7 + 1 + 7), f"compute tasks of step {step['step']}: {names}")
        for lane in {e["tid"] for e in tasks}:  # lanes are in order: no two of their tasks overlap
            spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in tasks if e["tid"] == lane)
            t.check(all(a[1] <= b[0] + 0.002 for a, b in zip(spans, spans[1:])), f"lane {lane}")


@t.test
def the_budgets_of_a_trace_are_those_that_were_given():
    with t.folder() as tmp:
        for given, want in (([], None), (["--device-memory", "7M", "--host-memory", "90M"],
                                         {"device": 7000000, "host": 90000000})):
            train(tmp, f"{len(given)}", "--seq-len", 32, "--steps", 1, "--optimizer", "host",
                  "--trace", tmp + "/trace.json", *given)
            with open(tmp + "/trace.json", encoding="utf-8") as file:
                events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "C"]
            for tier in ("device", "host"):
                mine = [e["args"] for e in events if e["name"] == "memory " + tier]
                t.check(mine, f"no memory of {tier}")
                for args in mine:
                    t.equal(args["budget"], want[tier] if want else args["used"], tier)


@t.test
def the_next_command_is_one_for_a_shell():
    with t.folder() as tmp:
        run, _, _ = train(tmp, "it's a model", "--seq-len", 32, "--steps", 1)
        next_ = re.search("^next: (.*)$", run.stdout, re.M)
        t.check(next_, "no next command", run)
        words = shlex.split(next_.group(1))
        t.equal(words[1:], ["inspect", f"{tmp}/it's a model"], "its words")
        t.spillway(*words[1:], rc=0)


# ---- saving and stopping -----------------------------------------------------------------------

@t.test
def what_is_removed_under_a_run():
    """The model's folder is not needed any more once the run has begun; a store that is gone is
    told once; a file that became shorter is named."""
    with t.folder() as tmp:
        shutil.copytree(t.MODEL, tmp + "/model")
        os.mkdir(tmp + "/drive")
        shutil.copy(t.SHAKESPEARE + "/train.bin", tmp + "/data")
        process = t.Process(["train", "--model", tmp + "/model", "--data", tmp + "/data", "--out",
                             tmp + "/out", "--seq-len", 16, "--steps", 100000, "--optimizer",
                             "nvme", "--nvme", tmp + "/drive"])
        process.wait_for(r"step \d")
        shutil.rmtree(tmp + "/model")
        shutil.rmtree(tmp + "/drive")
        process.wait_for("nothing can be resumed")
        process.signal(signal.SIGINT)
        run = process.finish()
        t.equal(run.rc, 130, "exit status", run)
        t.equal(run.stderr.count("was removed or replaced while it was in use"), 1, "told", run)
        saved = [f for f in os.listdir(tmp) if f.startswith("out.step-")]
        t.equal(len(saved), 1, "saved models", run)
        t.check(os.path.exists(f"{tmp}/{saved[0]}/tokenizer.json"), "the tokenizer", run)
        process = t.Process(["train", "--model", t.MODEL, "--data", tmp + "/data", "--out",
                             tmp + "/more", "--seq-len", 16, "--steps", 100000])
        process.wait_for(r"step \d")
        os.truncate(tmp + "/data", 0)
        run = process.finish()
        t.equal(run.rc, 1, "exit status", run)
        t.contains(run.stderr, f"error: {tmp}/data became shorter while it was read", "error", run)


@t.test
def saved_steps_are_whole_models():
    with t.folder() as tmp:
        _, _, others = train(tmp, "saves", "--seq-len", 32, "--steps", 5, "--save-every", 2)
        _, third, _ = train(tmp, "four", "--seq-len", 32, "--steps", 4, "--schedule", "constant")
        t.equal([o["step"] for o in others if o["event"] == "saved"], [2, 4, 5], "saves")
        for dir_ in ("saves", "saves/step-2", "saves/step-4"):
            config, tensors = t.read_model(f"{tmp}/{dir_}")
            t.equal(config["torch_dtype"], "bfloat16", f"dtype of {dir_}")
            t.equal(len(tensors), 47, f"tensors of {dir_}")
            t.check(os.path.exists(f"{tmp}/{dir_}/tokenizer.json"),
                    "the tokenizer is carried along")
        left = [f for f in os.listdir(tmp + "/saves") if "partial" in f or f.endswith(".state")]
        t.equal(left, [], "left behind")


def stop(tmp, name, number, *args):
    out = f"{tmp}/{name}"
    process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                         "--out", out, "--steps", 100000, "--seq-len", 64, "--log",
                         out + ".jsonl", *args])
    process.wait_for("^step 1/")
    process.signal(number)
    return process.finish(), out


@t.test
def a_signal_finishes_the_step_and_saves_the_weights():
    with t.folder() as tmp:
        for i, (number, status, more) in enumerate((
                (signal.SIGINT, 130, ["--optimizer", "nvme"]),
                (signal.SIGTERM, 143, ["--optimizer", "host"]),
                (signal.SIGUSR1, 138, ["--optimizer", "nvme", "--clip", 0]),
                (signal.SIGINT, 130, ["--optimizer", "device", "--overlap", "none"]))):
            run, out = stop(tmp, f"stop-{i}", number, *more)
            t.equal(run.rc, status, "exit status", run)
            steps, others = t.read_log(out + ".jsonl")
            t.equal([s["step"] for s in steps], list(range(1, len(steps) + 1)), "steps in the log")
            last = steps[-1]["step"]
            t.equal(others[-1], {"event": "stopped", "step": last}, "last line of the log")
            saved = f"{out}.step-{last}"
            t.contains(run.stdout, saved, "where the weights are")
            t.equal(len(t.read_model(saved)[1]), 47, "tensors saved")
            if "nvme" in more:
                t.equal(sorted(os.listdir(out)), ["optimizer.0.state", "optimizer.commit"],
                        "what --resume goes on from")
            else:
                t.check(not os.path.exists(out), "the empty output folder is gone")


def ignoring(number):
    """For preexec: as a parent that ignores the signal."""
    return lambda: signal.signal(number, signal.SIG_IGN)


@t.test
def a_signal_that_the_parent_ignored_stays_ignored():
    """nohup's HUP, and INT of a job in the background; others still stop the run."""
    for ignored, last, status in ((signal.SIGHUP, signal.SIGTERM, 143),
                                  (signal.SIGINT, signal.SIGHUP, 129)):
        with t.folder() as tmp:
            process = t.Process(["train", "--model", t.MODEL, "--data",
                                 t.SHAKESPEARE + "/train.bin", "--out", tmp + "/out", "--steps",
                                 100000, "--seq-len", 64, "--save-every", 2],
                                preexec=ignoring(ignored))
            process.wait_for("^step 1/")
            process.signal(ignored)
            process.signal(ignored)
            for _ in range(2):  # it goes on
                seen = process.text().count("saved the model")
                process.wait_for(f"(?s)(saved the model.*){{{seen + 1}}}")
            process.signal(last)
            run = process.finish()
            t.equal(run.rc, status, "exit status", run)


@t.test
def the_stopped_weights_are_those_of_the_last_finished_step():
    with t.folder() as tmp:
        constant = ["--schedule", "constant", "--warmup", 0, "--lr", "1e-3"]
        for i, more in enumerate((["--optimizer", "nvme"], ["--optimizer", "host", "--clip", 0])):
            run, out = stop(tmp, f"early-{i}", signal.SIGINT, *constant, *more)
            t.equal(run.rc, 130, "exit status", run)
            last = t.read_log(out + ".jsonl")[0][-1]["step"]
            whole, _, _ = train(tmp, f"whole-{i}", "--steps", last, "--seq-len", 64, *constant,
                                *more)
            t.check(t.read_model(f"{out}.step-{last}")[1] == t.read_model(f"{tmp}/whole-{i}")[1],
                    f"the weights after {last} steps differ from an uninterrupted run's", whole)


@t.test
def a_second_signal_leaves_at_once_with_nothing_half_written():
    with t.folder() as tmp:
        out = tmp + "/twice"
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", out, "--steps", 1000, "--micro-batch", 16, "--accumulate", 8,
                             "--seq-len", 512])
        process.wait_for("^loaded")
        process.signal(signal.SIGINT)
        process.wait_for("finishing the step")
        process.signal(signal.SIGINT)
        run = process.finish()
        t.equal(run.rc, 130, "exit status", run)
        t.check(not os.path.exists(out + "/config.json"), "a model that was never finished")


@t.test
def restart_replaces_an_earlier_run_and_nothing_else():
    with t.folder() as tmp:
        common = ["--seq-len", 32, "--steps", 2]
        train(tmp, "run", *common)
        before = t.read_model(tmp + "/run")[1]
        run, _, _ = train(tmp, "run", *common, "--lr", "1e-3", rc=1)
        t.contains(run.stderr, "--restart", "the way on")
        t.check(t.read_model(tmp + "/run")[1] == before, "a refused run changed the model")
        train(tmp, "run", *common, "--lr", "1e-3", "--restart")
        t.check(t.read_model(tmp + "/run")[1] != before, "the restarted run left the old model")
        with open(tmp + "/run/letters.txt", "w", encoding="utf-8") as file:
            file.write("keep me")
        run, _, _ = train(tmp, "run", *common, "--restart", rc=1)
        t.contains(run.stderr, "letters.txt", "the foreign file")
        t.check(os.path.exists(tmp + "/run/model.safetensors"), "something was removed")


@t.test
def a_restart_that_fails_keeps_the_old_model():
    with t.folder() as tmp:
        common = ["--seq-len", 32, "--steps", 2]
        train(tmp, "run", *common)
        before = t.read_model(tmp + "/run")[1]
        os.mkdir(tmp + "/busy")
        holder = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                            "--out", tmp + "/other", "--optimizer", "nvme", "--nvme",
                            tmp + "/busy", "--steps", 100000, "--seq-len", 32])
        holder.wait_for("^step 1/")
        run, _, _ = train(tmp, "run", *common, "--restart", "--optimizer", "nvme", "--nvme",
                          tmp + "/busy", rc=1)
        holder.signal(signal.SIGINT)
        holder.finish()
        t.contains(run.stderr, "in use", "the reason")
        t.check(t.read_model(tmp + "/run")[1] == before, "the old model is gone", run)


@t.test
def two_runs_do_not_share_an_output_folder():
    with t.folder() as tmp:
        first = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                           "--out", tmp + "/one", "--steps", 100000, "--seq-len", 32,
                           "--optimizer", "nvme"])
        first.wait_for("^step 1/")
        others = [t.train(tmp + "/one", "--steps", 1, "--seq-len", 32, "--optimizer", "nvme", *more)
                  for more in ([], ["--restart"], ["--resume"])]
        first.signal(signal.SIGINT)
        t.equal(first.finish().rc, 130, "exit status of the first")
        for second in others:
            t.equal(second.rc, 1, "exit status of the second", second)
            t.contains(second.stderr, f"in use by process {first.pid}", "the reason", second)


@t.test
def outputs_never_overwrite_inputs():
    with t.folder() as tmp:
        data = first_tokens(tmp, 1000)
        with open(data, "rb") as file:
            before = file.read()
        for i, (option, path) in enumerate((("--log", data), ("--trace", data),
                                            ("--log", t.MODEL + "/config.json"),
                                            ("--trace", t.MODEL + "/new.json"))):
            run = t.train(f"{tmp}/out-{i}", "--steps", 1, "--seq-len", 32, option, path, data=data)
            t.equal(run.rc, 1, f"{option} {path}", run)
            t.contains(run.stderr, "overwrite", "the reason")
            t.check(not os.path.exists(f"{tmp}/out-{i}"), "the output folder was made", run)
        run = t.train(tmp + "/same", "--steps", 1, "--seq-len", 32, "--log", tmp + "/x", "--trace",
                      tmp + "/x", data=data)
        t.equal(run.rc, 1, "log and trace in one file", run)
        with open(data, "rb") as file:
            t.check(file.read() == before, "the data was changed")


@t.test
def closed_standard_streams_change_nothing():
    """Without the streams a file could be opened under their numbers and be printed into."""
    with t.folder() as tmp:
        digests = []
        for name, preexec in (("open", None), ("closed", lambda: (os.close(1), os.close(2)))):
            run, _, others = train(tmp, name, "--seq-len", 32, "--steps", 6, "--optimizer", "nvme",
                                   "--digest", preexec=preexec)
            digests.append([o for o in others if o["event"] == "digest"])
        t.equal(digests[1], digests[0], "digest")


if __name__ == "__main__":
    t.main()
