"""The same bytes and the same result in every environment: limits of locked memory, containers that
refuse io_uring with any code at any call, file systems with and without direct I/O.

What is compared is the run's digest and the store's file, byte for byte, with those of a run that
nothing hinders. ENVIRONMENT=all tries every code at every call; usually each is tried at one.
"""
import ctypes
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile

import support as t

# One thread of the host device, whatever the machine: its number is part of the numerics key.
STEPS, THREADS = 3, ("--device-threads", 1)
BASE = ["--steps", STEPS, "--seq-len", 16, *THREADS, "--optimizer", "nvme", "--digest",
        "--keep-store"]
STATE, COMMIT = "optimizer.0.state", "optimizer.commit"
SETUP, REGISTER, ENTER = "io_uring_setup", "io_uring_register", "io_uring_enter"
CODES = ["EPERM", "EACCES", "ENOSYS", "EINVAL", "ENOMEM", "EMFILE", "ENFILE", "EAGAIN", "EBUSY",
         "EINTR", "EIO", "EOPNOTSUPP", "E2BIG", "ENODEV", "EBADF", "ENXIO"]
SYS_IO_URING_SETUP = 425  # on every architecture
ALL = os.environ.get("ENVIRONMENT") == "all"


def arguments(out, *more, model=t.MODEL, chunk=100001):
    return ["train", "--model", model, "--data", t.SHAKESPEARE + "/train.bin", "--out", out, *BASE,
            "--chunk", chunk, *more]


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def digest(run):
    t.equal(run.rc, 0, "exit status", run)
    found = re.findall(r"^digest: .*$", run.stdout, re.M)
    t.equal(len(found), 1, "digests", run)
    return found[0]


def mode(run):
    found = re.findall(r"^store: (.*)$", run.stdout, re.M)
    t.equal(len(found), 1, "lines with the mode", run)
    return found[0]


def warnings(run, direct=False):
    """Those of the store about direct I/O, or all others."""
    return [line for line in run.stderr.splitlines()
            if "warning: nvme: " in line and ("direct I/O" in line) == direct]


_plain = []


def plain():
    """Digest, store and mode of a run that nothing hinders, made once."""
    if not _plain:
        with t.folder() as tmp:
            run = t.spillway(*arguments(tmp + "/out"))
            _plain.append((digest(run), sha256(f"{tmp}/out/{STATE}"), mode(run)))
    return _plain[0]


