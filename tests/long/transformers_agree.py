#!/usr/bin/env python3
"""Hugging Face transformers loads what training wrote and computes the same validation loss.

Runs in a Python that has torch and transformers. For --dtype fp32 and bf16 a short run is trained
with --val; the folder it leaves is loaded, and the mean loss over the rows of val.bin (as the
program cuts them) is computed in float32. Limits: 1e-5 for FP32; for BF16 1e-3, since there the
program's activations are rounded to BF16 and transformers' here are not.
"""
import os
import sys

# Last, as a test must not stand for an installed module of its name.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SEQ_LEN = 128
VAL = t.SHAKESPEARE + "/val.bin"
MODEL = os.environ.get("MODEL", t.MODEL)  # of another family: its vocabulary must hold VAL's ids
ARGS = ["--optimizer", "nvme", "--steps", "50", "--seq-len", str(SEQ_LEN), "--micro-batch", "8",
        "--lr", "1e-3", "--seed", "1", "--val", VAL]


def peer_loss(path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path).float()
    model.eval()
    tokens = torch.tensor(t.read_tokens(VAL), dtype=torch.long)
    rows = (len(tokens) - 1) // SEQ_LEN
    inputs = tokens[:rows * SEQ_LEN].view(rows, SEQ_LEN)
    targets = tokens[1:rows * SEQ_LEN + 1].view(rows, SEQ_LEN)
    total = 0.0
    with torch.no_grad():
        for at in range(0, rows, 25):
            logits = model(input_ids=inputs[at:at + 25]).logits.double()
            total += torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), targets[at:at + 25].flatten(), reduction="sum").item()
    return total / (rows * SEQ_LEN)


def val_losses(log):
    return [entry["val_loss"] for entry in t.read_log(log)[1] if "val_loss" in entry]


def agree(dtype, limit):
    with t.folder("peer-") as tmp:
        out, log = tmp + "/out", tmp + "/log.jsonl"
        run = t.train(out, *ARGS, "--dtype", dtype, "--log", log, model=MODEL, rc=0,
                      timeout_s=300)
        losses = val_losses(log)
        t.check(len(losses) >= 2, "no validation loss before and after in the log", run)
        config, _ = t.read_model(out)
        name = config.get("dtype", config.get("torch_dtype"))
        t.equal(name, {"fp32": "float32", "bf16": "bfloat16"}[dtype], "dtype in config.json")
        peer = peer_loss(out)
        print(f"{dtype}: {losses[-1]:.7f} by the program, {peer:.7f} by transformers "
              f"{transformers.__version__} with torch {torch.__version__}, "
              f"off by {abs(losses[-1] - peer):.2e}, limit {limit:.0e}", flush=True)
        t.close(losses[-1], peer, limit, "validation loss after training")
        if dtype == "fp32":
            t.close(losses[0], peer_loss(MODEL), limit, "validation loss before training")
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        t.equal(tokenizer.vocab_size, config["vocab_size"], "vocabulary of the tokenizer")


@t.test
def fp32_validation_loss_agrees():
    agree("fp32", 1e-5)


@t.test
def bf16_validation_loss_agrees():
    agree("bf16", 1e-3)


if __name__ == "__main__":
    t.main()
