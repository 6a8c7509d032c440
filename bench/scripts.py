"""Random training scripts beside eager, counted by outcome.

    python -m bench.scripts                              # 2,000 scripts; goes on where it stopped
    python -m bench.scripts --seed 17 --count 1 --show   # one script
    python -m bench.scripts --kind "layer drop" --mode frames
    python -m bench.scripts --page                       # only the page of the finished scripts

A script is drawn from its seed (`tests/support/random_scripts.py`): a model of unusual layers, a
loop with unusual habits, a mode and a budget. It runs in a process of its own. Each finished script
is a line of STEM.jsonl; STEM.md has the counts and each fault with the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from bench import command, forks
from bench.command import Record
from bench.machine import machine_record, machine_text
from bench.pages import filled, table
from bench.script_outcome import FAULTS, MEANINGS, NOT_COUNTED, RIGHT, outcome, random_scripts

_LONGEST = 240


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the page; 0 whether there are faults or not."""
    options = _parse(arguments)
    if options.show:
        for script in _scripts(options):
            sys.stdout.write(f"{script}\n{json.dumps(outcome(script), indent=1)}\n")
        return 0
    lines = command.lines_of(options)
    if not options.page:
        head = machine_record("bench.scripts")
        drawn = ({"seed": s.seed, "mode": s.mode, "kinds": s.kinds} for s in _scripts(options))
        for record in forks.run_missing(options, ("seed", "mode"), drawn, _measure):
            command.add_line(lines, head | record)
            if record["verdict"] in FAULTS:
                detail = record["detail"][:_LONGEST]
                tqdm.write(f"{record['verdict']}: {_command(record)}: {detail}")
            head = {"commit": head["commit"]}  # the first line of a run has the whole
    command.write(options, page(command.newest(command.read(lines), "seed", "mode")))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = forks.parser("scripts", __doc__, 120)
    add = parser.add_argument
    modes = random_scripts.MODES
    add("--seed", type=int, default=0, help="of the first script")
    add("--count", type=int, default=2000, help="scripts, by seeds that follow each other")
    add("--mode", action="append", choices=modes, help="repeatable; default: the drawn one")
    add("--kind", action="append", metavar="KIND", choices=random_scripts.KINDS, help="only these")
    add("--show", action="store_true", help="print what became of each script, here and now")
    return parser.parse_args(arguments)


def _scripts(options: argparse.Namespace) -> list[Any]:
    scripts = [
        random_scripts.Script.of(seed, mode)
        for seed in range(options.seed, options.seed + options.count)
        for mode in options.mode or [None]
    ]
    kinds = set(options.kind or random_scripts.KINDS)
    return [script for script in scripts if kinds & set(script.kinds)]


def _measure(drawn: Record) -> Record:
    return short(outcome(random_scripts.Script.of(drawn["seed"], drawn["mode"])))


def short(record: Record) -> Record:
    """A record with the first words of each of its texts, and without those that say nothing."""
    texts: Record = {
        name: [_without_folders(each)[:_LONGEST] for each in record[name]]
        for name in ("advices", "heard")
        if record.get(name)
    }
    if record.get("detail"):
        texts["detail"] = _without_folders(record["detail"])
    return {k: v for k, v in record.items() if k not in ("advices", "heard") and v != ""} | texts


def _without_folders(text: str) -> str:
    """A text whose paths begin in the repository or in the environment's packages."""
    return re.sub(r"/[^\s\"']*?/(?=(?:site-packages|tests|rockmate)/)", "", text)


def page(records: Sequence[Record]) -> list[str]:
    """Targets, counts, and each fault."""
    if not records:
        return ["# Random scripts", "", "No script is finished."]
    counted = [each for each in records if each["verdict"] != NOT_COUNTED]
    machine = next((each for each in reversed(records) if "machine" in each), None)
    return filled(
        "scripts",
        meanings=MEANINGS,
        num_unrepeated=len(records) - len(counted),
        counted=counted,
        verdicts=FAULTS,
        by_mode=_table(counted, "mode", lambda record: [record["mode"]]),
        faults=[each for verdict in FAULTS for each in counted if each["verdict"] == verdict],
        command_of=_command,
        longest=_LONGEST,
        by_kind=_table(counted, "kind", lambda record: record["kinds"]),
        commits=Counter(each["commit"] for each in records),
        machine=machine_text(machine) if machine else "",
    )


def _table(records: Sequence[Record], what: str, keys: Any) -> list[str]:
    verdicts = (*RIGHT, *FAULTS)
    counts: dict[str, Counter[str]] = {}
    for record in records:
        for key in keys(record):
            counts.setdefault(key, Counter())[record["verdict"]] += 1
    rows = [
        [key, str(own.total()), *(str(own[verdict]) for verdict in verdicts)]
        for key, own in sorted(counts.items())
    ]
    return table([what, "scripts", *verdicts], rows)


def _command(record: Record) -> str:
    seed, mode = record["seed"], record["mode"]
    return f"python -m bench.scripts --show --count 1 --seed {seed} --mode {mode}"


if __name__ == "__main__":
    sys.exit(main())
