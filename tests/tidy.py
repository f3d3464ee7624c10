#!/usr/bin/env python3
"""The rules of the tree that no compiler checks. One line per rule; the last line counts them.

Looks at tracked files and at new ones that git does not ignore. The names of public symbols come
from the objects in build/release, so build first.
"""
import os
import re
import subprocess
import sys

import check_broken

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
COLUMNS_MAX = 100
LINES_MAX = 800
BYTES_MAX = 1_300_000        # of one file
BUNDLED_BYTES_MAX = 5_000_000  # models/ and data/ together
CODE = (".c", ".h", ".cpp", ".cu", ".py", ".sh")
# Words that mark unfinished work; written in halves so that this file passes its own rule.
UNFINISHED = re.compile("|".join([r"\bTO" + r"DO\b", r"\bFIX" + r"ME\b", r"\bXX" + r"X\b",
                                  r"\bnot " + r"implemented\b", r"\bHA" + r"CK\b"]))
# Who may include whom: each folder lists the folders below it.
BELOW = {
    "base": set(),
    "cpu_adam": {"base"},
    "nvme": {"base"},
    "kernels": {"base"},
    "offload": {"base", "cpu_adam", "nvme", "kernels"},
    "engine": {"base", "cpu_adam", "nvme", "kernels", "offload"},
    "plan": {"base", "cpu_adam", "nvme", "kernels", "offload", "engine"},
    "tools": {"base", "cpu_adam", "nvme", "kernels", "offload", "engine", "plan"},
}


def files():
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    return sorted(n for n in set(listed.split("\0")) if n and os.path.isfile(os.path.join(ROOT, n)))


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8") as file:
        return file.read()


FILES = files()
SOURCES = [n for n in FILES if n.endswith(CODE)
           or n in ("Makefile", ".ci/run", "tests/gpu/gpu-check")]
TEXTS = SOURCES + [n for n in FILES if n.endswith((".md", ".broken", ".supp"))]


def long_lines():
    """No line over 100 columns."""
    for name in SOURCES:
        for number, line in enumerate(read(name).splitlines(), 1):
            if len(line) > COLUMNS_MAX:
                yield f"{name}:{number}: {len(line)} columns"


def long_files():
    """No source over 800 lines."""
    for name in SOURCES:
        lines = read(name).count("\n")
        if lines > LINES_MAX:
            yield f"{name}: {lines} lines"


def white_space():
    """No tab outside the Makefile, no blank at a line's end, a line break at the file's end."""
    for name in TEXTS:
        text = read(name)
        if text and not text.endswith("\n"):
            yield f"{name}: no line break at the end"
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip():
                yield f"{name}:{number}: ends in a blank"
            if "\t" in line and name != "Makefile":
                yield f"{name}:{number}: a tab"


def unfinished_words():
    """No word that marks unfinished work."""
    for name in TEXTS:
        for number, line in enumerate(read(name).splitlines(), 1):
            if UNFINISHED.search(line):
                yield f"{name}:{number}: {line.strip()[:80]}"


def header_guards():
    """A header's guard is its path; *_kernel.h, included once per instruction set, has none."""
    for name in SOURCES:
        if name.endswith(".h") and not name.endswith("_kernel.h"):
            guard = re.sub(r"\W", "_", name).upper()
            if not re.search(rf"^#ifndef {guard}\n#define {guard}$", read(name), re.M):
                yield f"{name}: no guard {guard}"


def layers():
    """A folder includes only from the folders below it, and nobody includes from tests/."""
    for name in SOURCES:
        folder = name.split("/")[0]
        if folder not in BELOW or not name.endswith((".c", ".h", ".cpp", ".cu")):
            continue
        for target in re.findall(r'^\s*#\s*include\s+"([^"]+)"', read(name), re.M):
            other = target.split("/")[0]
            if other != folder and other not in BELOW[folder]:
                yield f"{name}: includes {target}"


def file_names():
    """Source names are unique in the whole tree."""
    seen = {}
    for name in SOURCES:
        if name.endswith((".c", ".h", ".cpp", ".cu")):
            base = os.path.basename(name)
            if base in seen:
                yield f"{name}: also {seen[base]}"
            seen[base] = name


