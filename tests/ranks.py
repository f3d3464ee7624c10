"""Several ranks in one process: the same bits for a number of ranks whatever the stage, tiers,
overlap, chunks and threads; the bytes that travel, and the memory of each rank, are the
arithmetic's; another number of ranks gives the same losses but for the order of sums.

time limit: 300 s
"""
import itertools
import json
import os
import re
import signal

import support as t

BASE = ["--seq-len", 24, "--lr", "1e-3", "--digest", "--device-threads", 1]
STEPS = 4


def train(out, *more, steps=STEPS, **options):
    chunk = () if "--chunk" in more else ("--chunk", 60000)
    base = BASE[:2] + BASE[4:] if "--lr" in more else BASE
    return t.train(out, "--steps", steps, *base, *chunk, *more, **options)


def digest(run):
    found = re.search(r"^digest: (.*)$", run.stdout, re.M)
    t.check(found, "no digest", run)
    return found.group(1)


def outcome(tmp, name, *more, rc=0, **options):
    """(digest, losses, tensors, gradient norms) of a run."""
    out, log = f"{tmp}/{name}", f"{tmp}/{name}.jsonl"
    run = train(out, "--log", log, *more, rc=rc, **options)
    steps, _ = t.read_log(log)
    return (digest(run), [s["loss"] for s in steps], t.read_model(out)[1],
            [s["grad_norm"] for s in steps])


TIERS = {
    "device": ["--optimizer", "device"],
    "host": ["--optimizer", "host", "--gradients", "host:50%,nvme"],
    "nvme": ["--optimizer", "nvme"],
    "shares": ["--optimizer", "device:30%,host:40%,nvme", "--gradients", "device"],
    "streamed": ["--params", "host:50%,nvme", "--optimizer", "host:50%,nvme", "--activations",
                 "host:50%,nvme", "--checkpoint-every", 2],
    "all nvme": ["--params", "nvme", "--optimizer", "nvme", "--gradients", "nvme", "--activations",
                 "nvme"],
}


def variants(ranks):
    """Stages x tiers x overlap, thinned out under sanitizers."""
    overlaps = [["--overlap", "none"], ["--overlap", "forward"]]
    every = list(itertools.product((0, 1, 2, 3), TIERS, overlaps))
    every = every[ranks::7] if t.SANITIZED else every[ranks % 2::2]
    return [(f"zero {zero}, {tier}, {overlap[1]}", ["--zero", zero, *TIERS[tier], *overlap])
            for zero, tier, overlap in every]


@t.test
def stages_tiers_and_overlap_change_no_bit():
    for ranks in (2, 3):
        with t.folder() as tmp:
            common = ["--ranks", ranks, "--accumulate", 2]
            want = outcome(tmp, "plain", *common)
            for i, (name, args) in enumerate(variants(ranks)):
                got = outcome(tmp, str(i), *common, *args)
                t.check(got == want, f"{ranks} ranks, {name}: other bits")


@t.test
def backward_overlap_threads_and_chunks_change_no_bit():
    with t.folder() as tmp:
        common = ["--ranks", 2, "--clip", 0]
        want = outcome(tmp, "plain", *common, "--overlap", "none")
        for i, args in enumerate((
                ["--overlap", "backward"], ["--overlap", "backward", "--zero", 1],
                ["--overlap", "backward", "--zero", 2, *TIERS["nvme"]],
                ["--overlap", "backward", *TIERS["all nvme"]],
                ["--overlap", "backward", *TIERS["shares"], "--threads", 1],
                ["--chunk", 12288], ["--chunk", "8M", *TIERS["nvme"]])):
            t.check(outcome(tmp, str(i), *common, *args) == want, f"{args}: other bits")


@t.test
def formats_work_on_shards():
    """Split masters are lossless; the coded moments are the same bits in every stage."""
    with t.folder() as tmp:
        common = ["--ranks", 4]
        plain = outcome(tmp, "plain", *common)
        split = outcome(tmp, "split", *common, "--master", "split", "--optimizer", "nvme")
        t.check(split == plain, "split masters: other bits")
        coded = [outcome(tmp, f"8bit-{zero}", *common, "--moments", "8bit", "--zero", zero, *more)
                 for zero, more in ((1, []), (3, TIERS["nvme"]), (2, TIERS["device"]))]
        t.check(coded[0] == coded[1] == coded[2], "8-bit moments: other bits")


