"""Several documents in a row (--documents): each trains as in a row of its own, nothing of one
reaches another, and no placement or split of the batch changes what it should not.
"""
import os
import signal
import struct
import time

import support as t

# The rotary embedding turns queries and keys of a later place in the row by other angles: the same
# products up to a rounding of each factor, and then sums as in training.py, which has the reason.
OTHER_PLACE = 1e-4
FP32 = ["--dtype", "fp32", "--order", "sequential", "--schedule", "constant", "--warmup", "0"]
ALL_NVME = [w for name in ("params", "optimizer", "gradients", "activations")
            for w in ("--" + name, "nvme")]
TOKENS = t.read_tokens(t.SHAKESPEARE + "/train.bin")


def documents(path, offsets):
    with open(path, "wb") as file:
        file.write(struct.pack(f"<{len(offsets)}Q", *offsets))
    return ["--documents", path]


def counting(path, count, *spans):
    """A mask: predictions of the tokens in these spans count."""
    with open(path, "wb") as file:
        file.write(bytes(any(a <= i < b for a, b in spans) for i in range(count)))
    return ["--mask", path]


def train(tmp, name, tokens, *more, steps=1, seq_len=32, lr="1e-3"):
    """Losses, norms and counts of the steps, and the state that the run ends with."""
    out = f"{tmp}/{name}"
    t.write_tokens(out + ".bin", tokens)
    run = t.train(out, "--log", out + ".jsonl", "--seq-len", seq_len, "--steps", steps, "--lr",
                  lr, "--digest", *more, data=out + ".bin", rc=0)
    lines, others = t.read_log(out + ".jsonl")
    digest = [o for o in others if o.get("event") == "digest"]
    return run, [(s["loss"], s["grad_norm"], s["tokens"]) for s in lines], digest


def agree(got, want, what):
    for (loss, norm, count), (want_loss, want_norm, want_count) in zip(got, want):
        t.equal(count, want_count, f"tokens that count, {what}")
        t.close(loss, want_loss, OTHER_PLACE, f"loss, {what}", relative=True)
        t.close(norm, want_norm, OTHER_PLACE, f"norm of the gradient, {what}", relative=True)


@t.test
def two_documents_in_a_row_train_as_in_rows_of_their_own():
    """17 and 16 tokens in a row of 32; beside that each at the front of its own, where what follows
    it does not count. One at a time, and both."""
    with t.folder() as tmp:
        packed, rest = list(TOKENS[:33]), list(TOKENS[100:149])
        rows = packed[:17] + rest[:15] + packed[17:] + rest[15:32]
        border = documents(tmp + "/documents", [0, 17])
        for name, in_packed, in_rows in (
                ("the first", [(1, 17)], [(1, 17)]), ("the second", [(18, 33)], [(33, 48)]),
                ("both", [(1, 33)], [(1, 17), (33, 48)])):
            mask = counting(tmp + "/mask", 33, *in_packed)
            _, got, _ = train(tmp, name + " packed", packed, *FP32, *border, *mask)
            _, open_, _ = train(tmp, name + " open", packed, *FP32, *mask)
            mask = counting(tmp + "/mask", len(rows), *in_rows)
            _, want, _ = train(tmp, name + " apart", rows, *FP32, *mask, "--micro-batch", 2)
            agree(got, want, name)
            if name == "the second":
                t.check(abs(open_[0][0] - want[0][0]) > 100 * OTHER_PLACE * want[0][0],
                        f"the border makes no difference: {open_} and {want}")


BORDERS = [0, 20, 45, 74, 75, 114, 158, 168]


def spans(keep):
    """Each second document of BORDERS."""
    ends = BORDERS[1:] + [193]
    return [s for i, s in enumerate(zip(BORDERS, ends)) if i % 2 == keep]


def isolated(tmp, *more):
    """Trains on each second document, among others that differ from run to run: losses, norms and
    all of the state have the same bits."""
    want = None
    for shift in (0, 1, 200):
        tokens = list(TOKENS[:193])
        for a, b in spans(0):
            tokens[a:b] = [(v + shift) % 512 for v in tokens[a:b]]
        border = documents(tmp + "/documents", BORDERS)
        mask = counting(tmp + "/mask", 193, *spans(1))
        run, *got = train(tmp, f"{len(more)}-{shift}", tokens, "--order", "sequential", *border,
                          *mask, *more, steps=3, seq_len=64)
        want = want or got
        t.equal(got, want, f"losses and state after {more}", run)
    return want


@t.test
def a_document_says_nothing_to_another():
    with t.folder() as tmp:
        isolated(tmp)
        isolated(tmp, "--dtype", "fp32", "--grad-dtype", "fp32", "--micro-batch", 3)


