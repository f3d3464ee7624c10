"""The state really leaves memory: with --optimizer nvme the peak private memory (RssAnon +
RssShmem, sampled) is lower than with host by at least 85% of the state's 12 bytes per parameter.

A random model of 26 million parameters and small chunks, so that the slots are small against the
state. The same at 206 million parameters is tests/bench/out_of_core.py.
"""
import json
import re

import support as t

@t.test
def nvme_takes_the_state_out_of_memory():
    if t.SANITIZED:
        # The sanitizers' own memory is in the same counters; the release run measures.
        print("   under a sanitizer only the run itself is checked")
    with t.folder() as tmp:
        with open(tmp + "/config.json", "w", encoding="utf-8") as file:
            json.dump(t.MIDDLE_MODEL, file)
        t.spillway("init", "--config", tmp + "/config.json", "--seed", 3, "--out", tmp + "/model",
                   rc=0)
        peaks, digests = {}, []
        for tier in ("host", "nvme"):
            run = t.train(f"{tmp}/{tier}", "--optimizer", tier, "--steps", 2, "--seq-len", 16,
                          "--chunk", "1M", "--digest", model=tmp + "/model", sample=True)
            t.equal(run.rc, 0, tier, run)
            peaks[tier] = run.peak_private_bytes
            digests.append(re.search("^digest: .*", run.stdout, re.M).group(0))
            params = int(re.search(r"^(\d+) parameters", run.stdout, re.M).group(1))
        t.equal(digests[0], digests[1], "state of the two runs")
        saved = (peaks["host"] - peaks["nvme"]) / (12 * params)
        print(f"   {params} parameters: host {peaks['host']} B, nvme {peaks['nvme']} B, "
              f"{100 * saved:.1f}% of 12 B per parameter saved")
        if not t.SANITIZED:
            t.check(saved >= 0.85, f"only {100 * saved:.1f}% of the state left memory")


if __name__ == "__main__":
    t.main()
