#!/usr/bin/env python3
"""Packs what gpu-check needs into one folder that runs where it is copied to: program, plugin,
tests and rates (bin/), the libraries that a bare machine may lack (lib/), the whole-program tests,
the bundled model and texts. `make gpu-bundle` builds the parts and calls it.

    tests/gpu/bundle.py [--out build/gpu] [--standin]

--standin packs the CPU stand-in's plugin instead of the GPU's, for tests. Libraries of NVIDIA's are
too large to be packed: gpu-check looks for them (libraries.py). Of libstdc++ and libgcc the
machine's own are taken where it has them, as NVIDIA's libraries may want later ones than ours.
"""
import argparse
import glob
import gzip
import json
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PARTS = os.path.join(ROOT, "build", "release", "gpu")
BYTES_MAX = 60_000_000
COMPRESSED_BYTES_MIN = 4_000_000
# Of every machine with this kind of libc; another one's would not fit its loader.
SYSTEM = re.compile(r"(ld-linux|linux-vdso|lib(c|m|dl|rt|pthread|resolv)\.so)")
FALLBACK = re.compile(r"lib(stdc\+\+|gcc_s)\.so")
TO_BE_FOUND = re.compile(r"lib(cublasLt|nccl)\.so")
MODEL = ["config.json", "generation_config.json", "golden.json", "model.safetensors"]
DATA = [*("models/stories260k/" + name for name in MODEL), "data/tinystories/train.bin",
        "data/tinyshakespeare/train.bin", "data/tinyshakespeare/val.bin"]
SCRIPTS = ["run.py", "support.py", "golden.py", "same_bits.py", "cuda_runs.py"]


def libraries_of(path):
    """{soname: file, or None where this machine has none} of a program, its libraries' included."""
    listed = subprocess.run(["ldd", path], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in listed.splitlines():
        match = re.match(r"\s*(\S+) => (?:not found|(.+) \(0x)", line)
        if match and not SYSTEM.match(match[1]):
            found[match[1]] = match[2]
    return found


def copy_binary(source, target):
    """Without what only a debugger reads."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    shutil.copy(source, target)
    subprocess.run(["strip", "--strip-debug", target], check=True)


def copy_library(source, target):
    """A large one compressed; gpu-check unpacks it."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.getsize(source) < COMPRESSED_BYTES_MIN:
        shutil.copy(source, target)
        return
    with open(source, "rb") as file, gzip.open(target + ".gz", "wb", compresslevel=3) as packed:
        shutil.copyfileobj(file, packed, 1 << 20)


def copy_tree(out, name):
    source, target = os.path.join(ROOT, name), os.path.join(out, name)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)


def pack_binaries(out, standin):
    """bin/; the sonames that have to be found on the other machine."""
    plugin = os.path.join(ROOT, "build", "standin" if standin else "", "libspillway_cuda.so")
    binaries = {os.path.join(PARTS, "spillway"): "spillway", plugin: "libspillway_cuda.so",
                os.path.join(PARTS, "gpu_rates"): "gpu_rates",
                os.path.join(PARTS, "standin" if standin else "", "bare_rates"): "bare_rates"}
    for test in sorted(glob.glob(os.path.join(PARTS, "tests", "test_*"))):
        binaries[test] = "tests/" + os.path.basename(test)
    needed, libraries = set(), {}
    for source, name in binaries.items():
        copy_binary(source, os.path.join(out, "bin", name))
        libraries.update(libraries_of(source))
    for soname, path in sorted(libraries.items()):
        if TO_BE_FOUND.match(soname):
            needed.add(soname)
        elif path is None:
            sys.exit(f"gpu-bundle: {soname} is not on this machine")
        else:
            folder = "lib/fallback" if FALLBACK.match(soname) else "lib"
            copy_library(path, os.path.join(out, folder, soname))
    absent = os.path.join(PARTS, "libnccl.so.2")
    if os.path.exists(absent):
        copy_binary(absent, os.path.join(out, "lib", "nccl-absent", "libnccl.so.2"))
    return sorted(needed)


def size_of(folder):
    return sum(os.path.getsize(os.path.join(at, name))
               for at, _, names in os.walk(folder) for name in names)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.path.join(ROOT, "build", "gpu"))
    parser.add_argument("--standin", action="store_true")
    args = parser.parse_args()
    out = os.path.abspath(args.out)
    shutil.rmtree(out, ignore_errors=True)
    needed = pack_binaries(out, args.standin)
    for name in DATA:
        copy_tree(out, name)
    for name in SCRIPTS:
        copy_tree(out, "tests/" + name)
    for path in sorted(glob.glob(os.path.join(ROOT, "tests", "gpu", "*.py"))
                       + glob.glob(os.path.join(ROOT, "tests", "test_cuda_*.c"))):
        copy_tree(out, os.path.relpath(path, ROOT))
    shutil.copy(os.path.join(ROOT, "tests", "gpu", "gpu-check"), out)
    version = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout.strip()
    with open(os.path.join(out, "bundle.json"), "w", encoding="utf-8") as file:
        json.dump({"schema": 1, "version": version or "unknown", "standin": args.standin,
                   "to_be_found": needed}, file, indent=1)
        file.write("\n")
    size = size_of(out)
    print(f"{os.path.relpath(out)}: {size / 1e6:.1f} MB, version {version or 'unknown'}; to be "
          f"found where it runs: {' '.join(needed) or 'nothing'}")
    if size > BYTES_MAX:
        sys.exit(f"gpu-bundle: {size} bytes are more than {BYTES_MAX}")


if __name__ == "__main__":
    main()
