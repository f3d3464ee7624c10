"""Stage d of gpu-check: rates of the device table beside those of CUDA itself, of a card's
published peak and of PyTorch. On the CPU stand-in they are taken and held to nothing."""
import importlib.util
import os
import statistics
import subprocess
import sys

import gpu_support as g
import support as t

COPY_LIMIT = 0.9                          # of a bare cudaMemcpyAsync
PRODUCT_MEAN, PRODUCT_WORST = 0.9, 0.7    # of cuBLASLt's best algorithm

# Median of five rounds of ten, as rates.h; the causal half counts, as in gpu_rates.c.
TORCH = """
import sys, time, torch, torch.nn.functional as F
if not torch.cuda.is_available(): sys.exit("torch sees no GPU")
q, k, v = (torch.randn(1, h, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for h in (32, 8, 8))
out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
grad = torch.randn_like(out)
def timed(call):
    rounds = []
    for _ in range(6):
        torch.cuda.synchronize(); start = time.perf_counter()
        for _ in range(10): call()
        torch.cuda.synchronize(); rounds.append((time.perf_counter() - start) / 10)
    return sorted(rounds[1:])[2]
forward = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
backward = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
product = 1e-12 * 4096 * 4096 * 128 * 32
print(2 * product / forward, 5 * product / backward, torch.__version__)
"""


def held(condition, what, numerics):
    """A limit on a rate."""
    if not g.is_standin(numerics):
        t.check(condition, what)


@t.test
def copies():
    numerics, _, _ = g.device()
    ours, bare = g.rates("gpu_rates", "copies"), g.rates("bare_rates", "copies")
    shares = []
    for (_, name, rate, unit), (_, other, best, _) in zip(ours, bare):
        t.equal(name, other, "order of the lines")
        g.figure(name, rate, unit)
        g.figure(name + ", bare", best, unit)
        shares.append(rate / best)
    g.result("; ".join(f"{name} {rate:.1f} of {best[2]:.1f} GB/s"
                       for (_, name, rate, _), best in zip(ours, bare)))
    g.limit(f"{COPY_LIMIT:.0%} of bare")
    held(min(shares) >= COPY_LIMIT, f"copies reach {min(shares):.0%} of a bare one's rate",
         numerics)


@t.test
def products():
    numerics, _, _ = g.device()
    ours, best = g.rates("gpu_rates", "products"), g.rates("bare_rates", "products")
    best = {name: rate for _, name, rate, _ in best}
    t.check(ours, "no rates")
    shares = {}
    for _, name, rate, unit in ours:
        t.check(name in best, f"cuBLASLt itself has no algorithm for {name}")
        g.figure(name, rate, unit)
        g.figure(name + ", cuBLASLt's best", best[name], unit)
        shares[name] = rate / best[name]
    worst, mean = min(shares, key=shares.get), statistics.mean(shares.values())
    rates = [rate for _, name, rate, _ in ours if not name.startswith("head")]
    g.figure("mean of the layers", statistics.harmonic_mean(rates), "TFLOP/s")
    g.result(f"{statistics.harmonic_mean(rates):.4g} TFLOP/s in a layer "
             f"({g.of_peak(statistics.harmonic_mean(rates), numerics)}); of cuBLASLt's best "
             f"{mean:.0%} in the mean, {shares[worst]:.0%} for {worst}")
    g.limit(f"mean {PRODUCT_MEAN:.0%}, each {PRODUCT_WORST:.0%}")
    held(mean >= PRODUCT_MEAN and shares[worst] >= PRODUCT_WORST,
         f"products reach {mean:.0%} of cuBLASLt's best in the mean, {worst} {shares[worst]:.0%}",
         numerics)


@t.test
def attention():
    numerics, _, _ = g.device()
    lines = g.rates("gpu_rates", "attention")
    for _, name, rate, unit in lines:
        g.figure(name, rate, unit)
    g.result("; ".join(f"{name} {rate:.4g} TFLOP/s ({g.of_peak(rate, numerics)})"
                       for _, name, rate, _ in lines))


@t.test
def attention_of_pytorch():
    if importlib.util.find_spec("torch") is None:
        t.skip(f"{sys.executable} has no torch")
    # It brings libraries of its own, which ours must not stand before.
    env = {**os.environ, "LD_LIBRARY_PATH": os.environ.get("GPU_CHECK_LD_LIBRARY_PATH", "")}
    run = subprocess.run([sys.executable, "-c", TORCH], stdout=subprocess.PIPE, env=env,
                         stderr=subprocess.PIPE, text=True)
    if run.returncode:
        t.skip(f"torch cannot be used: {run.stderr.strip()[-200:]}")
    words = run.stdout.split()
    theirs = {"forward": float(words[0]), "backward": float(words[1])}
    ours, said = g.figures_of("attention"), []
    for name, rate in theirs.items():
        g.figure(name, rate, "TFLOP/s")
        share = f", ours is {ours[name] / rate:.0%} of it" if name in ours else ""
        said.append(f"{name} {rate:.4g} TFLOP/s{share}")
    g.result(f"torch {words[2]}: " + "; ".join(said))


if __name__ == "__main__":
    t.main()