def public_names():
    """Every external symbol of the library begins with sw_."""
    library = os.path.join(ROOT, "build", "release", "libspillway.a")
    if not os.path.exists(library):
        yield "build/release/libspillway.a: not built"
        return
    listed = subprocess.run(["nm", "-A", "-g", "--defined-only", library], check=True,
                            stdout=subprocess.PIPE, text=True).stdout
    for line in listed.splitlines():
        words = line.split()
        if len(words) >= 3 and words[-2] in "TDBRC" and not words[-1].startswith("sw_"):
            yield f"{words[0].split(':')[-2]}: {words[-1]}"


def tests_are_run():
    """Every file in tests/ is run by the test runner, or is one of its known tools."""
    sys.path.insert(0, os.path.join(ROOT, "tests"))
    sys.dont_write_bytecode = True
    import run
    names = {os.path.relpath(p.source, ROOT) for p in run.find_programs("release", [])}
    tools = {"tests/" + n for n in run.TOOLS} | {"tests/tsan.supp", "tests/lsan.supp"}
    # What takes long is named by the Makefile, by its script, or by a program beside it.
    elsewhere = "".join(read(n) for n in SOURCES
                        if n.startswith(("scripts/", "tests/bench/", "tests/gpu/"))
                        or n == "Makefile")
    for name in FILES:
        if not name.startswith("tests/") or name in names or name in tools:
            continue
        if re.match(r"tests/(broken/\w+\.broken|support_\w+\.[ch]|standin/\w+\.(cpp|cu|h))$", name):
            continue
        if re.match(r"tests/(long|bench|gpu)/", name) and os.path.basename(name) in elsewhere:
            continue
        preload = re.match(r"tests/preload/(\w+)\.c$", name)
        if preload and any(f'preload("{preload[1]}")' in read(n) for n in names | tools
                           if n.endswith(".py")):
            continue
        yield f"{name}: nothing runs it"
    for name in names:
        text = read(name)
        if name.endswith(".py") and "t.main()" not in text:
            yield f"{name}: never calls t.main()"
        if name.endswith(".c"):
            for function in re.findall(r"^static void (\w+)\(void \*\*\w+\)", text, re.M):
                if len(re.findall(rf"\b{function}\b", text)) < 2:
                    yield f"{name}: {function} is in no list of tests"


def sizes():
    """No file over 1.3 MB; models/ and data/ under 5 MB together."""
    total = 0
    for name in FILES:
        size = os.path.getsize(os.path.join(ROOT, name))
        if size > BYTES_MAX:
            yield f"{name}: {size} bytes"
        if name.startswith(("models/", "data/")):
            total += size
    if total >= BUNDLED_BYTES_MAX:
        yield f"models/ and data/: {total} bytes"


def links():
    """A relative link in a document leads to a file."""
    for name in FILES:
        if not name.endswith(".md"):
            continue
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", read(name)):
            if "://" not in target:
                path = os.path.normpath(os.path.join(os.path.dirname(name), target))
                if not os.path.exists(os.path.join(ROOT, path)):
                    yield f"{name}: {target}"


def planted_bugs():
    """What a planted bug replaces stands in its file once: else it is planted no more."""
    for name in FILES:
        if name.startswith("tests/broken/") and name.endswith(".broken"):
            try:
                for file, old, _ in check_broken.Variant(os.path.join(ROOT, name)).edits:
                    if read(file).count(old) != 1:
                        yield f"{name}: the old text stands {read(file).count(old)} times in {file}"
            except (check_broken.BadVariant, FileNotFoundError) as error:
                yield f"{name}: {error}"


def plain_make():
    """Plain `make` builds the program, whatever targets stand above it."""
    planned = subprocess.run(["make", "-n", "PROBE=0", "CONFIG=debug"], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    if "-o build/debug/spillway" not in planned and "for 'all'" not in planned:
        yield f"it would run: {planned[:200]!r}"


RULES = [long_lines, long_files, white_space, unfinished_words, header_guards, layers, file_names,
         public_names, tests_are_run, sizes, links, planted_bugs, plain_make]


def main():
    failed = 0
    for rule in RULES:
        found = list(rule())
        print(f"{'FAIL' if found else 'ok'} {rule.__name__}: {rule.__doc__}")
        for line in found[:20]:
            print(f"       {line}")
        if len(found) > 20:
            print(f"       ... and {len(found) - 20} more")
        failed += bool(found)
    print(f"{len(RULES) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