def close_losses(got, want, what):
    """Both are sums of the same numbers in another order. FP32 products of the model round to 6e-8
    of their size; what a step adds to the difference is its update's, which is about lr."""
    for i, (a, b) in enumerate(zip(got, want)):
        t.close(a, b, 2e-5 * (i + 1), f"{what}: loss of step {i + 1}")


@t.test
def another_number_of_ranks_gives_the_same_losses():
    """The rows of a step do not depend on how they are shared out: eight rows each time."""
    with t.folder() as tmp:
        shapes = [(1, 1, 8), (1, 8, 1), (2, 2, 2), (2, 4, 1), (4, 1, 2), (8, 1, 1), (3, 1, 1)]
        found = {}
        for ranks, micro, accumulate in shapes:
            found[ranks, micro] = outcome(tmp, f"{ranks}-{micro}", "--ranks", ranks,
                                          "--micro-batch", micro, "--accumulate", accumulate,
                                          "--dtype", "fp32")
        want = found[1, 1][1]
        for key, (_, losses, _, _) in found.items():
            if key[0] != 3:
                close_losses(losses, want, f"{key[0]} ranks, micro-batch {key[1]}")


@t.test
def the_norm_of_shards_is_that_of_one_rank():
    """Whoever holds them: sums in double of the same squares in another order, of gradients whose
    FP32 sums over rows have another order, too. Clipping goes by it: at half the norm, by half."""
    with t.folder() as tmp:
        want = None
        for ranks in (1, 2, 4, 8):
            for tier in ("device", "host", "nvme"):
                common = [*TIERS[tier], "--ranks", ranks, "--accumulate", 8 // ranks, "--dtype",
                          "fp32", "--grad-dtype", "fp32"]
                found = outcome(tmp, f"{ranks}-{tier}", *common, steps=1)[3][0]
                want = want or found
                t.close(found, want, 1e-5, f"{ranks} ranks, {tier}: norm", relative=True)
                log = f"{tmp}/{ranks}-{tier}-clip.jsonl"
                train(f"{tmp}/{ranks}-{tier}-clip", *common, "--clip", found / 2, "--log", log,
                      steps=1, rc=0)
                step = t.read_log(log)[0][0]
                t.equal(step["grad_norm"], found, "the norm before clipping")
                t.close(step["clip_factor"], 0.5, 1e-6, f"{ranks} ranks, {tier}: factor")


