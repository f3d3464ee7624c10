"""GPUs of several processes under mpirun, on the CPU stand-in: the bits of one process with as many
GPUs, each GPU with one rank, and an end for all when one of them ends.

time limit: 240 s
"""
import fcntl
import os
import re
import signal
import socket
import struct

import support as t
from support_processes import alone, job, launch, outcome, ranks_of

PLUGIN = os.path.join(os.path.dirname(t.SPILLWAY), "standin", "libspillway_cuda.so")
ENV = {"SPILLWAY_CUDA_PLUGIN": PLUGIN, "STANDIN_DEVICES": "4"}
CUDA = ["--device", "cuda"]
SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP = 0x8913, 0x8915, 1
STEPS = 3  # the second uses what the first has updated, and its update is used as well


def of_one(out, ranks, *more):
    run = alone(out, *CUDA, "--ranks", ranks, *more, "--log", out + ".jsonl", steps=STEPS, env=ENV)
    return outcome(run, out, out + ".jsonl")


def of_many(processes, out, ranks, *more, env=None):
    run = job(processes, out, *CUDA, "--ranks", ranks, *more, "--log", out + ".jsonl", steps=STEPS,
              env={**ENV, **(env or {})})
    return outcome(run, out, out + ".jsonl"), run


@t.test
def processes_give_the_bits_of_one():
    """Sums of the library's, in FP32, and of the ranks' order, carried as BF16; streams that run in
    other orders in each process."""
    with t.folder() as tmp:
        for i, (ranks, more) in enumerate((
                (4, ["--optimizer", "nvme"]),
                (4, ["--clip", 0, "--params", "host", "--reduce-dtype", "bf16", "--accumulate", 2]),
                (2, ["--zero", 1, "--dtype", "fp32", "--params", "nvme", "--optimizer", "nvme",
                     "--gradients", "nvme"]))):
            want = of_one(f"{tmp}/{i}", ranks, *more)
            for seed in ("late:1", "last") if i == 0 else ("late:3",):
                got, run = of_many(2, f"{tmp}/{i}-{seed[:4]}", ranks // 2, *more,
                                   env={"STANDIN_STREAMS": seed})
                t.check(got == want, f"{more}, {seed}: other bits", run)
        got, run = of_many(4, f"{tmp}/four", 1, "--optimizer", "nvme")
        t.check(got == of_one(f"{tmp}/one", 4, "--optimizer", "nvme"), "four processes", run)
        t.contains(run.stdout, "operators=cuda", "what computes", run)


@t.test
def replicas_in_other_processes_change_no_bit_between_stages_and_tiers():
    """Shards inside a process, replicas across: two communicators on each GPU. With one GPU in each
    process both are one sum of two."""
    with t.folder() as tmp:
        want = None
        for i, more in enumerate((["--zero", 2], ["--optimizer", "nvme"],
                                  ["--params", "host", "--overlap", "none"])):
            got, run = of_many(2, f"{tmp}/{i}", 2, "--shard", "node", "--dtype", "fp32", *more)
            want = want or got
            t.check(got == want, f"{more}: other bits", run)
        world = of_one(f"{tmp}/world", 4, "--dtype", "fp32")
        t.check(want[0] != world[0], "the order of sums is the world's")
        for (step, loss, _), (_, other, _) in zip(want[1], world[1]):
            t.close(loss, other, 2e-5 * step, f"loss of step {step}")
        pair, run = of_many(2, f"{tmp}/pair", 1, "--shard", "node", "--dtype", "fp32")
        t.check(pair == of_one(f"{tmp}/two", 2, "--dtype", "fp32"), "one GPU in each process", run)


@t.test
def a_gpu_has_one_rank():
    with t.folder() as tmp:
        for devices, says in ((1, r"ranks 0 and 1 of processes 0 and 1 would both be GPU \S+: let"),
                              (3, "--ranks 2: process 1 sees 3 GPUs, and of 2 processes on this")):
            run = job(2, f"{tmp}/{devices}", *CUDA, "--ranks", 1 if devices == 1 else 2, rc=None,
                      env={**ENV, "STANDIN_DEVICES": str(devices)})
            t.check(run.rc != 0 and re.search(says, run.text), f"{devices} GPUs", run)
            t.check(not os.path.exists(f"{tmp}/{devices}"), "something was made", run)


