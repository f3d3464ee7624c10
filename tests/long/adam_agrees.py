#!/usr/bin/env python3
"""torch.optim.AdamW and Adam beside the CPU Adam: 100 steps in FP32 with gradients of turning sign
and of sizes from 1e-6 (coupled: 10) to 1e3, by torch's plain loop and its fused one.

Both are compared with the rule in double precision, each within a bound of what FP32 roundings can
do; so is torch in double, within a few of its own roundings, which shows that the rule is torch's.
Subnormals do not occur. Runs in a Python that has torch and numpy:

    adam_agrees.py PROGRAM        the program made from tests/long/adam_steps.c

The bound. u = 2^-24 is the largest relative error of a rounding. An error goes through an
operation as the operation's derivative says; what is added counts the roundings of the longer of
the two ways, the library's or torch's (lerp for the momentum, division by the bias's root), the
rounding of each scalar to FP32 among them:

    g' = g + w p               eg = w ep + u (3 |w p| + |g'|)                    Adam with decay
    m' = b1 m + c1 g           em = b1 em + c1 eg + u (|m'| + 2 b1 |m| + 2 c1 |g|
                                    + (4 min(b1, c1) + [c1 >= 1/2]) (|m| + |g|))
    v' = b2 v + c2 g^2         ev = b2 ev + c2 (2 |g| eg + eg^2) + u (2 b2 v + 4 c2 g^2 + v')
    r  = k sqrt(v') + eps      er = k min(ev / (2 sqrt(v' - ev)), sqrt(ev))
                                    + u (4 k sqrt(v') + eps + r)
    q  = h m' / r              eq = h (em + |m'| er / r) / (r - er) + 4 u |q|
    p' = d p - q               ep = d ep + eq + u (2 |d p| [decay] + |p'|)

Where coupled decay outweighs the gradient and pulls a weight to and fro across 0, its error feeds
itself and no bound holds for long: such values are left out and counted.
"""
import itertools
import os
import subprocess
import sys

# Last, as a test must not stand for an installed module of its name.
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else ""
STEPS, U = 100, 2.0 ** -24
SHAPES = [(1,), (1000,), (3, 5, 7), (32, 60)]
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.6, 0.5)]
EPSILONS = [1e-8, 1e-3]
RATES = [(1e-3, 0.0), (1e-3, 0.1), (1e-2, 10.0), (0.25, 0.4)]  # the last two: lr * decay = 0.1


def fail(what):
    t.check(False, what)


def rule(p, grads, lr, betas, eps, decay, coupled):
    """Yields (master, its bound) after each step; then (momentum, bound, variance, bound)."""
    p, (b1, b2) = p.astype(np.float64), betas
    c1, c2 = 1 - b1, 1 - b2
    m, v, ep, em, ev = (np.zeros_like(p) for _ in range(5))
    lost = np.zeros_like(p, dtype=bool)
    d = 1.0 if coupled else 1 - lr * decay
    for step, g in enumerate(grads.astype(np.float64), 1):
        eg = np.zeros_like(p)
        if coupled and decay:
            pull = decay * p
            g = g + pull
            eg = decay * ep + U * (3 * abs(pull) + abs(g))
        sizes = abs(m) + abs(g)
        em = b1 * em + c1 * eg + U * (2 * b1 * abs(m) + 2 * c1 * abs(g)
                                      + (4 * min(b1, c1) + (c1 >= 0.5)) * sizes)
        ev = b2 * ev + c2 * (2 * abs(g) * eg + eg * eg) + U * (2 * b2 * v + 4 * c2 * g * g)
        m, v = b1 * m + c1 * g, b2 * v + c2 * g * g
        em, ev = em + U * abs(m), ev + U * v
        h, k = lr / (1 - b1 ** step), 1 / np.sqrt(1 - b2 ** step)
        root = np.sqrt(v)
        r = k * root + eps
        with np.errstate(all="ignore"):
            slope = np.where(v > ev, ev / (2 * np.sqrt(np.maximum(v - ev, 0))), np.inf)
        er = k * np.minimum(slope, np.sqrt(ev)) + U * (4 * k * root + eps + r)
        q = h * m / r
        eq = np.where(r > er, h * (em + abs(m) * er / r) / np.maximum(r - er, 1e-300), np.inf)
        ep = d * ep + eq + 4 * U * abs(q) + U * 2 * abs(d * p) * (decay > 0 and not coupled)
        p = d * p - q
        ep = ep + U * abs(p)
        lost |= ~(ep < 1)
        ep[lost] = em[lost] = ev[lost] = 0
        yield p, np.where(lost, np.inf, ep)
    yield m, np.where(lost, np.inf, em), v, np.where(lost, np.inf, ev)


