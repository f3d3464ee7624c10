"""Helpers of the whole-program tests: run spillway, measure it, read what it wrote.

    import support as t

    @t.test
    def losses_fall():
        with t.folder() as tmp:
            run = t.spillway("train", "--out", tmp + "/out", ...)
            t.equal(run.rc, 0, "exit status", run)

    if __name__ == "__main__":
        t.main()

main() runs the functions marked with @test in order, or those named on the command line, prints
"ok NAME", "FAIL NAME: reason" or "skip NAME: reason" for each, and exits with 1 if one failed.
The standard library only.
"""
import array
import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIG = os.environ.get("CONFIG") or "release"
# What somebody measured here once decides no test and no benchmark.
os.environ.setdefault("SPILLWAY_PROFILE", "")
SPILLWAY = os.environ.get("SPILLWAY") or os.path.join(ROOT, "build", "spillway")
DEVICE = os.environ.get("SPILLWAY_TEST_DEVICE")  # cuda: training that names no device is on a GPU
SANITIZED = CONFIG in ("asan", "tsan")
SLOWDOWN = {"asan": 4, "tsan": 8, "debug": 3}.get(CONFIG, 1)
MODEL = "models/stories260k"
SHAKESPEARE = "data/tinyshakespeare"
STORIES = "data/tinystories"

# A model of 26 million parameters, for `spillway init`.
MIDDLE_MODEL = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512,
                "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
                "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 128,
                "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
                "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


# ---- tests and their verdicts ------------------------------------------------------------------

class Failed(Exception):
    """A check that did not hold."""


class Skipped(Exception):
    """A test that cannot be made here."""


_tests = []


def test(function):
    _tests.append(function)
    return function


def skip(reason):
    raise Skipped(reason)


def _context(run):
    if run is None:
        return ""
    tail = "\n".join((run.stdout + run.stderr).splitlines()[-30:])
    return f"\n  command: {' '.join(run.args)}\n  exit status: {run.rc}\n  output:\n{tail}"


def check(condition, what, run=None):
    if not condition:
        raise Failed(what + _context(run))


def equal(got, want, what, run=None):
    check(got == want, f"{what}: got {got!r}, want {want!r}", run)


def close(got, want, limit, what, relative=False, run=None):
    """|got - want| <= limit, or limit * |want|; a NaN never passes."""
    bound = limit * abs(want) if relative else limit
    check(abs(got - want) <= bound,
          f"{what}: got {got!r}, want {want!r} within {bound:.3g}, off by {abs(got - want):.3g}",
          run)


def contains(text, part, what, run=None):
    check(part in text, f"{what}: {part!r} not in {text[-600:]!r}", run)


def main():
    os.chdir(ROOT)
    wanted = sys.argv[1:]
    unknown = set(wanted) - {f.__name__ for f in _tests}
    if unknown or not _tests:
        print(f"FAIL tests: no such test: {' '.join(sorted(unknown)) or 'none at all'}")
        sys.exit(1)
    failures = 0
    for function in _tests:
        name = function.__name__
        if wanted and name not in wanted:
            continue
        try:
            function()
            print(f"ok {name}", flush=True)
        except Skipped as reason:
            print(f"skip {name}: {reason}", flush=True)
        except Exception as error:  # any surprise is this test's failure, the others still run
            failures += 1
            first, _, rest = str(error).partition("\n")
            if not isinstance(error, Failed):
                first, rest = f"{type(error).__name__}: {first}", traceback.format_exc()
            print(f"FAIL {name}: {first}\n{rest}", flush=True)
    sys.exit(1 if failures else 0)


# ---- folders -----------------------------------------------------------------------------------

@contextlib.contextmanager
def folder(prefix="t-"):
    """A fresh folder under build/tmp (a real file system: O_DIRECT works), removed afterwards
    unless KEEP=1."""
    base = os.path.join(ROOT, "build", "tmp")
    os.makedirs(base, exist_ok=True)
    path = os.path.relpath(tempfile.mkdtemp(prefix=prefix, dir=base), ROOT)
    try:
        yield path
    finally:
        if not os.environ.get("KEEP"):
            shutil.rmtree(os.path.join(ROOT, path), ignore_errors=True)


# ---- running the program -----------------------------------------------------------------------

class Run:
    """A finished run.

    rc: exit status, or -signal. stdout, stderr: text. seconds: wall time.
    io: the kernel's /proc/PID/io at exit, with read_bytes and write_bytes (what went to and came
        from storage; the page cache's hits count as none, dirtied pages count at once) and
        for root also cancelled_write_bytes.
    usage: os.wait4's, with ru_inblock and ru_oublock in units of 512 bytes.
    peak_private_bytes: the highest RssAnon + RssShmem seen, sampled; 0 without sample=True."""

    def __init__(self, args):
        self.args = args
        self.rc, self.stdout, self.stderr, self.seconds = None, "", "", 0.0
        self.io, self.usage, self.peak_private_bytes = None, None, 0

    @property
    def text(self):
        return self.stdout + self.stderr


