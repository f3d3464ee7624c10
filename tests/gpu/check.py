"""gpu-check: proves the CUDA back end on the GPUs of a machine. Run by the gpu-check beside it,
from a folder that bundle.py packed; docs/gpu-check.md says what every line means. The programs of
its rows share gpu_support.py.

    gpu-check [--out DIR] [--only ROW,...] [--limit ROW=S] [--seconds S] [--tiny] [--list]

Rows run one after the other, each with a time limit of its own, and none hides the next;
result.json in DIR is written anew after each. Exit status: 0 when nothing failed, 1 when something
did or there is no GPU, 2 for a wrong command line, 130 when stopped.
"""
import argparse
import gzip
import json
import math
import os
import shutil
import signal
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import libraries  # noqa: E402
import run  # noqa: E402

ROOT = run.ROOT
BIN = os.path.join(ROOT, "bin")
SECONDS = 470       # all rows together
STEP_SECONDS = 100  # of these, kept for the step
TINY_PATIENCE = 10  # times these, where a busy CPU plays the GPU
SECONDS_MIN = 5     # with less left, a row is not begun
TITLES = {"a": "what is there", "b": "right results", "c": "equal bits, memory errors",
          "d": "rates", "e": "a step"}
OUTPUT_LINES_MAX = 25  # shown of a row that failed; the log has all


class Row:
    """A line of the table: one program, the tests of it that are run, what came of it."""

    def __init__(self, stage, name, what, source, limit_s, cases=(), tiny=None):
        self.stage, self.name, self.what, self.limit_s = stage, name, what, limit_s
        self.source, self.cases = source, list(cases)
        self.tiny = self.cases if tiny is None else list(tiny)
        self.verdict, self.reason, self.result, self.limit = "not run", "", "", ""
        self.seconds, self.figures, self.program = 0.0, [], None

    def command(self, tiny):
        stem, kind = os.path.splitext(os.path.basename(self.source))
        if kind == ".c":
            return [os.path.join(BIN, "tests", stem)]
        return [sys.executable, os.path.join(ROOT, self.source),
                *(self.tiny if tiny else self.cases)]

    def as_json(self):
        p = self.program
        return {"stage": self.stage, "name": self.name, "what": self.what, "verdict": self.verdict,
                "reason": self.reason, "result": self.result, "limit": self.limit,
                "seconds": round(self.seconds, 2), "limit_s": self.limit_s,
                "figures": self.figures, "passed": p.passed if p else [],
                "failed": [list(f) for f in p.failed] if p else [],
                "skipped": [list(s) for s in p.skipped] if p else []}


def rows():
    """In the order in which they are run: short ones first; what may take all of a machine's memory
    last."""
    golden = ["fp32_noclip", "fp32_clip1", "fp32_noclip_decay2d", "fp32_clip1_decay2d",
              "fp32_clip1_advance_on_the_whole_file", "bf16_stays_within_its_rounding"]
    whole = ["losses_are_those_of_the_host_device", "the_doctor_names_the_device",
             "no_placement_overlap_or_order_of_threads_changes_a_bit",
             "times_are_those_of_the_work_on_the_device", "frozen_tensors_evaluation_and_resume"]
    return [
        Row("a", "machine", "GPUs, driver, libraries", "tests/gpu/machine.py", 40),
        Row("b", "device", "memory, copies, streams, events", "tests/test_cuda_device.c", 20),
        Row("b", "times", "tasks' times are the GPU's", "tests/test_cuda_times.c", 20),
        Row("b", "operators", "kernels against double", "tests/test_cuda_operators.c", 20),
        Row("b", "attention-right", "attention against double", "tests/test_cuda_attention.c", 20),
        Row("b", "adam", "Adam: the CPU's bits", "tests/test_cuda_adam.c", 20),
        Row("b", "golden", "stories260K against PyTorch", "tests/golden.py", 60, golden,
            ["first_loss"]),
        Row("d", "copies", "beside bare cudaMemcpyAsync", "tests/gpu/rates.py", 20, ["copies"]),
        Row("d", "products", "an 8B model's, beside cuBLASLt", "tests/gpu/rates.py", 40,
            ["products"]),
        Row("d", "attention", "8B model's, 4096 tokens", "tests/gpu/rates.py", 20, ["attention"]),
        Row("c", "tiers", "tiers and overlap: equal bits", "tests/same_bits.py", 75,
            ["bf16_with_clipping", "bf16_without_clipping",
             "one_tensor_fifty_times_the_rest_goes_through_small_slots"],
            ["one_tensor_fifty_times_the_rest_goes_through_small_slots"]),
        Row("c", "runs", "placements, resume, the host's losses", "tests/cuda_runs.py", 80, whole,
            ["the_doctor_names_the_device"]),
        Row("c", "ranks", "several GPUs: equal bits", "tests/gpu/ranks_alike.py", 45),
        Row("d", "pytorch", "its attention, same shape", "tests/gpu/rates.py", 40,
            ["attention_of_pytorch"]),
        Row("c", "memcheck", "compute-sanitizer, a step", "tests/gpu/sanitizer.py", 40,
            ["memcheck"]),
        Row("c", "racecheck", "compute-sanitizer, a step", "tests/gpu/sanitizer.py", 40,
            ["racecheck"]),
        Row("e", "step", "8B layers, state in host memory", "tests/gpu/step.py", 150),
    ]


