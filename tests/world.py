#!/usr/bin/env python3
"""Several processes under mpirun: sums with the bits of a plain loop, and every fault ends all.

time limit: 240 s

tests/support_world.c is what runs: it compares every result itself. Nothing here depends on speed
but the ends of runs in which a process is stopped, killed or late.
"""
import contextlib
import os
import re
import shutil
import signal
import time

import support as t

WORLD = os.path.join(t.ROOT, "build", t.CONFIG, "tests", "support_world")
PLUGIN = os.path.join(os.path.dirname(t.SPILLWAY), "libspillway_mpi.so")
NOWHERE = os.path.join(t.ROOT, "build", "no_such_plugin.so")
LAUNCHED = re.compile(r"(OMPI|PMIX|PMI|SLURM)_")
TIMEOUT_S = 3 * t.SLOWDOWN
# What mpirun takes to start processes and, a second each, to end those that do not end.
MPIRUN_S = 6 * t.SLOWDOWN
FAILED = 3  # support_world.c's exit status after an error of a call

for _name in list(os.environ):  # these tests may themselves run under a launcher
    if LAUNCHED.match(_name):
        del os.environ[_name]
# Whole stacks, so that what Open MPI never frees is known as its own (lsan.supp): the parts of it
# that are unloaded at its end have no names any more.
os.environ["ASAN_OPTIONS"] = os.environ.get("ASAN_OPTIONS", "") + ":fast_unwind_on_malloc=0"


def alone(*args, **env):
    return t.Process(args, program=WORLD, env=env).finish()


def start(processes, *args, timeout_s=None, **env):
    """support_world under mpirun."""
    if not shutil.which("mpirun"):
        t.skip("no mpirun here: make deps")
    if not os.path.exists(PLUGIN):
        t.skip("built without Open MPI: make deps")
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", processes]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    env.setdefault("SPILLWAY_MPI_PLUGIN", PLUGIN)
    if timeout_s:
        env["WORLD_TIMEOUT_S"] = str(timeout_s)
    return t.Process(command + [WORLD, *args], program="nice", env=env)


def mpirun(processes, *args, **options):
    return start(processes, *args, **options).finish()


def errors(run):
    return re.findall(r"^\[\d+\] error: .*$", run.stderr, re.M)


def works(processes, *args):
    run = mpirun(processes, *args)
    t.equal(run.rc, 0, f"exit status of {processes} processes", run)
    t.equal(errors(run), [], "errors", run)


def fails(run, text, counts=(1,)):
    """The run has failed and reported this, so many times."""
    t.equal(run.rc, FAILED, "exit status", run)
    t.check(re.search(text, "\n".join(errors(run))), f"no error matching {text!r}", run)
    t.check(len(errors(run)) in counts, f"{len(errors(run))} errors reported", run)


def pids(process, count):
    """{process: its id} once all are at work."""
    for index in range(count):
        process.wait_for(rf"^\[{index}\] is at work, pid \d+$")
    return {int(i): int(pid) for i, pid in
            re.findall(r"^\[(\d+)\] is at work, pid (\d+)$", process.text(), re.M)}


def are_gone(process_ids, run):
    end = time.monotonic() + MPIRUN_S
    for pid in process_ids:
        while os.path.exists(f"/proc/{pid}"):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                t.check(False, f"process {pid} is still there", run)
            time.sleep(0.05)


# ---- what works --------------------------------------------------------------------------------