def _read_fields(path):
    fields = {}
    with open(path, encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            words = value.split()
            if words and words[0].isdigit():
                fields[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def _private(status):
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def private_bytes(pid):
    """RssAnon + RssShmem of a process, now."""
    return _private(_read_fields(f"/proc/{pid}/status"))


def as_from_a_shell(preexec):
    """For preexec: signals that whoever runs the tests ignores (nohup, a background job) have their
    usual effect, before what the test wants."""
    def become():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        if preexec:
            preexec()
    return become


class Process:
    """A run under way. Use spillway() where nothing is done to the run while it runs."""

    def __init__(self, args, env=None, sample=False, cwd=None, program=None, preexec=None):
        self.run = Run([program or SPILLWAY] + [str(a) for a in args])
        self._texts, self._sample = {"stdout": [], "stderr": []}, sample
        self._news = threading.Condition()
        self._start = time.monotonic()
        self._child = subprocess.Popen(
            self.run.args, cwd=cwd or ROOT, env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=as_from_a_shell(preexec))
        self.pid = self._child.pid
        self._threads = [threading.Thread(target=self._collect, args=(name,), daemon=True)
                         for name in self._texts]
        if sample:
            self._threads.append(threading.Thread(target=self._watch_memory, daemon=True))
        self._over = False
        for thread in self._threads:
            thread.start()

    def _collect(self, name):
        stream = getattr(self._child, name)
        while True:
            piece = os.read(stream.fileno(), 65536)
            with self._news:
                self._texts[name].append(piece)
                self._news.notify_all()
            if not piece:
                return

    def _watch_memory(self):
        while not self._over:
            try:
                status = _read_fields(f"/proc/{self.pid}/status")
            except (FileNotFoundError, ProcessLookupError):
                return
            now = _private(status)
            self.run.peak_private_bytes = max(self.run.peak_private_bytes, now)
            time.sleep(0.003)

    def text(self):
        return "".join(b"".join(self._texts[n]).decode("utf-8", "replace")
                       for n in ("stdout", "stderr"))

    def wait_for(self, pattern, timeout_s=60):
        """Until the output so far matches the pattern; the match, or a failure when the output
        ends or the time is over."""
        end = time.monotonic() + timeout_s * SLOWDOWN
        with self._news:
            while True:
                found = re.search(pattern, self.text(), re.M)
                if found:
                    return found
                closed = all(pieces and not pieces[-1] for pieces in self._texts.values())
                left = end - time.monotonic()
                check(not closed and left > 0,
                      f"no output matching {pattern!r}; so far: {self.text()[-800:]!r}")
                self._news.wait(min(left, 1.0))

    def signal(self, number):
        os.kill(self.pid, number)

    def is_running(self):
        return not self._is_zombie()

    def finish(self, timeout_s=120):
        """Waits for the end, reads the kernel's counters from the zombie, reaps it."""
        end = time.monotonic() + timeout_s * SLOWDOWN
        ended = self._wait_zombie(end)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            self._wait_zombie(time.monotonic() + 60)
        run, self._over = self.run, True
        try:
            run.io = _read_fields(f"/proc/{self.pid}/io")
        except OSError:  # root alone may look at a zombie's
            run.io = None
        _, status, run.usage = os.wait4(self.pid, 0)
        if run.io is None:  # the same counters in units of 512 bytes
            run.io = {"read_bytes": run.usage.ru_inblock * 512,
                      "write_bytes": run.usage.ru_oublock * 512}
        self._child.returncode = run.rc = os.waitstatus_to_exitcode(status)
        run.seconds = time.monotonic() - self._start
        for thread in self._threads:
            thread.join(timeout=10)
        run.stdout, run.stderr = (b"".join(self._texts[n]).decode("utf-8", "replace")
                                  for n in ("stdout", "stderr"))
        self._child.stdout.close()
        self._child.stderr.close()
        check(ended, f"still running after {timeout_s * SLOWDOWN} s", run)
        return run

    def _wait_zombie(self, end):
        """Without a look now and then, which takes the CPU from what is awaited. The handle may be
        told of the end shortly before there is something to reap."""
        handle = os.pidfd_open(self.pid)
        try:
            while not self._is_zombie():
                if time.monotonic() >= end:
                    return False
                if select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
                    time.sleep(0.001)
            return True
        finally:
            os.close(handle)

    def _is_zombie(self):
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def spillway(*args, rc=None, timeout_s=120, **options):
    """Runs `spillway ARGS` to its end. With rc the exit status must be that."""
    run = Process(args, **options).finish(timeout_s)
    if rc is not None:
        equal(run.rc, rc, f"exit status of 'spillway {args[0] if args else ''}'", run)
    return run


def make_model(path, config, *args):
    """A folder with random weights of this configuration; its path."""
    with open(path + ".json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    spillway("init", "--config", path + ".json", "--out", path, *args, rc=0)
    return path


def train(out, *args, model=MODEL, data=SHAKESPEARE + "/train.bin", **options):
    """`spillway train` on the bundled model and text; later options override nothing here. On one
    GPU, where nothing else is said: the program would take all."""
    if DEVICE and "--device" not in args:
        args = (*args, "--device", DEVICE)
    if "cuda" in args and "--ranks" not in args:
        args = (*args, "--ranks", 1)
    return spillway("train", "--model", model, "--data", data, "--out", out, *args, **options)


def _bytes_of(text):
    number, unit = re.fullmatch(r"([\d.]+) (B|kB|MB|GB)", text).groups()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def totals(text):
    """{tier: bytes} of a printed byte table, to its three digits."""
    return {tier: _bytes_of(of) for tier, of in
            re.findall(r"^  (device|host|nvme) +in all +(\S+ \S+)$", text, re.M)}


def table(text, tier, what):
    """Bytes of one row of a printed byte table, to its three digits; 0 where there is none."""
    found = re.search(rf"^  {tier} +{re.escape(what)} +(\S+ \S+)$", text, re.M)
    return _bytes_of(found.group(1)) if found else 0


NOBODY = 61234  # a user without other processes and without rights


def as_nobody(what, limit):
    """For preexec: a user without rights, and this limit (resource.RLIMIT_...). Root's to use."""
    def become():
        resource.setrlimit(what, (limit, limit))
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    return become


def preload(name):
    """The environment that loads tests/preload/NAME.c into a run."""
    library = os.path.join(ROOT, "build", CONFIG, "tests", "preload", name + ".so")
    check(os.path.exists(library), f"{library} is not built")
    options = os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"
    return {"LD_PRELOAD": library, "ASAN_OPTIONS": options}


def kill_at(call):
    """The environment in which a run ends at a call, as tests/preload/kill_at_call.c names it."""
    return {**preload("kill_at_call"), "KILL_AT": call}


# ---- what the program wrote --------------------------------------------------------------------

def read_log(path):
    """(steps, others): the JSONL lines with a "loss" and those without, in file order."""
    steps, others = [], []
    with open(path, encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            (steps if "loss" in entry else others).append(entry)
    return steps, others


SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1}


class Tensor:
    """dtype as safetensors names it, shape as a list, data as bytes."""

    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytes(data)

    def __eq__(self, other):
        return (self.dtype, self.shape, self.data) == (other.dtype, other.shape, other.data)

    def floats(self):
        """The values as an array of C floats (exact for BF16, F16 and F32)."""
        if self.dtype == "F32":
            return array.array("f", self.data)
        if self.dtype == "BF16":
            wide = array.array("I", (h << 16 for h in array.array("H", self.data)))
            return array.array("f", wide.tobytes())
        if self.dtype == "F16":
            return array.array("f", struct.unpack(f"<{len(self.data) // 2}e", self.data))
        raise Failed(f"no floats in {self.dtype}")


def bf16_bits(value):
    """The BF16 working weight of a float: nearest, ties away from zero."""
    return ((struct.unpack("<I", struct.pack("<f", value))[0] + 0x8000) >> 16) & 0xFFFF


def read_safetensors(path):
    """{name: Tensor} of one file; the file must be whole: header, ranges and length agree."""
    with open(path, "rb") as file:
        content = file.read()
    check(len(content) >= 8, f"{path}: shorter than a header")
    size = struct.unpack("<Q", content[:8])[0]
    check(8 + size <= len(content), f"{path}: header of {size} bytes in {len(content)}")
    header, base, end = json.loads(content[8:8 + size]), 8 + size, 0
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        count = 1
        for dim in entry["shape"]:
            count *= dim
        equal(last - first, count * SIZES[entry["dtype"]], f"{path}: bytes of {name}")
        check(base + last <= len(content), f"{path}: {name} lies past the end of the file")
        tensors[name] = Tensor(entry["dtype"], entry["shape"], content[base + first:base + last])
        end = max(end, last)
    equal(len(content), base + end, f"{path}: length")
    return tensors


def exported(folder):
    """{name: content} of an export, with zeros for the run's id: no two runs have the same."""
    with open(f"{folder}/optimizer.json", encoding="utf-8") as file:
        run = json.load(file)["run"]
    check(re.fullmatch("[0-9a-f]{16}", run), f"{folder}: run {run!r}")
    found = {}
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            found[name] = file.read().replace(run.encode(), b"0" * 16)
    return found


def write_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape,
                        "data_offsets": [at, at + len(tensor.data)]}
        blobs.append(tensor.data)
        at += len(tensor.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read_model(path):
    """(config, {name: Tensor}) of a Hugging Face folder, single file or sharded."""
    with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    index = os.path.join(path, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    tensors = {}
    for name in files:
        tensors.update(read_safetensors(os.path.join(path, name)))
    return config, tensors


def read_tokens(path, wide=False):
    with open(path, "rb") as file:
        return array.array("I" if wide else "H", file.read())


def write_tokens(path, tokens, wide=False):
    with open(path, "wb") as file:
        file.write(array.array("I" if wide else "H", tokens).tobytes())