class Stopped(Exception):
    """By a signal."""


def stop(number, _):
    raise Stopped(signal.Signals(number).name)


# ---- what the rows run in ----------------------------------------------------------------------

def unpack(root):
    """Libraries that travel compressed."""
    for name in sorted(os.listdir(os.path.join(root, "lib"))):
        target = os.path.join(root, "lib", name[:-len(".gz")])
        if name.endswith(".gz") and not os.path.exists(target):
            with gzip.open(target + ".gz") as packed, open(target + ".new", "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            os.chmod(target + ".new", 0o755)
            os.rename(target + ".new", target)


def environment(bundle, args):
    """For every row; and what of NVIDIA's libraries was found where."""
    env = run.environment("release")
    found, missing = libraries.search(bundle["to_be_found"])
    folders = libraries.folders_to_add(path for path in found.values() if path)
    if any("nccl" in soname and not path for soname, path in found.items()):
        folders.append(os.path.join(ROOT, "lib", "nccl-absent"))
    for soname in ("libstdc++.so.6", "libgcc_s.so.1"):
        if not libraries.find(soname):
            folders.append(os.path.join(ROOT, "lib", "fallback"))
    known = [p for p in env.get("LD_LIBRARY_PATH", "").split(":") if p]
    env["GPU_CHECK_LD_LIBRARY_PATH"] = ":".join(known)
    env["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys(known + folders))
    env["SPILLWAY"] = os.path.join(BIN, "spillway")
    env["SPILLWAY_CUDA_PLUGIN"] = os.path.join(BIN, "libspillway_cuda.so")
    env["SPILLWAY_TEST_DEVICE"] = "cuda"
    env["GPU_CHECK_LIBRARIES"] = json.dumps({"found": found, "missing": missing})
    env["GPU_CHECK_OUT"] = args.out
    env["GPU_CHECK_TINY"] = "1" if args.tiny else ""
    env["PYTHONPATH"] = os.pathsep.join([os.path.join(ROOT, "tests"),
                                         *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return env, {"found": found, "missing": missing}


# ---- running -----------------------------------------------------------------------------------

class Check:
    def __init__(self, args, bundle):
        self.args, self.bundle = args, bundle
        self.rows = [r for r in rows() if not args.only or r.name in args.only]
        for row in self.rows:
            row.limit_s = args.limits.get(row.name, row.limit_s * (TINY_PATIENCE * args.tiny or 1))
        self.start, self.complete, self.stopped = time.monotonic(), False, ""
        self.end = self.start + args.seconds * (TINY_PATIENCE * args.tiny or 1)
        self.no_gpu, self.libraries = "", {}

    def write(self):
        content = {"schema": 1, "version": self.bundle["version"],
                   "standin": self.bundle["standin"], "complete": self.complete,
                   "stopped": self.stopped, "seconds": round(time.monotonic() - self.start, 2),
                   "libraries": self.libraries, "rows": [r.as_json() for r in self.rows]}
        path = os.path.join(self.args.out, "result.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(path + ".new", path)

    def run_all(self):
        env, self.libraries = environment(self.bundle, self.args)
        self.write()
        names = [row.name for row in self.rows]
        for i, row in enumerate(self.rows):
            left = self.end - time.monotonic()
            if "step" in names[i + 1:]:
                left -= STEP_SECONDS
            if self.no_gpu:
                row.verdict, row.reason = "skipped", "could not run: see machine"
            elif left < SECONDS_MIN:
                row.verdict, row.reason = "skipped", f"{max(left, 0):.0f} s were left of all"
            else:
                self.run_row(row, env, min(row.limit_s, left))
            if row.name == "machine" and row.verdict == "failed":
                self.no_gpu = row.reason
            self.write()

    def run_row(self, row, env, limit_s):
        begin = time.monotonic()
        try:
            print(f"... {row.name}: {row.what} ({limit_s:.0f} s at most)", file=sys.stderr,
                  flush=True)
            row.program = run.Program(row.name, os.path.join(ROOT, row.source),
                                      row.command(self.args.tiny))
            row.program.limit_s = round(limit_s, 1)
            row.program.run("release", {**env, "GPU_CHECK_SECONDS": f"{limit_s:.1f}"})
        except OSError as error:
            row.verdict, row.reason = "failed", f"could not be started: {error}"
        except Stopped as signal_name:
            row.verdict, row.reason = "failed", f"stopped by {signal_name}"
            if row.program and row.program.child:
                run.kill_group(row.program.child.pid)
            raise
        finally:
            row.seconds = time.monotonic() - begin
            # A row that was killed could not: a model may fill the disk.
            shutil.rmtree(os.path.join(ROOT, "build", "tmp"), ignore_errors=True)
        if row.verdict == "not run":
            judge(row)
        self.log(row)

    def log(self, row):
        with open(os.path.join(self.args.out, "log.txt"), "a", encoding="utf-8") as file:
            file.write(f"==== {row.name}: {row.verdict} {row.reason}\n"
                       f"{row.program.output if row.program else ''}\n")
        if row.verdict == "failed" and row.program:
            for line in row.program.output.splitlines()[-OUTPUT_LINES_MAX:]:
                print(f"    | {line[:300]}", file=sys.stderr)


def judge(row):
    """The verdict of a row that ran to its end or its limit."""
    p = row.program
    for line in p.output.splitlines():
        word, _, text = line.partition(": ")
        if word in ("result", "limit"):
            setattr(row, word, text)
        elif word == "figure":
            row.figures.append(json.loads(text))
    names = [name for name, _ in p.skipped]
    row.result = row.result or f"{len(p.passed)} passed" + (
        f"; not here: {', '.join(names)}" if names else "")
    if p.failed:
        row.verdict, row.reason = "failed", "; ".join(f"{n}: {why}" for n, why in p.failed)
    elif not p.passed:
        row.verdict, row.reason, row.result = "skipped", "; ".join(why for _, why in p.skipped), ""
    else:
        row.verdict = "passed"
        row.reason = "; ".join(f"{n}: {why}" for n, why in p.skipped) if row.limit else ""


def table(check):
    print(f"\ngpu-check {check.bundle['version']}"
          f"{' (CPU stand-in: no GPU is tested)' if check.bundle['standin'] else ''}, "
          f"{time.monotonic() - check.start:.0f} s")
    for stage, title in TITLES.items():
        mine = [r for r in check.rows if r.stage == stage]
        if mine:
            print(f"\n{stage}  {title}")
        for row in mine:
            print(f"  {row.verdict:<8} {row.name:<16} {row.what} ({row.seconds:.1f} s)")
            for word in ("result", "limit", "reason"):
                if getattr(row, word):
                    print(f"           {word:<7} {getattr(row, word)[:600]}")
    counts = {v: sum(r.verdict == v for r in check.rows)
              for v in ("passed", "failed", "skipped", "not run")}
    print("\n" + (f"There is no GPU that can be used, so only 'machine' ran. {check.no_gpu[:600]}\n"
                  if check.no_gpu else "")
          + (f"Stopped by {check.stopped}.\n" if check.stopped else "")
          + ", ".join(f"{n} {v}" for v, n in counts.items() if n or v in ("passed", "failed"))
          + f"; {os.path.join(check.args.out, 'result.json')}", flush=True)
    return 1 if counts["failed"] or not counts["passed"] else 0


def positive(parser, asked, text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        parser.error(f"{asked}, in seconds above 0")
    return seconds


def parse():
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=ROOT, metavar="DIR", help="for result.json, log.txt and "
                        "the step's report (default: the folder of gpu-check)")
    parser.add_argument("--only", default="", metavar="ROW,...", help="these rows alone")
    parser.add_argument("--limit", action="append", default=[], metavar="ROW=S",
                        help="another time limit for a row")
    parser.add_argument("--seconds", default=SECONDS, metavar="S",
                        help="for all rows together (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="whether it runs, not how fast")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    args = parser.parse_args()
    names = {row.name for row in rows()}
    args.out = os.path.abspath(args.out)
    args.only = [name for name in args.only.split(",") if name]
    args.seconds = positive(parser, f"--seconds {args.seconds}: a time is wanted", args.seconds)
    args.limits = {}
    for text in args.limit:
        name, _, seconds = text.partition("=")
        args.limits[name] = positive(parser, f"--limit {text}: ROW=SECONDS is wanted", seconds)
    unknown = sorted((set(args.only) | set(args.limits)) - names)
    if unknown:
        parser.error(f"no such row: {' '.join(unknown)}; there are {' '.join(sorted(names))}")
    return args


def main():
    args = parse()
    if args.list:
        for row in rows():
            print(f"{row.stage}  {row.name:<16} {row.limit_s:>4} s  {row.what}")
        return 0
    with open(os.path.join(ROOT, "bundle.json"), encoding="utf-8") as file:
        check = Check(args, json.load(file))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        os.makedirs(args.out, exist_ok=True)
        unpack(ROOT)
        if os.path.exists(os.path.join(args.out, "log.txt")):
            os.unlink(os.path.join(args.out, "log.txt"))
        check.run_all()
        check.complete = True
    except Stopped as signal_name:
        check.stopped = str(signal_name)
    except OSError as error:
        print(f"gpu-check: {error}; its folder and --out have to be writable", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end takes no time
    check.write()
    status = table(check)
    return 130 if check.stopped else status


if __name__ == "__main__":
    sys.exit(main())
