"""Stage c of gpu-check: a training step under compute-sanitizer, where the machine has it."""
import os
import re
import shutil
import subprocess

import gpu_support as g
import support as t

# What it says where a machine or a driver does not admit it.
REFUSALS = re.compile(r"Device not supported|Unable to (?:attach|initialize|launch)|not permitted"
                      r"|LibraryNotLoaded|profiling is not supported")


def tool():
    homes = [os.environ[n] for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)]
    for home in [None, *homes, "/usr/local/cuda"]:
        path = os.path.join(home, "bin", "compute-sanitizer") if home else "compute-sanitizer"
        if shutil.which(path):
            return shutil.which(path)
    t.skip("no compute-sanitizer on PATH, in CUDA_HOME or in /usr/local/cuda")
    return None


def run_under(check):
    command = [tool(), "--tool", check, "--error-exitcode", "99"]
    command += ["--report-api-errors", "no"] if check == "memcheck" else []
    with t.folder() as tmp:
        command += [t.SPILLWAY, "train", "--model", t.MODEL, "--data", t.STORIES + "/train.bin",
                    "--out", tmp + "/out", "--device", "cuda", "--ranks", "1", "--steps", "1",
                    "--seq-len", "16"]
        try:
            run = subprocess.run(command, cwd=t.ROOT, stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.STDOUT, timeout=max(g.SECONDS - 3, 1))
        except subprocess.TimeoutExpired:
            t.skip(f"not over within {g.SECONDS - 3:.0f} s")
    print(run.stdout[-3000:])
    refusal = REFUSALS.search(run.stdout)
    if refusal:
        t.skip(f"compute-sanitizer is refused here: {refusal.group(0)}")
    summary = re.search(r"SUMMARY: (.*)", run.stdout)
    t.check(run.returncode == 0 and summary and re.match(r"0 (errors|hazards)", summary.group(1)),
            f"exit status {run.returncode}: {summary.group(1) if summary else 'no summary'}")
    g.result(summary.group(1))


@t.test
def memcheck():
    run_under("memcheck")


@t.test
def racecheck():
    run_under("racecheck")


if __name__ == "__main__":
    t.main()
