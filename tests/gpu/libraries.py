"""Finds the libraries that are too large to be packed, in the order in which a user would expect:
what the environment names, what the loader knows, a toolkit's folder, packages of pip's."""
import glob
import os
import re
import site
import subprocess
import sys


def _loader_folders():
    """Folders of the loader's cache, and its built-in ones."""
    found = []
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listed = subprocess.run([command, "-p"], stdout=subprocess.PIPE, text=True,
                                    stderr=subprocess.DEVNULL, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        found += [os.path.dirname(p) for p in re.findall(r"=> (\S+)", listed)]
        break
    return found + ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64",
                    "/usr/lib"]


def _pip_folders():
    roots = [p for p in sys.path if p.endswith("-packages")]
    roots += getattr(site, "getsitepackages", list)() + [site.getusersitepackages()]
    return [folder for root in roots
            for folder in sorted(glob.glob(os.path.join(root, "nvidia", "*", "lib")))]


def places():
    """(where, folders) in the order of the search."""
    homes = [os.environ[n] for n in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(n)]
    homes += ["/usr/local/cuda"] + sorted(glob.glob("/usr/local/cuda-*"), reverse=True)
    return [
        ("LD_LIBRARY_PATH", [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]),
        ("the loader's folders (ldconfig -p)", _loader_folders()),
        ("CUDA_HOME, CUDA_PATH and /usr/local/cuda*",
         [os.path.join(h, x) for h in homes for x in ("lib64", "targets/x86_64-linux/lib")]),
        ("pip's nvidia packages", _pip_folders()),
    ]


def folders_to_add(paths):
    """Those of these files' folders that the loader does not know."""
    known = set(_loader_folders())
    return [f for f in dict.fromkeys(os.path.dirname(p) for p in paths) if f not in known]


def find(soname, where=None):
    """The file, or None."""
    for _, folders in where or places():
        for folder in folders:
            path = os.path.join(folder, soname)
            if os.path.exists(path):
                return path
    return None


def search(sonames):
    """{soname: file or None}, and a text that says where was looked for what is missing, other
    versions that lie there included."""
    where = places()
    found = {soname: find(soname, where) for soname in sonames}
    lines = []
    for soname in [s for s in sonames if not found[s]]:
        other = sorted({os.path.realpath(p) for _, folders in where for f in folders
                        for p in glob.glob(os.path.join(f, soname.split(".so")[0] + ".so.*"))})
        lines.append(f"{soname} was found nowhere"
                     + (f"; there are only {' '.join(other)}" if other else ""))
    if lines:
        lines += [f"looked in {what}: {' '.join(dict.fromkeys(folders)) or 'nothing there'}"
                  for what, folders in where]
    return found, "\n".join(lines)