def by_torch(p, grads, lr, betas, eps, decay, coupled, dtype, **how):
    kind = torch.optim.Adam if coupled else torch.optim.AdamW
    x = torch.tensor(p, dtype=dtype, requires_grad=True)
    optimizer = kind([x], lr=lr, betas=betas, eps=eps, weight_decay=decay, **how)
    out = []
    for g in grads:
        x.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        out.append(x.detach().numpy().copy())
    kept = optimizer.state[x]
    return out, kept["exp_avg"].numpy(), kept["exp_avg_sq"].numpy()


def by_library(folder, p, grads, lr, betas, eps, decay, coupled, split):
    with open(folder + "/in", "wb") as file:
        file.write(p.tobytes() + grads.tobytes())
    subprocess.run([PROGRAM, folder + "/in", folder + "/out", str(p.size), str(len(grads)),
                    repr(lr), repr(betas[0]), repr(betas[1]), repr(eps), repr(decay),
                    str(int(coupled)), str(int(split))], check=True)
    out = np.fromfile(folder + "/out", dtype=np.float32).reshape(len(grads) + 2, *p.shape)
    return list(out[:-2]), out[-2], out[-1]


def agree(coupled):
    random = np.random.default_rng(20)
    worst = {"library": 0.0, "plain": 0.0, "fused": 0.0}
    apart, tested, bounded, elements = 0.0, 0, 0, 0
    with t.folder("adam-") as folder:
        for shape, betas, eps, (lr, decay) in itertools.product(SHAPES, BETAS, EPSILONS, RATES):
            args = (lr, betas, eps, decay, coupled)
            p = random.uniform(-1, 1, shape).astype(np.float32)
            sizes = 10.0 ** random.uniform(1 if coupled else -6, 3, shape)
            grads = (random.uniform(-1, 1, (STEPS, *shape)) * sizes).astype(np.float32)
            sides = {
                "library": by_library(folder, p, grads, *args, split=False),
                "plain": by_torch(p, grads, *args, torch.float32, foreach=False),
                "fused": by_torch(p, grads, *args, torch.float32, fused=True),
            }
            split = by_library(folder, p, grads, *args, split=True)
            for one, other in zip(itertools.chain(sides["library"][0], sides["library"][1:]),
                                  itertools.chain(split[0], split[1:])):
                if one.tobytes() != other.tobytes():
                    fail(f"{shape} {args}: a split master has other bits")
            exact = by_torch(p, grads, *args, torch.float64, foreach=False)
            *steps, (m, em, v, ev) = rule(p, grads, *args)
            for i, (want, bound) in enumerate(steps):
                # The rule, and torch in double: the bound scaled from FP32's roundings to double's.
                if not np.all(abs(exact[0][i] - want) <= np.maximum(bound * 2.0 ** -28, 1e-300)):
                    fail(f"{shape} {args}: step {i + 1}: torch in double follows another rule")
                bounded += np.isfinite(bound).sum()
                elements += bound.size
                for name, side in sides.items():
                    off = abs(side[0][i].astype(np.float64) - want) / np.maximum(bound, 1e-300)
                    worst[name] = max(worst[name], off.max())
                    if not off.max() <= 1:
                        at = np.unravel_index(off.argmax(), off.shape)
                        fail(f"{shape} {args}: step {i + 1}, {name}: element {at}: "
                               f"{side[0][i][at]!r}, rule {want[at]!r}, bound {bound[at]:.2g}")
                difference = abs(sides["library"][0][i] - sides["plain"][0][i])
                difference = difference / np.maximum(1, abs(want)) * np.isfinite(bound)
                apart = max(apart, difference.max())
            for name, side in sides.items():
                if not (np.all(abs(side[1] - m) <= em) and np.all(abs(side[2] - v) <= ev)):
                    fail(f"{shape} {args}: {name}: a moment is outside its bound")
            tested += 1
    print(f"{tested} settings, {STEPS} steps each; used of the bound: "
          + ", ".join(f"{name} {100 * used:.0f}%" for name, used in worst.items())
          + f"; {100 * bounded / elements:.2f}% of the values have a bound"
          + f"; library and torch at most {apart:.1e} apart, relative to max(1, |p|)", flush=True)
    t.check(bounded >= 0.95 * elements, f"only {bounded} of {elements} values have a bound")


@t.test
def adamw_of_torch():
    agree(False)


@t.test
def adam_of_torch():
    agree(True)


if __name__ == "__main__":
    t.main()
