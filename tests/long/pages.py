#!/usr/bin/env python3
"""Pages of docs/ whose figures come from `spillway plan`: what they quote is what the program says,
and what they derive is what their own numbers give.

A page is read like this. A line that begins with four blanks and "$ spillway" is a command, going
on behind a backslash; lines that follow without a blank one between are quoted from its output, in
their order, blanks aside. Other lines with four blanks and "EXPRESSION = NUMBER" are sums to check,
x for times; words and a colon may stand in front. Above a table, a comment says what a column is:

    <!-- column 3 is times.step_s of spillway plan {1} --machine 8xh100 -->
    <!-- column 4 is ({3} / {2} - 1) * 100 -->

{N} is the N-th cell of the row, without what marks it up. Figures may be off by half of their last
digit.
"""
import json
import os
import re
import shlex
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import support as t  # noqa: E402

PAGES = ["docs/replay.md", "docs/70b.md"]
NUMBER = r"-?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[0-9]+)?"
SUM = re.compile(rf" {{4}}(?:[^$=:]*: )?([-+*/()0-9.,ex ]+) = ({NUMBER})(?![0-9.])")
COLUMN = re.compile(r"<!-- column ([0-9]+) is (.*?) -->", re.DOTALL)


def read(page):
    with open(page, encoding="utf-8") as file:
        return file.read()


def value(text):
    return float(text.replace(",", ""))


def shown(text, got, what):
    """A figure as it is printed, and what it should be."""
    mantissa, _, exponent = text.replace(",", "").partition("e")
    last = 10 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    t.check(abs(value(text) - got) <= 0.5001 * last, f"{what}: {got:.6g}, not {text}")


def calculate(expression):
    times = re.sub(r"(?<=[ 0-9])x(?= )", "*", expression.replace(",", ""))
    return eval(times, {"__builtins__": {}})


def run(words):
    """What the command prints; one that finds that nothing fits has said something, too."""
    done = t.spillway(*words)
    t.check(done.rc in (0, 1), f"{' '.join(words)}: exit status {done.rc}", done)
    return done.stdout


def squeezed(line):
    return " ".join(line.split())


# ---- commands and what is quoted ----

def blocks(text):
    """Indented blocks, each as its lines."""
    for block in re.split(r"\n\s*\n", text):
        lines = block.split("\n")
        if lines[0].startswith("    $ spillway "):
            yield lines


def command_and_quotes(lines):
    command = lines.pop(0).strip()[len("$ spillway "):]
    while command.endswith("\\"):
        command = command[:-1] + lines.pop(0).strip()
    return shlex.split(command), [squeezed(line) for line in lines]


@t.test
def what_is_quoted_is_what_the_program_says():
    count = 0
    for page in PAGES:
        for lines in blocks(read(page)):
            words, quotes = command_and_quotes(lines)
            printed = [squeezed(line) for line in run(words).split("\n")]
            at = 0
            for quote in quotes:
                t.check(quote in printed[at:], f"{page}: '{quote}' is not what {' '.join(words)} "
                        "says" + "".join(f"\n  {line}" for line in printed))
                at = printed.index(quote, at) + 1
                count += 1
    t.check(count >= 20, f"{count} quoted lines")


# ---- sums ----

@t.test
def what_is_derived_follows():
    count = 0
    for page in PAGES:
        for number, line in enumerate(read(page).split("\n"), 1):
            found = SUM.match(line)
            if not found or not re.search(r"[-+*/x]", found[1]):
                continue
            shown(found[2], calculate(found[1]), f"{page}:{number}")
            count += 1
    t.check(count >= 10, f"{count} sums")


# ---- tables ----

def tables(text):
    """Of each table the comments above it, with the rows below its head."""
    for part in re.finditer(r"((?:<!--(?:(?!-->).)*-->\n)+)\n?((?:\|[^\n]*\n)+)", text, re.DOTALL):
        rows = [[re.sub(r"[`*]", "", cell).strip() for cell in row.strip("|").split("|")]
                for row in part[2].strip().split("\n")]
        yield COLUMN.findall(part[1]), rows[2:]


def number_of(cell):
    found = re.match(NUMBER, cell)
    return found[0] if found else None


def column_value(rule, cells):
    """Of a row: a member of a plan's JSON, or a sum of other cells."""
    filled = re.sub(r"\{([0-9]+)\}", lambda m: cells[int(m[1]) - 1], squeezed(rule))
    member, plan, words = filled.partition(" of spillway ")
    if not plan:
        return calculate(re.sub(r"[^-+*/()0-9.,ex ]", "", filled))
    got = json.loads(run(shlex.split(words) + ["--json"]))
    for name in member.split("."):
        got = got[int(name) if name.isdigit() else name]
    return got


@t.test
def tables_say_what_the_program_says():
    count = 0
    for page in PAGES:
        for rules, rows in tables(read(page)):
            t.check(rules and rows, f"{page}: a table without rows, or of no rule")
            for cells in rows:
                for column, rule in rules:
                    cell = number_of(cells[int(column) - 1])
                    if cell is None:  # a dash: nothing was published
                        continue
                    shown(cell, column_value(rule, cells), f"{page}: {' | '.join(cells)}")
                    count += 1
    t.check(count >= 20, f"{count} cells")


if __name__ == "__main__":
    t.main()
