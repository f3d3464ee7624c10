#!/usr/bin/env python3
"""Hugging Face transformers and torch.optim.AdamW train random models of shapes that the bundled
model does not have, beside the program: untied head, grouped queries, head_dim other than hidden /
heads, rope scaling `linear` and `llama3`, `rope_parameters`, a mistral folder. Some with several
documents in a row: eager attention under a block-diagonal mask, positions counted along the row or
from each document's start, the labels of DataCollatorWithFlattening.

Five steps in FP32 on the same rows, clipping on. Losses agree to 1e-5 before the first step and to
1e-4 after (the limits of models/stories260k/README.md), gradient norms to 1e-4 relative. Runs in a
Python that has torch and transformers.
"""
import json
import os
import struct
import sys

# Last, as a test must not stand for an installed module of its name.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ROWS, TIME, STEPS, LR, DECAY = 2, 96, 5, 1e-3, 0.1
BASE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96,
        "intermediate_size": 200, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "initializer_range": 0.1,
        "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1,
        "eos_token_id": 2}
SHAPES = {
    "untied_grouped_queries": {"rope_theta": 10000.0},
    "head_dim_of_its_own": {"rope_theta": 10000.0, "head_dim": 24},
    "tied_single_kv_head": {"rope_theta": 500000.0, "tie_word_embeddings": True,
                            "num_key_value_heads": 1},
    "linear_scaling": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3_scaling": {"rope_theta": 10000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}},
    "rope_parameters": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 2.0, "original_max_position_embeddings": 32}},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral",
                "rope_theta": 10000.0, "sliding_window": None},
}


# Documents that begin inside rows, at their ends and over several.
BORDERS = [0, 1, 30, 31, 97, 120, 192, 250, 288, 480, 481, 482, 483, 700, 805, 900]
DOCUMENTS = ["packed_documents", "packed_documents_positions_restart"]
SHAPES.update({name: {"rope_theta": 10000.0} for name in DOCUMENTS})


def packed(at, restart):
    """Mask, positions and labels' weights of the rows that begin at a token."""
    index = torch.arange(at, at + ROWS * TIME + 1)
    borders = torch.tensor(BORDERS)
    document = torch.searchsorted(borders, index, right=True)
    begins = torch.isin(index, borders)
    rows = document[:-1].view(ROWS, TIME)
    same = rows[:, :, None] == rows[:, None, :]
    sees = same & torch.ones(TIME, TIME).tril().bool()
    mask = torch.zeros(ROWS, 1, TIME, TIME).masked_fill(~sees[:, None], torch.finfo().min)
    positions = torch.arange(TIME).expand(ROWS, TIME)
    if restart:
        positions = positions - same.int().argmax(-1)  # less the first place of the same document
    return mask, positions, ~begins[1:].view(ROWS, TIME)


def peer(path, tokens, documents=None):
    """documents: whether positions restart with them, None: there are none."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model = model.float().train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": DECAY},
                                   {"params": vectors, "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(STEPS):
        at = step * ROWS * TIME
        x, y = (torch.tensor(tokens[at + s:at + s + ROWS * TIME]).view(ROWS, TIME) for s in (0, 1))
        optimizer.zero_grad()
        more = {}
        if documents is not None:
            mask, positions, counts = packed(at, documents)
            more = {"attention_mask": mask, "position_ids": positions}
            y = y.masked_fill(~counts, -100)
        logits = model(input_ids=x, **more).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    return steps


def agree(name):
    tokens = list(t.read_tokens(t.STORIES + "/train.bin"))[:STEPS * ROWS * TIME + 1]
    with t.folder("peer-") as tmp:
        with open(tmp + "/config.json", "w", encoding="utf-8") as file:
            json.dump({**BASE, **SHAPES[name]}, file)
        more, documents = [], None
        if name in DOCUMENTS:
            documents = "restart" in name
            more = ["--documents", tmp + "/documents"]
            with open(tmp + "/documents", "wb") as file:
                file.write(struct.pack(f"<{len(BORDERS)}Q", *BORDERS))
        t.spillway("init", "--config", tmp + "/config.json", "--seed", 11, "--out", tmp + "/model",
                   "--dtype", "fp32", rc=0)
        t.train(tmp + "/out", "--dtype", "fp32", "--order", "sequential", "--seq-len", TIME,
                "--micro-batch", ROWS, "--steps", STEPS, "--lr", LR, "--schedule", "constant",
                "--warmup", 0, "--weight-decay", DECAY, "--optimizer", "nvme", "--log",
                tmp + "/log.jsonl", *more, data=t.STORIES + "/train.bin", model=tmp + "/model",
                rc=0)
        mine = [(s["loss"], s["grad_norm"]) for s in t.read_log(tmp + "/log.jsonl")[0]]
        worst = 0.0
        theirs = peer(tmp + "/model", tokens, documents)
        for i, ((loss, norm), (want_loss, want_norm)) in enumerate(zip(mine, theirs)):
            worst = max(worst, abs(loss - want_loss))
            t.close(loss, want_loss, 1e-5 if i == 0 else 1e-4, f"loss of step {i + 1}")
            t.close(norm, want_norm, 1e-4, f"gradient norm of step {i + 1}", relative=True)
        print(f"{name}: worst difference of a loss {worst:.1e}", flush=True)


def make(name):
    def check():
        agree(name)
    check.__name__ = name
    t.test(check)


for shape in SHAPES:
    make(shape)

if __name__ == "__main__":
    t.main()