@t.test
def a_process_alone_opens_nothing():
    run = alone("nothing", SPILLWAY_MPI_PLUGIN=NOWHERE)
    t.equal(run.rc, 0, "exit status", run)
    t.contains(run.stdout, "process 0 of 1,", "output", run)
    for path in (t.SPILLWAY, WORLD):
        with open(path, "rb") as file:
            t.check(b"libmpi" not in file.read(), f"{path} is linked with MPI")
    # A batch script of Slurm's, and a launcher of one process.
    for env in ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
                {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0",
                 "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}):
        run = alone("nothing", SPILLWAY_MPI_PLUGIN=NOWHERE, **env)
        t.equal(run.rc, 0, f"exit status with {env}", run)


@t.test
def two_processes_equal_a_plain_loop():
    for ranks in (1, 2, 3):
        works(2, "sizes", ranks)


@t.test
def three_processes_equal_a_plain_loop():
    for ranks in (1, 2, 3):
        works(3, "sizes", ranks)


@t.test
def channels_work_beside_each_other():
    works(2, "channels")
    works(3, "channels")


@t.test
def long_messages_arrive():
    """WORLD_LONG=1: more than 2 GiB from each process, where there are 10 GB of memory."""
    works(2, "long", 2**28 + 4099 if os.environ.get("WORLD_LONG") else 5 * 10**6 + 3)


@t.test
def the_end_waits_for_all():
    works(2, "dawdle", 1)


# ---- what is refused ---------------------------------------------------------------------------

@t.test
def without_the_plugin_the_remedy_is_named():
    for env, name in (({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
                       "mpirun has started 2 processes"),
                      ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
                       "srun has started 3 processes"),
                      ({"PMI_SIZE": "4", "PMI_RANK": "1"}, "has started 4 processes"),
                      ({"PMIX_RANK": "0"}, "has started this process")):
        run = alone("nothing", SPILLWAY_MPI_PLUGIN=NOWHERE, **env)
        fails(run, re.escape(name) + ".*'make deps' and 'make' build it")
        t.contains(run.stderr, NOWHERE, "error", run)
    # Beside the executable, when nothing names it.
    run = alone("nothing", SPILLWAY_MPI_PLUGIN="", PMI_SIZE="2", PMI_RANK="0")
    fails(run, re.escape(os.path.join(os.path.dirname(WORLD), "libspillway_mpi.so")))


@t.test
def another_library_is_no_plugin():
    if not os.path.exists(PLUGIN):
        t.skip("built without Open MPI: make deps")
    fails(alone("nothing", SPILLWAY_MPI_PLUGIN="libm.so.6", PMI_SIZE="2", PMI_RANK="0"),
          "libm.so.6 is none of this version; build program and plugin together")


@t.test
def a_launcher_of_another_mpi_is_told():
    if not os.path.exists(PLUGIN):
        t.skip("built without Open MPI: make deps")
    fails(alone("nothing", SPILLWAY_MPI_PLUGIN=PLUGIN, PMI_SIZE="2", PMI_RANK="0"),
          "has started 2 processes, but MPI sees 1: .*mpirun, or with 'srun --mpi=pmix'")


@t.test
def srun_without_pmix_is_told_how_to_give_it():
    """Before Open MPI starts, which under a real srun ends the program in its own words."""
    if not os.path.exists(PLUGIN):
        t.skip("built without Open MPI: make deps")
    step = {"SLURM_STEP_NUM_TASKS": "2"}
    for more, warned in (({"SLURM_PROCID": "0"}, 1), ({"SLURM_PROCID": "1"}, 0),
                         ({"SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}, 1)):
        run = alone("nothing", SPILLWAY_MPI_PLUGIN=PLUGIN, **step, **more)
        fails(run, "has started 2 processes, but MPI sees 1")
        t.equal(run.stderr.count("start the run with 'srun --mpi=pmix' ('srun --mpi=list' tells"),
                warned, f"warnings with {more}", run)


@t.test
def a_way_that_loses_what_is_sent_is_told_before_anything_starts():
    """One way only: by the process whose words do not arrive, with both addresses; both ways: by
    whoever hears nothing."""
    lossy = t.preload("one_way")["LD_PRELOAD"]  # opened as the plugin that it is
    options = {"SPILLWAY_MPI_PLUGIN": lossy, "ONE_WAY_PLUGIN": PLUGIN, "timeout_s": TIMEOUT_S}
    for processes, begin, end in ((2, 0, 1), (2, 1, 0), (3, 2, 1)):
        run = mpirun(processes, "nothing", ONE_WAY_LOST=f"{begin}>{end}", **options)
        t.check(run.rc not in (0, FAILED), f"{begin} to {end}: exit status {run.rc}", run)
        told = [e for e in re.findall(r"error: .*$", run.stderr, re.M) if "one way only" in e]
        t.equal(len(told), 1, "errors", run)
        where = r"\S+ \(([^()]+)\)"
        t.check(re.match(rf"error: world: process {end} on {where} is heard, and has not "
                         rf"acknowledged within \S+ s what process {begin} on {where} sends",
                         told[0]), told[0], run)
        t.check("process 0 of" not in run.stdout, "something has started", run)
        t.check(run.seconds < 2 * TIMEOUT_S + 2 * MPIRUN_S, f"{run.seconds:.1f} s", run)
    run = mpirun(2, "nothing", ONE_WAY_LOST="0>1,1>0", **options)
    t.check(re.search(r"error: world: nothing has come from process (0 to process 1|1 to process 0)"
                      r" on \S+ \([^()]+\) within", run.stderr), "neither is heard", run)
    t.check(run.rc not in (0, FAILED), f"exit status {run.rc}", run)
    run = mpirun(2, "nothing", ONE_WAY_LOST="0>1", **{**options, "SPILLWAY_MPI_PLUGIN": PLUGIN})
    t.equal(run.rc, 0, "exit status where nothing is lost", run)


@t.test
def different_calls_are_named():
    for args, text in (
            (("gather", "gather12", 2, 3), "process 1 calls all_gather of 12 bytes while process 0 "
                                           "calls all_gather of 8 bytes; all processes must"),
            (("exchange", "gather", 0, 1), "process 1 calls exchange of 4 bytes while process 0 "
                                           "calls all_gather of 8 bytes"),
            (("scatter", "scatter_bf16", 2, 3), "process 1 calls reduce_scatter of 2 values "
                                                "carried as bf16 while process 0 calls "
                                                "reduce_scatter of 2 values carried as fp32"),
            (("exchange", "scatter", 3, 3), "rank 3 calls reduce_scatter of 2 values carried as "
                                            "fp32 while rank 2 calls exchange of 4 bytes"),
            (("sum", "broadcast", 2, 3), "rank 2 calls broadcast of 24 bytes from rank 0 while "
                                         "rank 0 calls sum of 3 values"),
            (("agree_a", "agree_b", 2, 3), "line 1 differs: rank 0 has 'a=1', rank 2 has 'a=2'")):
        fails(mpirun(2, "odd", *args), text)


@t.test
def numbers_of_ranks_are_compared():
    fails(mpirun(3, "unequal", 2, 2, 3), "process 2 has 3 ranks while process 0 has 2; all")
    # Both can tell, unless one hears first that the other has.
    fails(mpirun(2, "unequal", 33, 33), "2 processes with 33 ranks each are more than the 64",
          (1, 2))


# ---- what fails --------------------------------------------------------------------------------

@t.test
def a_late_process_is_named():
    run = mpirun(2, "odd", "gather", "late", 2, 3, timeout_s=TIMEOUT_S)
    fails(run, f"process 1 did not come to all_gather of 8 bytes within {TIMEOUT_S} s of process "
               "0")
    t.check(run.seconds < 2 * TIMEOUT_S + MPIRUN_S, f"it took {run.seconds:.1f} s", run)
    run = mpirun(2, "dawdle", 100, timeout_s=TIMEOUT_S)
    t.check(run.rc != 0, "exit status is 0", run)
    t.check("process 1 did not come to the end of the run within" in run.stderr, "not named", run)


@t.test
def a_process_that_is_killed_ends_all():
    process = start(3, "endless", timeout_s=TIMEOUT_S)
    ids = pids(process, 3)
    begin = time.monotonic()
    os.kill(ids[1], signal.SIGKILL)
    run = process.finish()
    seconds = time.monotonic() - begin
    t.check(run.rc != 0, "exit status is 0", run)
    t.check(seconds < 2 * TIMEOUT_S + MPIRUN_S, f"it took {seconds:.1f} s", run)
    are_gone(ids.values(), run)


@t.test
def a_process_that_is_stopped_ends_all():
    for processes in (2, 3):
        process = start(processes, "endless", timeout_s=TIMEOUT_S)
        ids = pids(process, processes)
        begin = time.monotonic()
        os.kill(ids[1], signal.SIGSTOP)
        run = process.finish()
        seconds = time.monotonic() - begin
        t.check(run.rc != 0, "exit status is 0", run)
        t.check(seconds < 2 * TIMEOUT_S + MPIRUN_S, f"it took {seconds:.1f} s", run)
        t.check(re.search(rf"^\[[02]\] error: world: process 1 has not been heard of for "
                          rf"{TIMEOUT_S} s, in \w+ of \d+ ", run.stderr, re.M), "not named", run)
        t.check(all("process 1 " in line for line in errors(run)), "another is blamed", run)
        are_gone(ids.values(), run)


@t.test
def a_run_that_is_stopped_as_a_whole_goes_on():
    process = start(2, "endless", timeout_s=TIMEOUT_S)
    ids = pids(process, 2)
    for number, seconds in ((signal.SIGSTOP, TIMEOUT_S * 1.5), (signal.SIGCONT, TIMEOUT_S / 2)):
        for pid in ids.values():
            os.kill(pid, number)
        time.sleep(seconds)
    t.check(" error: " not in process.text(), f"an error in {process.text()[-800:]!r}")
    t.check(all(os.path.exists(f"/proc/{pid}") for pid in ids.values()), "a process has ended")
    process.signal(signal.SIGTERM)
    are_gone(ids.values(), process.finish())


@t.test
def an_abort_ends_every_call_everywhere():
    for processes in (2, 3):
        run = mpirun(processes, "abort")
        t.equal(run.rc, FAILED, "exit status", run)
        t.equal(errors(run), [], "errors, which whoever aborts has reported", run)
        for index in range(processes):
            t.contains(run.stdout, f"[{index}] ended by Input/output error", "output", run)
        last = processes - 1
        t.contains(run.stderr, f"warning: world: process {last} has ended the run (Input/output "
                               "error); its own report tells why", "output", run)


@t.test
def a_process_that_leaves_ends_the_others():
    run = mpirun(3, "leave")
    t.equal(run.rc, FAILED, "exit status", run)
    t.equal(errors(run), [], "errors", run)
    t.contains(run.stderr, "warning: world: process 1 has ended with status 3", "output", run)


if __name__ == "__main__":
    t.main()