def kernel_has(feature):
    """Asked itself, so that what the program fails to use is not taken for absent."""
    if feature == "O_DIRECT":
        with t.folder() as tmp:
            try:
                os.close(os.open(tmp + "/file", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
                return True
            except OSError:
                return False
    ring = ctypes.CDLL(None).syscall(SYS_IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if ring >= 0:
        os.close(ring)
    return ring >= 0 and (feature == "io_uring" or os.getuid() == 0)  # others may lock too little


def here(feature):
    """Whether a run that nothing hinders has it: what is missing anyway cannot be refused."""
    if feature in plain()[2]:
        return True
    t.check(not kernel_has(feature), f"'{plain()[2]}', and the kernel has it: {feature}")
    print(f"# not applicable here: {feature} is not in '{plain()[2]}'", flush=True)
    return False


def same(run, state):
    """Result and store are those of a run that nothing hinders."""
    t.equal(digest(run), plain()[0], "digest", run)
    t.equal(state if len(state) == 64 else sha256(state), plain()[1], "the store's bytes", run)


# What the line says would bring it back.
REMEDIES = {"EPERM": "seccomp profile", "EACCES": "kernel.io_uring_disabled", "ENOSYS": "boot one",
            "EINVAL": "boot a newer one", "EOPNOTSUPP": "boot a newer one",
            "E2BIG": "boot a newer one", "ENOMEM": "ulimit -l", "EMFILE": "ulimit -n",
            "ENFILE": "ulimit -n", "EAGAIN": "start again", "EBUSY": "start again",
            "EINTR": "start again"}
PARTS = {None: ("no io_uring (", "going on with threads"),
         "files": ("files are not registered with io_uring (", "going on with plain ones"),
         "buffers": ("buffers are not registered with io_uring (", "going on with plain buffers")}


def refusing(call, code, store_mode, parts):
    """A run in which the call is refused; it says so once for each of the parts."""
    number = getattr(errno, code)
    with t.folder() as tmp:
        env = {**t.preload("seccomp_refuse"), "REFUSE": f"{call}:{number}"}
        run = t.spillway(*arguments(tmp + "/out"), env=env)
        if run.rc == 97:
            t.skip("no seccomp filter here: " + run.stderr.strip())
        what = f"{call} {code}"
        same(run, f"{tmp}/out/{STATE}")
        t.check(re.match(store_mode, mode(run)), f"{what}: {mode(run)}", run)
        told = warnings(run)
        t.equal(len(told), len(parts), f"{what}: warnings", run)
        for line, part in zip(told, parts):
            for text in PARTS[part]:
                t.contains(line, text, what, run)
            if code == "ENOMEM" and part == "buffers":
                t.contains(line, "limit of locked memory is too small", what, run)
            else:
                t.contains(line, os.strerror(number), what, run)
            t.contains(line, REMEDIES.get(code, "outside of it io_uring works"), what, run)


def refused(call, code):
    if call == REGISTER:
        refusing(call, code, "io_uring.*plain buffers, plain files", ["files", "buffers"])
    else:
        refusing(call, code, "pread/pwrite.*plain buffers, plain files", [None])


def refused_at(call, number):
    """Every code at this call, or a third of them."""
    tried = [c for i, c in enumerate(CODES) if ALL or i % 3 == number]
    t.check(len(tried) >= 5, "too few codes")
    for code in tried:
        refused(call, code)


@t.test
def io_uring_refused_at_set_up_is_replaced_by_threads():
    if here("io_uring"):
        refused_at(SETUP, 0)


@t.test
def io_uring_refused_at_registration_goes_on_without_registration():
    if here("registered buffers, registered files"):
        refused_at(REGISTER, 1)


@t.test
def io_uring_refused_at_enter_is_replaced_by_threads():
    if here("io_uring"):
        refused_at(ENTER, 2)



@t.test
def each_registration_is_refused_alone():
    """By its opcode: 0 registers buffers, 2 files."""
    for code in ("EINVAL", "EOPNOTSUPP") if here("registered buffers, registered files") else ():
        refusing(REGISTER + "/0", code, ".*plain buffers, registered files", ["buffers"])
        refusing(REGISTER + "/2", code, ".*registered buffers, plain files", ["files"])


# ---- locked memory -----------------------------------------------------------------------------

def limited(limit):
    """A user who may lock so much memory and has no right to more; root may lock all there is."""
    unlimited = limit == resource.RLIM_INFINITY
    return None if unlimited else t.as_nobody(resource.RLIMIT_MEMLOCK, limit)


def under_limit(limit, *args, **options):
    if os.getuid() != 0:
        t.skip("only root can become a user without the right to lock memory")
    with t.folder() as tmp:
        os.chmod(tmp, 0o777)
        try:
            run = t.spillway(*arguments(tmp + "/out", *args, **options), preexec=limited(limit))
        except PermissionError:
            t.skip("other users may not run this build")
        digest(run)
        return run, sha256(f"{tmp}/out/{STATE}")


LIMITS = {64 << 10: "65.5 kB", 8 << 20: "8.39 MB", resource.RLIM_INFINITY: "no limit"}


def check_registered(run, limit, registered):
    slots = re.search(r"^  host     optimizer state slots +(\S+ \S+)$", run.stdout, re.M).group(1)
    if registered:
        t.equal(warnings(run), [], f"warnings with {LIMITS[limit]}", run)
        t.contains(mode(run), "io_uring", "the mode", run)
        t.contains(mode(run), "registered buffers, registered files", "the mode", run)
        return
    t.equal(len(warnings(run)), 1, f"warnings with {LIMITS[limit]}", run)
    for part in ("buffers are not registered", "limit of locked memory is too small", "ulimit -l",
                 f"needed {slots} each way, ", f"the limit of locked memory is {LIMITS[limit]};",
                 "going on with plain buffers"):
        t.contains(warnings(run)[0], part, f"the warning with {LIMITS[limit]}", run)
    t.contains(mode(run), "io_uring", "the mode", run)
    t.contains(mode(run), "plain buffers, registered files", "the mode", run)


@t.test
def every_limit_of_locked_memory_gives_the_same_bytes():
    for limit in LIMITS if here("registered buffers, registered files") else ():
        run, state = under_limit(limit)
        same(run, state)
        check_registered(run, limit, limit != 64 << 10)


@t.test
def buffers_above_the_limit_of_locked_memory_give_the_same_bytes():
    """Slots of more than 8 MiB: only without a limit are they registered."""
    if not here("registered buffers, registered files"):
        return
    with t.folder() as tmp:
        os.chmod(tmp, 0o755)
        with open(t.MODEL + "/config.json", encoding="utf-8") as file:
            config = json.load(file)
        config.update(vocab_size=6000, num_hidden_layers=1)
        with open(tmp + "/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        model = tmp + "/model"
        t.spillway("init", "--config", tmp + "/config.json", "--seed", 5, "--out", model, rc=0)
        os.chmod(model, 0o755)
        ends = []
        for limit in LIMITS:
            run, state = under_limit(limit, model=model, chunk="8M")
            ends.append((digest(run), state))
            check_registered(run, limit, limit == resource.RLIM_INFINITY)
        t.equal(len(set(ends)), 1, "different ends")


# ---- file systems ------------------------------------------------------------------------------

def check_direct(run, what):
    """The mode in use is printed, and whatever is not direct was said once, with the folder."""
    buffered = warnings(run, direct=True)
    direct = mode(run).split(", ")[1]
    t.equal(direct, "page cache" if buffered else "O_DIRECT", f"{what}: the mode", run)
    t.check(len(buffered) <= 1, f"{what}: said more than once", run)
    for line in buffered:
        t.contains(line, "has no direct I/O (", what)
        t.contains(line, "going on through the page cache", what)
    print(f"# {what}: {mode(run)}", flush=True)


def file_system(folder):
    return subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, text=True,
                          stdout=subprocess.PIPE).stdout.strip()


def in_namespace(mounting, *command):
    """A command whose store lies in the new mount $M; the mount lives and dies with it."""
    return ["unshare", "-m", "sh", "-c",
            f"M=$1; shift; {mounting} >&2 || exit 98; \"$@\"; rc=$?; "
            f"if [ -e \"$M/{STATE}\" ]; then sha256sum \"$M/{STATE}\"; fi; exit $rc",
            "mounted", *command]


MOUNTS = {
    "tmpfs": 'mount -t tmpfs -o size=64m none "$M"',
    "overlayfs": 'mkdir -p "$M/../low" "$M/../up" "$M/../work" && mount -t overlay -o '
                 'lowerdir="$M/../low",upperdir="$M/../up",workdir="$M/../work" none "$M"',
    "ext4 of 1 KiB blocks": 'truncate -s 64M "$M/../image" && mkfs.ext4 -q -b 1024 "$M/../image" '
                            '&& mount -o loop "$M/../image" "$M"',
    "xfs": 'truncate -s 512M "$M/../image" && mkfs.xfs -q "$M/../image" && '
           'mount -o loop "$M/../image" "$M"',
}


@t.test
def every_file_system_gives_the_same_bytes():
    """The tree's own, and those that can be mounted here: a container may allow none, and mkfs may
    be missing, which is named and is no failure."""
    tried = 1
    with t.folder() as tmp:
        run = t.spillway(*arguments(tmp + "/out"))
        same(run, f"{tmp}/out/{STATE}")
        check_direct(run, f"the tree's own, {file_system(tmp)}")
    for name, mounting in MOUNTS.items():
        with t.folder() as tmp:
            store = f"{t.ROOT}/{tmp}/store"
            os.mkdir(store)
            probe = subprocess.run(in_namespace(mounting, store, "true"), check=False, text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            if probe.returncode != 0:
                print(f"# {name}: not applicable here: {probe.stderr.strip()[:200]}", flush=True)
                continue
            shutil.rmtree(store)
            os.mkdir(store)
            command = in_namespace(mounting, store, t.SPILLWAY,
                                   *arguments(tmp + "/out", "--nvme", store))
            run = t.spillway(*command[1:], program=command[0])
            found = re.search(r"^([0-9a-f]{64}) ", run.stdout, re.M)
            t.check(found, f"{name}: no store", run)
            same(run, found.group(1))
            check_direct(run, name)
            tried += 1
    print(f"# {tried} file systems", flush=True)


@t.test
def a_folder_of_shared_memory_gives_the_same_bytes():
    if not os.access("/dev/shm", os.W_OK) or file_system("/dev/shm") != "tmpfs":
        print("# not applicable here: no tmpfs at /dev/shm", flush=True)
        return
    store = tempfile.mkdtemp(prefix="spillway-", dir="/dev/shm")
    try:
        with t.folder() as tmp:
            run = t.spillway(*arguments(tmp + "/out", "--nvme", store))
            same(run, f"{store}/{STATE}")
            check_direct(run, "/dev/shm")
    finally:
        shutil.rmtree(store)


@t.test
def the_alignment_that_statx_asks_for_is_kept_or_the_page_cache_used():
    for align in (512, 4096, 65536):
        with t.folder() as tmp:
            run = t.spillway(*arguments(tmp + "/out"),
                             env={**t.preload("statx_align"), "STATX_ALIGN": str(align)})
            same(run, f"{tmp}/out/{STATE}")
            check_direct(run, f"alignment {align}")
            if align > 4096:
                t.contains(mode(run), "page cache", f"alignment {align}", run)
                told = warnings(run, direct=True)[0]
                t.contains(told, "a larger alignment than 4 KiB", "the warning", run)
                t.contains(told, f"{tmp}/out'", "the folder in the warning", run)


@t.test
def direct_io_refused_with_any_code_goes_through_the_page_cache():
    """When it is turned on, and at the first transfer after that was taken."""
    for call, code in (("fcntl", "EINVAL"), ("fcntl", "EOPNOTSUPP"), ("fcntl", "EPERM"),
                       ("pread", "EINVAL"), ("pread", "EOPNOTSUPP"), ("pread", "EIO")
                       ) if here("O_DIRECT") else ():
        number = getattr(errno, code)
        with t.folder() as tmp:
            env = {**t.preload("direct_refuse"), "DIRECT_REFUSED": f"{call}:{number}"}
            run = t.spillway(*arguments(tmp + "/out"), env=env)
            same(run, f"{tmp}/out/{STATE}")
            check_direct(run, f"{call} {code}")
            t.contains(mode(run), "page cache", f"{call} {code}", run)
            told = warnings(run, direct=True)[0]
            t.contains(told, f"{tmp}/out' has no direct I/O (", "the warning", run)
            t.check("refuses" in told or os.strerror(number) in told, f"{call} {code}: {told}")


# ---- run after run -----------------------------------------------------------------------------

def disk_use(folder):
    """{name: bytes that are allocated}, of the store's files."""
    return {n: os.stat(f"{folder}/{n}").st_blocks * 512 for n in sorted(os.listdir(folder))}


@t.test
def disk_use_and_names_stay_over_three_runs_and_a_killed_one():
    with t.folder() as tmp:
        store = tmp + "/store"
        os.mkdir(store)
        seen = []
        for number in range(3):
            run = t.spillway(*arguments(f"{tmp}/{number}", "--nvme", store, "--restart"))
            same(run, f"{store}/{STATE}")
            seen.append(disk_use(store))
        killed = t.spillway(*arguments(f"{tmp}/killed", "--nvme", store, "--restart"),
                            env=t.kill_at(f"pwrite:{COMMIT}:2:torn"))
        t.equal(killed.rc, -signal.SIGKILL, "the killed run", killed)
        seen.append(disk_use(store))
        last = t.spillway(*arguments(f"{tmp}/killed", "--nvme", store, "--resume"))
        t.equal(digest(last), plain()[0], "digest", last)
        seen.append(disk_use(store))
        t.equal(sorted(seen[0]), [STATE, COMMIT], "names")
        for number, use in enumerate(seen):
            t.equal(sorted(use), sorted(seen[0]), f"names after run {number + 1}")
            t.check(sum(use.values()) <= sum(seen[0].values()), f"after run {number + 1}: {seen}")
        without = [a for a in arguments(f"{tmp}/end", "--nvme", store, "--restart")
                   if a != "--keep-store"]
        t.spillway(*without, rc=0)
        t.equal(os.listdir(store), [], "left behind by a run that was to keep nothing")


@t.test
def records_of_every_odd_length_give_the_same_bits():
    """Chunks of k blocks and a rest: the records end anywhere in a page, the last one of each unit
    elsewhere; what they are padded with is of no effect."""
    for form in ([], ["--moments", "8bit"]):
        ends = {}
        for chunk in (12289, 33333, 70001, 131071, 524289):
            with t.folder() as tmp:
                run = t.spillway(*arguments(tmp + "/out", *form, chunk=chunk))
                ends[digest(run)] = chunk
        t.equal(len(ends), 1, f"different ends, {form}")


@t.test
def a_path_of_a_thousand_characters_holds_a_store():
    with t.folder() as tmp:
        store = tmp
        while len(store) < 1000:
            store += "/" + "d" * 200
        os.makedirs(store)
        run = t.spillway(*arguments(tmp + "/out", "--nvme", store))
        same(run, f"{store}/{STATE}")
        os.rename(f"{tmp}/{'d' * 200}", f"{tmp}/short")  # so that the tree can be removed


if __name__ == "__main__":
    t.main()
