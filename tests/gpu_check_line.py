"""How gpu-check is called: by its path, through links, and with times that are none. What its rows
do is gpu_check.py's.
"""
import os
import shutil
import sys

import support as t


def folder_of(tmp):
    """What the command line needs of a packed folder."""
    folder = os.path.join(t.ROOT, tmp, "packed here")
    os.makedirs(folder)
    shutil.copytree(t.ROOT + "/tests/gpu", folder + "/tests/gpu")
    shutil.copy2(t.ROOT + "/tests/run.py", folder + "/tests")
    shutil.copy2(t.ROOT + "/tests/gpu/gpu-check", folder)
    return folder


def call(program, *args, cwd=None):
    return t.Process(args, program=program, cwd=cwd, env={"PYTHON": sys.executable}).finish()


@t.test
def it_runs_however_it_is_called():
    with t.folder() as tmp:
        folder = folder_of(tmp)
        want = call(folder + "/gpu-check", "--list")
        t.equal(want.rc, 0, "exit status", want)
        t.contains(want.stdout, "machine", "the rows", want)
        links = os.path.join(t.ROOT, tmp, "bin")
        os.mkdir(links)
        os.symlink(folder + "/gpu-check", links + "/whole")
        os.symlink("../packed here/gpu-check", links + "/relative")
        os.symlink("relative", links + "/twice")
        os.symlink(folder, links + "/folder")
        for name in ("whole", "relative", "twice", "folder/gpu-check"):
            run = call(f"{links}/{name}", "--list")
            t.equal((run.rc, run.stdout), (0, want.stdout), name, run)
        run = call("./twice", "--list", cwd=links)
        t.equal((run.rc, run.stdout), (0, want.stdout), "from the folder of the link", run)


@t.test
def a_time_that_is_none_is_refused():
    with t.folder() as tmp:
        program = folder_of(tmp) + "/gpu-check"
        for args, told in (
                (["--seconds", "-5"], "--seconds -5: a time is wanted, in seconds above 0"),
                (["--seconds", "nan"], "--seconds nan: a time is wanted"),
                (["--seconds", "inf"], "--seconds inf: a time is wanted"),
                (["--seconds", "0"], "--seconds 0: a time is wanted"),
                (["--seconds", "soon"], "--seconds soon: a time is wanted"),
                (["--limit", "step=-1"], "--limit step=-1: ROW=SECONDS is wanted, in seconds"),
                (["--limit", "step=nan"], "--limit step=nan: ROW=SECONDS is wanted"),
                (["--limit", "step"], "--limit step: ROW=SECONDS is wanted"),
                (["--limit", "stop=3"], "no such row: stop")):
            run = call(program, *args, "--list")
            t.equal(run.rc, 2, f"exit status of {args}", run)
            t.contains(run.stderr, told, "what it says", run)
        run = call(program, "--seconds", "0.5", "--limit", "step=1e3", "--list")
        t.equal(run.rc, 0, "exit status of times that are some", run)


if __name__ == "__main__":
    t.main()
