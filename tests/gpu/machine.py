"""Stage a of gpu-check: what is there. Without a GPU that can be used nothing else is tried."""
import json
import os
import re
import shutil
import subprocess

import gpu_support as g
import support as t


def driver():
    """The driver's version, as far as it says."""
    if shutil.which("nvidia-smi"):
        run = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if run.returncode == 0 and run.stdout.strip():
            return run.stdout.split()[0]
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return re.search(r"\d+\.\d+(\.\d+)?", file.read()).group(0)
    except (OSError, AttributeError):
        return "unknown"


@t.test
def nvidia_libraries():
    search = json.loads(os.environ["GPU_CHECK_LIBRARIES"])
    for soname, path in search["found"].items():
        print(f"{soname}: {path or 'missing'}")
    blas = [s for s, path in search["found"].items() if "cublasLt" in s and not path]
    t.check(not blas, "; ".join(search["missing"].splitlines()))
    if search["missing"]:
        t.skip("several GPUs are left out: " + "; ".join(search["missing"].splitlines()))


@t.test
def a_gpu_can_be_used():
    run = t.spillway("doctor", "--json")
    device = [c for c in json.loads(run.stdout)["checks"] if c["name"] == "device"][0]
    t.check(device["state"] == "ok", f"no GPU that can be used: {device['why']}")
    numerics, count, free = g.device()
    versions = {name: value for what, name, value, _ in g.rates("bare_rates", "versions")
                if what == "version"}
    g.result(f"{device['found']}; {device['why']}; driver {driver()}, for CUDA "
             f"{versions['driver']:g}")
    g.figure("devices", count, "")
    g.figure("free memory", free, "B")
    if g.peak_of(numerics):
        g.figure("published peak", g.peak_of(numerics), "TFLOP/s")
    for name, value in versions.items():
        g.figure(name, value, "")


if __name__ == "__main__":
    t.main()
