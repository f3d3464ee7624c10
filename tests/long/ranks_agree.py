#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel (DDP) and FullyShardedDataParallel (FSDP, FULL_SHARD) beside
--ranks: the same model, the same rows for each rank, torch's AdamW, gloo on the CPU.

Twenty steps in FP32 on the bundled model and on a random untied one, with 2 and 4 ranks, clipping
on, off, and on with a mask that leaves the ranks unequal numbers of tokens. The program trains each
case with --zero 1, 2 and 3, and each must agree with both peers at every step: losses to 1e-4,
gradient norms to 1e-4 relative (the limits of models/stories260k/README.md). Weights stay on the
devices; that streamed ones give the same bits is for tests/ranks.py to show. Which of the ranks has
which rows is not seen, as sums over ranks are the same. Runs in a Python that has torch and
transformers.
"""
import datetime
import functools
import json
import os
import sys

# Last, as a test must not stand for an installed module of its name.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy  # noqa: E402
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
ROWS, TIME, STEPS, LR, DECAY = 4, 48, 20, 1e-3, 0.1
STAGES = (1, 2, 3)
LOSS, NORM = 1e-4, 1e-4
# A layer of it takes 209 blocks of 256 elements, so its shards are padded for 2 and for 4 ranks.
UNTIED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 72,
          "intermediate_size": 180, "num_hidden_layers": 3, "num_attention_heads": 6,
          "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 64,
          "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
          "initializer_range": 0.1, "tie_word_embeddings": False, "torch_dtype": "float32",
          "bos_token_id": 1, "eos_token_id": 2}


def uneven(ranks):
    """A mask by which rank r counts one token in 3 r + 1, and the last one none in each fourth
    step."""
    rank_tokens = ROWS * TIME
    mask = bytearray(1)  # the first token is never predicted
    for i in range(STEPS * ranks * rank_tokens):
        rank, step = i // rank_tokens % ranks, i // rank_tokens // ranks
        mask.append(i % (3 * rank + 1) == 0 and not (rank == ranks - 1 and step % 4 == 3))
    return bytes(mask)


# ---- the peers, one process for each rank ------------------------------------------------------

def fully_sharded(model):
    """Each layer is gathered for itself. The original parameters are kept apart, since two groups
    of them decay differently."""
    policy = functools.partial(transformer_auto_wrap_policy,
                               transformer_layer_cls={LlamaDecoderLayer})
    return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.FULL_SHARD,
                                    auto_wrap_policy=policy, use_orig_params=True,
                                    device_id=torch.device("cpu"))


PEERS = {"DDP": DistributedDataParallel, "FSDP": fully_sharded}


def summed(value):
    """The sum over ranks, of a number or a tensor, in double precision."""
    total = torch.as_tensor(value).detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total.item()


def peer(kind, rank, ranks, path, clip, tokens, mask):
    """(loss, gradient norm, tokens, mean of the ranks' means) of each step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    model = model.float().train()
    elements = sum(p.numel() for p in model.parameters())
    model = PEERS[kind](model)
    # A peer that quietly kept whole replicas would train as well.
    held = summed(sum(p.numel() for p in model.parameters()))
    t.equal(held, elements * (ranks if kind == "DDP" else 1), f"{kind}: elements on all ranks")
    # Known by name, as a shard of any parameter is a vector.
    groups = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[name.endswith("norm.weight")].append(parameter)
    optimizer = torch.optim.AdamW([{"params": groups[False], "weight_decay": DECAY},
                                   {"params": groups[True], "weight_decay": 0.0}],
                                  lr=LR, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(STEPS):
        at = (step * ranks + rank) * ROWS * TIME
        x, y, counts = (of[at + s:at + s + ROWS * TIME].view(ROWS, TIME)
                        for of, s in ((tokens, 0), (tokens, 1), (mask, 1)))
        total = summed(counts.sum())
        optimizer.zero_grad()
        logits = model(input_ids=x, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(),
                                                   reduction="none")
        loss = (losses * counts.flatten()).sum()
        # Both peers divide the sum of the ranks' gradients by the number of ranks.
        (loss * (ranks / total)).backward()
        limit = clip or float("inf")
        norm = (model.clip_grad_norm_(limit) if kind == "FSDP"
                else torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
        optimizer.step()
        steps.append((summed(loss) / total, norm.item(), total,
                      summed(loss / counts.sum().clamp(min=1)) / ranks))
    return steps


def work(rank, ranks, folder, *case):
    """A process of the peers. The first one writes what all of them found."""
    torch.set_num_threads(1)  # the ranks share the cores
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{os.path.abspath(folder)}/meeting",
                            rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=300))
    found = {kind: peer(kind, rank, ranks, *case) for kind in PEERS}
    if rank == 0:
        with open(folder + "/peers.json", "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def peers(folder, ranks, path, clip, tokens, mask):
    # Forked, as importing torch in each of them would take longer than the steps.
    try:
        torch.multiprocessing.start_processes(
            work, (ranks, folder, path, clip, torch.tensor(list(tokens)),
                   torch.tensor(list(mask), dtype=torch.float32)),
            nprocs=ranks, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        text = str(error).strip()
        raise t.Failed(f"the peers: {text.splitlines()[-1]}\n{text}") from error
    with open(folder + "/peers.json", encoding="utf-8") as file:
        return json.load(file)


# ---- the program beside them -------------------------------------------------------------------

def mine(folder, ranks, stage, path, clip, masked):
    """The log's steps. The rows of a rank go through the model in two micro-batches."""
    log = f"{folder}/zero-{stage}.jsonl"
    t.train(f"{folder}/zero-{stage}", "--ranks", ranks, "--zero", stage, "--dtype", "fp32",
            "--order", "sequential", "--seq-len", TIME, "--micro-batch", ROWS // 2,
            "--accumulate", 2, "--steps", STEPS, "--lr", LR, "--schedule", "constant",
            "--warmup", 0, "--weight-decay", DECAY, "--clip", clip, "--optimizer", "nvme",
            "--device-threads", 1, "--log", log, *(["--mask", folder + "/mask"] if masked else []),
            data=folder + "/data.bin", model=path, rc=0, timeout_s=300)
    return t.read_log(log)[0]


def compare(got, want, what):
    """The largest differences of a loss and, relative, of a gradient norm."""
    t.equal(len(got), STEPS, f"{what}: steps")
    apart = (max(abs(s["loss"] - loss) for s, (loss, *_) in zip(got, want)),
             max(abs(s["grad_norm"] / norm - 1) for s, (_, norm, *_) in zip(got, want)))
    for i, (s, (loss, norm, count, _)) in enumerate(zip(got, want), 1):
        t.equal(s["tokens"], count, f"{what}: tokens of step {i}")
        t.close(s["loss"], loss, LOSS, f"{what}: loss of step {i}")
        t.close(s["grad_norm"], norm, NORM, f"{what}: gradient norm of step {i}", relative=True)
    return apart


def model_folder(folder, name):
    if name == "stories260k":
        return t.MODEL
    with open(folder + "/config.json", "w", encoding="utf-8") as file:
        json.dump(UNTIED, file)
    t.spillway("init", "--config", folder + "/config.json", "--seed", 11, "--out",
               folder + "/model", "--dtype", "fp32", rc=0)
    return folder + "/model"


def agree(name, ranks, how):
    tokens = t.read_tokens(t.STORIES + "/train.bin")[:STEPS * ranks * ROWS * TIME + 1]
    masked, clip = how == "masked", 0 if how == "unclipped" else 1
    mask = uneven(ranks) if masked else bytes([1]) * len(tokens)
    with t.folder("peer-") as tmp:
        t.write_tokens(tmp + "/data.bin", tokens)
        with open(tmp + "/mask", "wb") as file:
            file.write(mask)
        path = model_folder(tmp, name)
        theirs = peers(tmp, ranks, path, clip, tokens, mask)
        runs = {stage: mine(tmp, ranks, stage, path, clip, masked) for stage in STAGES}
    # A case without one clipped step would not have tried clipping.
    t.check(not clip or any(s["clip_factor"] < 1 for s in runs[1]), "no step was clipped")
    for kind, want in theirs.items():
        found = []
        for stage, got in runs.items():
            loss, norm = compare(got, want, f"--zero {stage} and {kind}")
            found.append(f"--zero {stage} {loss:.1e}, {norm:.1e}")
        if masked:
            # Were this small, a mean over ranks of their means would pass as well.
            other = abs(want[0][3] - want[0][0])
            t.check(other > 100 * LOSS, f"the mask is too even: {other:.1e}")
        print(f"{name}, {ranks} ranks, {how}, {kind}: largest differences of a loss, of a norm: "
              + "; ".join(found), flush=True)


def make(*case):
    def check():
        agree(*case)
    check.__name__ = f"{case[0]}_{case[1]}_ranks_{case[2]}"
    t.test(check)


for model_name in ("stories260k", "untied"):
    for rank_count in (2, 4):
        for way in ("clipped", "unclipped", "masked"):
            make(model_name, rank_count, way)

if __name__ == "__main__":
    print(f"torch {torch.__version__} (gloo), transformers {transformers.__version__}, Python "
          f"{sys.version.split()[0]}", flush=True)
    t.main()