@t.test
def masked_rows_count_by_their_tokens():
    """The mean is over all tokens that count, of all ranks: also where a rank has few, or none."""
    with t.folder() as tmp:
        tokens = t.read_tokens(t.SHAKESPEARE + "/train.bin")[:24 * 8 * STEPS + 1]
        t.write_tokens(tmp + "/data.bin", tokens)
        for name, mask in (("uneven", [int(i % 7 == 0 or i > 300) for i in range(len(tokens))]),
                           ("one rank", [int(i % 192 < 40) for i in range(len(tokens))])):
            with open(tmp + "/mask", "wb") as file:
                file.write(bytes(mask))
            common = ["--mask", tmp + "/mask", "--order", "sequential", "--dtype", "fp32"]
            want = outcome(tmp, f"{name}-1", *common, "--accumulate", 8, data=tmp + "/data.bin")
            for ranks in (2, 8):
                got = outcome(tmp, f"{name}-{ranks}", *common, "--ranks", ranks, "--accumulate",
                              8 // ranks, data=tmp + "/data.bin")
                close_losses(got[1], want[1], f"{name}, {ranks} ranks")


@t.test
def padding_is_in_no_sum_and_no_file():
    """Nothing moves at a rate of 0: masters and weights are those of the model for any number of
    ranks, of which some hold nothing of the small units but padding."""
    with t.folder() as tmp:
        want = None
        for ranks in (1, 2, 3, 7, 8):
            found = outcome(tmp, str(ranks), "--ranks", ranks, "--lr", 0)
            words = found[0].split()
            got = (words[words.index("master") + 1], words[words.index("weights") + 1], found[2])
            want = want or got
            t.check(got == want, f"{ranks} ranks: {found[0]}")


def padded(tmp, ranks):
    """Elements of the model's units with the padding of shards, from the plan's own shapes: what a
    unit's tensors take at 128 elements each, and each shard in whole blocks of 256."""
    with open(t.MODEL + "/config.json", encoding="utf-8") as file:
        config = json.load(file)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head
    up = lambda n, to: -(-n // to) * to
    layer = sum(up(n, 128) for n in (hidden, hidden * hidden, kv * hidden, kv * hidden,
                                     hidden * hidden, hidden, inner * hidden, inner * hidden,
                                     hidden * inner))
    units = [up(config["vocab_size"] * hidden, 128)]
    units += [layer] * config["num_hidden_layers"] + [up(hidden, 128)]
    return [ranks * up(-(-n // ranks), 256) for n in units]


@t.test
def traffic_is_that_of_the_stage():
    """Elements times (N - 1) / N for each rank: reduced once, gathered once, twice in stage 3."""
    with t.folder() as tmp:
        for ranks in (2, 4):
            units = padded(tmp, ranks)
            for zero in (0, 1, 2, 3):
                log = f"{tmp}/{ranks}-{zero}.jsonl"
                train(f"{tmp}/{ranks}-{zero}", "--ranks", ranks, "--zero", zero, "--log", log,
                      "--accumulate", 3, rc=0)
                # Reduced in FP32, gathered in BF16. In stage 3 for forward and for backward; the
                # tied embedding for forward, for the head's loss and gradient, which follow each
                # other, and for the matrix's gradient.
                once = sum(units)
                gathered = 2 * once + units[0] if zero == 3 else once
                for s in t.read_log(log)[0]:
                    want = (ranks - 1) * (4 * once + 2 * gathered)
                    t.equal(s["bytes"]["comm"], want, f"{ranks} ranks, zero {zero}: bytes")


@t.test
def bytes_over_each_link_are_a_shard():
    """Each rank moves its own shard over PCIe and NVMe: all together what one rank moves alone, but
    for the padding of shards."""
    with t.folder() as tmp:
        logs = {}
        for ranks in (1, 4):
            log = f"{tmp}/{ranks}.jsonl"
            train(f"{tmp}/{ranks}", "--ranks", ranks, *TIERS["all nvme"], "--log", log,
                  "--accumulate", 4 // ranks, rc=0)
            logs[ranks] = t.read_log(log)[0][2]["bytes"]
        grow = sum(padded(tmp, 4)) / 260032
        for lane in ("d2h", "nvme_read", "nvme_write"):
            t.check(logs[4][lane] < 1.25 * grow * logs[1][lane], f"{lane}: {logs}")


@t.test
def a_rank_holds_at_most_the_textbooks_row():
    """16, 4 + 12/N, 2 + 14/N, 16/N bytes a parameter of weights, gradients and optimizer state on
    the device, beside what one or two units need."""
    with t.folder() as tmp:
        config = dict(t.MIDDLE_MODEL, num_hidden_layers=24, vocab_size=2048)
        t.make_model(tmp + "/model", config)
        for ranks in (1, 2, 4, 8):
            rows = {0: 16, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
            for zero, row in rows.items():
                run = train(tmp + "/out", "--ranks", ranks, "--zero", zero, "--optimizer",
                            "device", "--dry-run", model=tmp + "/model", rc=0)
                params = int(re.search(r"^(\d+) parameters", run.stdout, re.M).group(1))
                state = sum(t.table(run.stdout, "device", what) for what in
                            ("weights", "optimizer state", "waiting gradients"))
                # Shards end on whole blocks, tables have three digits.
                t.check(state <= 1.03 * row * params,
                        f"{ranks} ranks, zero {zero}: {state / params:.2f} of {row} B/p")


@t.test
def a_stopped_or_killed_run_goes_on():
    with t.folder() as tmp:
        common = ["--ranks", 3, "--optimizer", "nvme"]
        want = digest(train(tmp + "/whole", *common, steps=8, rc=0))
        for i, more in enumerate((["--zero", 2], ["--zero", 3, "--params", "nvme"])):
            out = f"{tmp}/{i}"
            train(out, *common, steps=8, rc=-signal.SIGKILL,
                  env=t.kill_at("pwrite:.commit:5:before"))
            last = train(out, *common, *more, "--resume", steps=8, rc=0)
            t.contains(last.stdout, "going on after step 4", "resume", last)
            t.equal(digest(last), want, f"digest after resuming with {more}", last)
        other = f"{tmp}/other"
        train(other, *common, steps=8, rc=-signal.SIGKILL,
              env=t.kill_at("pwrite:.commit:5:before"))
        refused = train(other, "--ranks", 2, "--optimizer", "nvme", "--resume", steps=8, rc=1)
        t.contains(refused.stderr, "its numerics is", "another number of ranks", refused)


@t.test
def a_signal_stops_all_ranks_at_the_same_step():
    with t.folder() as tmp:
        process = t.Process(["train", "--model", t.MODEL, "--data", t.SHAKESPEARE + "/train.bin",
                             "--out", tmp + "/out", "--steps", 100000, "--ranks", 4, *BASE,
                             "--optimizer", "nvme"])
        process.wait_for(r"^step 1/")
        process.signal(signal.SIGINT)
        run = process.finish()
        t.equal(run.rc, 130, "exit status", run)
        step = int(re.search(r"stopped after step (\d+);.*--resume goes on", run.stdout)[1])
        t.check(os.path.isdir(f"{tmp}/out.step-{step}"), "the weights", run)


@t.test
def cores_are_shared_out_and_the_mask_stays():
    cpus = sorted(os.sched_getaffinity(0))
    with t.folder() as tmp:
        run = train(tmp + "/out", "--ranks", 2, rc=0)
        lists = re.findall(r"rank \d: 1 thread on CPUs (\S+)", run.stderr)
        t.equal(len(lists), 2, "ranks named", run)
        if len(cpus) > 1:
            t.check(lists[0] != lists[1], "both ranks on the same cores", run)
        alone = train(tmp + "/alone", "--ranks", 2, rc=0,
                      preexec=lambda: os.sched_setaffinity(0, {cpus[-1]}))
        t.equal(set(re.findall(r"thread on CPUs (\S+)", alone.stderr)), {str(cpus[-1])},
                "lists under a mask of one", alone)
        t.equal(digest(alone), digest(run), "digest under a mask of one", alone)


@t.test
def what_has_no_effect_or_no_sense_is_refused():
    with t.folder() as tmp:
        for args, part in ((["--ranks", 0], "--ranks"), (["--ranks", 1000], "--ranks"),
                           (["--zero", 4], "--zero takes 0, 1, 2 or 3"),
                           (["--reduce-dtype", "bf16"], "no effect with one rank"),
                           (["--ranks", 2, "--rank-timeout", 0], "--rank-timeout")):
            run = train(tmp + "/out", *args, rc=2)
            t.contains(run.stderr, part, str(args), run)


@t.test
def gradients_may_travel_in_bf16():
    """Part of the numerics key: other bits, half the bytes of the reduction."""
    with t.folder() as tmp:
        logs = {}
        for dtype in ("fp32", "bf16"):
            log = f"{tmp}/{dtype}.jsonl"
            run = train(f"{tmp}/{dtype}", "--ranks", 2, "--reduce-dtype", dtype, "--zero", 2,
                        "--log", log, rc=0)
            t.contains(run.stdout, f"reduce_dtype={dtype}", "numerics key", run)
            logs[dtype] = t.read_log(log)[0]
        once = sum(padded(tmp, 2))
        t.equal(logs["fp32"][1]["bytes"]["comm"] - logs["bf16"][1]["bytes"]["comm"], 2 * once,
                "bytes saved")
        # Each of two contributions is rounded to 2^-9 of its size at most, and so is their sum.
        # Later steps have other weights.
        t.close(logs["fp32"][0]["grad_norm"], logs["bf16"][0]["grad_norm"], 2 ** -8,
                "gradient norm of the first step", relative=True)


if __name__ == "__main__":
    t.main()
