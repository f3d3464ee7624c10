"""Stage c of gpu-check where there are several GPUs: every --zero stage, overlap mode and tier
gives the same bits, and two ranks those of one that takes their rows one after the other."""
import re

import gpu_support as g
import support as t

STEPS = 2 if g.TINY else 4
VARIANTS = [["--zero", 0], ["--zero", 1, "--overlap", "none"], ["--zero", 2],
            ["--zero", 3, "--params", "host"], ["--zero", 3, "--optimizer", "nvme"]]


def end_of(tmp, name, *more):
    """The last loss's line and the digest of a run."""
    log = f"{tmp}/{name}.jsonl"
    run = t.train(f"{tmp}/{name}", "--device", "cuda", "--steps", STEPS, "--seq-len", 16, "--lr",
                  "1e-3", "--digest", "--log", log, *more, rc=0)
    digest = re.search(r"^digest: .*", run.stdout, re.M)
    t.check(digest is not None, "no digest", run)
    return [s["loss"] for s in t.read_log(log)[0]], digest.group(0)


def ranks_alike(ranks, variants):
    with t.folder() as tmp:
        want = None
        for i, more in enumerate(variants):
            got = end_of(tmp, f"r{ranks}-{i}", "--ranks", ranks, *more)
            want = want or got
            t.equal(got, want, f"{ranks} ranks, {' '.join(str(m) for m in more)}")
        if ranks == 2:
            one = end_of(tmp, "one", "--ranks", 1, "--accumulate", 2)
            t.equal(want[1], one[1], "two ranks and one with two micro-batches")


@t.test
def several_gpus_give_the_same_bits():
    _, count, _ = g.device()
    if count < 2:
        t.skip(f"{count} GPU here, two are needed")
    variants = VARIANTS[:2] if g.TINY else VARIANTS
    sizes = sorted({2, min(count, 8)}) if not g.TINY else [2]
    for ranks in sizes:
        ranks_alike(ranks, variants)
    g.result(f"{' and '.join(str(n) for n in sizes)} ranks, {len(variants)} variants each")


if __name__ == "__main__":
    t.main()