@t.test
def the_first_token_of_a_document_is_not_predicted():
    """As if a mask left it out; other bytes of a mask hold as well."""
    with t.folder() as tmp:
        tokens = TOKENS[:193]
        border = documents(tmp + "/documents", BORDERS)
        run, *want = train(tmp, "alone", tokens, *border, "--order", "sequential", steps=3,
                           seq_len=64)
        t.equal([count for _, _, count in want[0]], [62, 61, 62], "tokens that count", run)
        mask = counting(tmp + "/mask", 193, *((a + 1, b) for keep in (0, 1)
                                              for a, b in spans(keep)))
        run, *got = train(tmp, "masked", tokens, *border, *mask, "--order", "sequential", steps=3,
                          seq_len=64)
        t.equal(got, want, "losses and state", run)
        mask = counting(tmp + "/mask", 193, (10, 50))
        run, losses, _ = train(tmp, "both", tokens, *border, *mask, "--order", "sequential",
                               seq_len=64)
        t.equal(losses[0][2], 38, "tokens that count with both", run)


@t.test
def one_document_is_no_border():
    with t.folder() as tmp:
        run, *want = train(tmp, "none", TOKENS[:1000], steps=3)
        for offsets in ([0], [0, 999]):  # the last token is in no row
            run, *got = train(tmp, str(len(offsets)), TOKENS[:1000],
                              *documents(tmp + "/documents", offsets), steps=3)
            t.equal(got, want, f"losses and state with {offsets}", run)


@t.test
def micro_batches_have_the_documents_of_their_rows():
    """8 rows a step as 1, 2, 4 and 8 micro-batches; all rows differ."""
    with t.folder() as tmp:
        border = documents(tmp + "/documents", [i * i // 3 for i in range(3, 49)])
        want = None
        for micro, accumulate in ((8, 1), (4, 2), (2, 4), (1, 8)):
            _, got, _ = train(tmp, str(micro), TOKENS[:800], *FP32, *border, "--micro-batch", micro,
                              "--accumulate", accumulate, steps=3)
            want = want or got
            agree(got, want, f"{accumulate} micro-batches")


@t.test
def no_placement_changes_a_bit():
    """Weights streamed, inputs spilled and computed again, other overlap; with a frozen bottom
    backward ends in the layers, which are then the last to read where documents begin."""
    frozen = ["--freeze", "model.embed_tokens.*,model.layers.0.*"]
    variants = [["--overlap", "none"], [*ALL_NVME, "--chunk", 50000],
                ["--params", "host", "--activations", "host", "--checkpoint-every", 2]]
    with t.folder() as tmp:
        border = documents(tmp + "/documents", [i * 37 for i in range(27)])
        for common in (["--accumulate", 2], [*frozen, "--accumulate", 2, "--clip", 0]):
            want = None
            for i, more in enumerate([[], *variants]):
                run, *got = train(tmp, f"{len(common)}{i}", TOKENS[:1000], *border, *common, *more,
                                  "--micro-batch", 2, steps=3)
                want = want or got
                t.equal(got, want, f"losses and state with {common} {more}", run)


@t.test
def a_file_that_is_written_over_ends_the_run():
    """With the file's name, whichever it is, and before a row of it is trained on; one that holds
    what it held, and one that is replaced by another of its name, change nothing."""
    with t.folder() as tmp:
        tokens = TOKENS[:4000]
        t.write_tokens(tmp + "/data", tokens)
        line = [*documents(tmp + "/documents", range(0, 4000, 9)),
                *counting(tmp + "/mask", len(tokens), (0, 4000))]
        other = {"data": bytes(8000), "documents": struct.pack("<2Q", 5, 7),
                 "mask": bytes(2000) + b"\1" * 2000}
        for name in ("data", "documents", "mask", "same", "replaced"):
            process = t.Process(["train", "--model", t.MODEL, "--data", tmp + "/data", "--out",
                                 f"{tmp}/out-{name}", "--seq-len", 16, "--steps", 100000, *line])
            process.wait_for(r"step \d")
            path = f"{tmp}/{name}" if name in other else tmp + "/documents"
            with open(path, "rb") as file:
                kept = file.read()
            if name == "replaced":
                with open(path + "-new", "wb") as file:
                    file.write(other["documents"])
                os.replace(path + "-new", path)
            else:
                with open(path, "r+b") as file:
                    file.write(other.get(name, kept)[:len(kept)])
            if name not in other:
                time.sleep(0.5 * t.SLOWDOWN)  # steps take a few milliseconds
                process.signal(signal.SIGINT)
            run = process.finish()
            with open(path, "wb") as file:
                file.write(kept)
            t.equal(run.rc, 1 if name in other else 130, f"exit status, {name}", run)
            told = f"error: {name}: {path} was written over while it was read"
            t.equal(run.stderr.count(told), int(name in other), f"reports, {name}", run)


@t.test
def an_evaluation_has_no_borders():
    """Its rows are another file's."""
    with t.folder() as tmp:
        t.write_tokens(tmp + "/val.bin", t.read_tokens(t.SHAKESPEARE + "/val.bin")[:400])
        losses = []
        for i, more in enumerate(([], documents(tmp + "/documents", [i * 9 for i in range(100)]))):
            train(tmp, str(i), TOKENS[:1000], *more, "--val", tmp + "/val.bin", lr=0)
            losses.append([o["val_loss"] for o in t.read_log(f"{tmp}/{i}.jsonl")[1]
                           if o.get("event") == "eval"])
        t.check(losses[0] and losses[0] == losses[1], f"losses of evaluations: {losses}")


if __name__ == "__main__":
    t.main()