@t.test
def gpus_that_do_not_find_each_other_are_told():
    with t.folder() as tmp:
        run = job(2, f"{tmp}/out", *CUDA, "--rank-timeout", 3, rc=None,
                  env={**ENV, "STANDIN_NCCL": "apart"})
        t.check(run.rc != 0 and run.seconds < 40, f"{run.rc} after {run.seconds:.1f} s", run)
        says = (r"error: collective: 2 GPUs, of which ranks [01] to [01] are here, did not come "
                r"together within 3 s; NCCL_SOCKET_IFNAME \(here: \S+\) chooses")
        t.check(re.search(says, run.text), "error", run)
        t.check(not os.path.exists(f"{tmp}/out"), "something was made", run)


def networks():
    """What NCCL is told where all of this machine's addresses are sound: names, but for those of
    kinds that it takes where there is nothing else."""
    names = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                flags = fcntl.ioctl(any_socket, SIOCGIFFLAGS, request)
                fcntl.ioctl(any_socket, SIOCGIFADDR, request)
            except OSError:
                continue
            if struct.unpack_from("16sh", flags)[1] & IFF_UP:
                names.append(name)
    kinds = [[n for n in names if re.match("ib", n)],
             [n for n in names if not re.match("ib|docker|lo|virbr", n)],
             *([n for n in names if n.startswith(kind)] for kind in ("docker", "lo", "virbr"))]
    return "=" + ",".join(next(kind for kind in kinds if kind))


@t.test
def nccl_is_told_the_network_on_which_processes_have_found_each_other():
    """Before it looks; but for what the user has chosen, in the environment or in NCCL's file."""
    with t.folder() as tmp:
        want = of_one(f"{tmp}/one", 2)
        with open(f"{tmp}/nccl.conf", "w", encoding="ascii") as file:
            file.write("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth\n")
        for i, (seen, env) in enumerate(((networks(), {}),
                                         ("lo", {"NCCL_SOCKET_IFNAME": "lo"}),
                                         ("", {"NCCL_CONF_FILE": f"{tmp}/nccl.conf"}))):
            got, run = of_many(2, f"{tmp}/{i}", 1, "--rank-timeout", 5,
                               env={**env, "STANDIN_NCCL": "network:" + seen})
            t.check(got == want, f"{env}: other bits", run)


@t.test
def a_process_that_is_killed_ends_the_others():
    with t.folder() as tmp:
        process = launch(2, f"{tmp}/out", *CUDA, "--optimizer", "nvme", "--rank-timeout", 5,
                         steps=100000, env=ENV)
        process.wait_for(r"step +[0-9]+/")
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        run = process.finish(60)
        t.check(run.rc != 0, "exit status", run)


@t.test
def a_way_that_one_process_does_not_trust_no_process_takes():
    """Wrong bytes between GPUs 0 and 1, which are one process's: the other one hears of it."""
    with t.folder() as tmp:
        want = of_one(f"{tmp}/one", 4)
        got, run = of_many(2, f"{tmp}/two", 2, env={"STANDIN_PEER": "wrong:0>1"})
        t.check(got == want, "through the host: other bits", run)
        t.contains(run.text, "GPU 0 brings wrong bytes into the memory of GPU 1", "warning", run)


@t.test
def a_copy_that_never_ends_in_one_of_several_processes_is_told_with_the_remedy():
    """A process cannot leave the others and come back, so the run ends; what it names helps."""
    with t.folder() as tmp:
        env = {**ENV, "STANDIN_PEER": "hang:2>3"}
        run = job(2, f"{tmp}/out", *CUDA, "--ranks", 2, rc=None, env=env)
        t.check(run.rc != 0 and run.seconds < 40, f"{run.rc} after {run.seconds:.1f} s", run)
        t.check(re.search(r"error: process 1 cannot be started again by itself.*"
                          r"NCCL_P2P_DISABLE=1 in the environment of all processes", run.text),
                "error", run)
        t.check(not os.path.exists(f"{tmp}/out"), "something was made", run)
        got, run = of_many(2, f"{tmp}/two", 2, env={**env, "NCCL_P2P_DISABLE": "1"})
        t.check(got == of_one(f"{tmp}/one", 4), "as it says: other bits", run)


if __name__ == "__main__":
    t.main()
