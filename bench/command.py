"""What the commands share: their options, the file of JSON lines, the page at the end.

A command that has a page writes STEM.jsonl, one line for each record as it is measured, and
STEM.md, made of the lines alone: `--page` writes it again. Lines are added to those that are there,
and the newest line of a key counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.machine import machine_record

Record = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
"""The folder that `python -m bench...` starts in."""
RESULTS = ROOT / "bench" / "results"


def parser(
    name: str,
    text: str | None,
    *,
    models: Collection[str] = (),
    rounds: int = 0,
    tiny: bool = False,
    stem: str = "",
) -> argparse.ArgumentParser:
    """A parser with those of the options that all commands share which this one has.

    Args:
        name: of the module, without the package.
        text: the module's docstring; the first line is the description.
        models: choices of `--model`.
        rounds: default of `--rounds`.
        tiny: whether there is `--tiny`.
        stem: name of the page, to which the month is added; a command with one has `--output` and
            `--page`.
    """
    first = (text or "").partition("\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=first)
    add = made.add_argument
    if models:
        add("--model", action="append", choices=tuple(models), help="repeatable; default: all")
    if rounds:
        add("--rounds", type=_positive, default=rounds, help="timed rounds, after one to warm up")
    if tiny:
        add("--tiny", action="store_true", help="models for tests, steps of milliseconds")
    if stem:
        default = RESULTS / f"{stem}_{time.strftime('%Y%m')}"
        add("--output", type=Path, metavar="STEM", default=default, help=f"default: {default.name}")
        add("--page", action="store_true", help="measure nothing: write the page again")
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}; at least 1")
    return number


def of_tests(name: str) -> Any:
    """A module of tests/support, as what makes random scripts."""
    folder = str(ROOT / "tests" / "support")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


# --- lines ------------------------------------------------------------------------------------


def add_line(path: Path, record: Mapping[str, Any]) -> None:
    """Writes one record to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    """The records of a file; none if there is no file.

    A last line that an interruption cut off is removed from the file.

    Raises:
        ValueError: Another line is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                path.write_text("".join(f"{whole}\n" for whole in lines[:-1]), encoding="utf-8")
                break
            msg = (
                f"{path}, line {number} is not JSON: {error}. "
                "Remove the line, or write to another file."
            )
            raise ValueError(msg) from error
    return records


def newest(records: Iterable[Record], *keys: str) -> list[Record]:
    """The last record of each combination of these keys."""
    return list({tuple(each.get(key) for key in keys): each for each in records}.values())


# --- running ----------------------------------------------------------------------------------


def main_of(
    name: str,
    text: str | None,
    measured: Callable[[str, argparse.Namespace], Iterable[Record]],
    page: Callable[[Sequence[Record]], list[str]],
    *,
    models: Collection[str],
    default: Collection[str] = (),
    further: Mapping[str, Mapping[str, Any]] | None = None,
    after: Callable[[argparse.Namespace, list[Record]], int] = lambda *_: 0,
    **shared: Any,
) -> Callable[..., int]:
    """The `main` of a command that measures model by model, on one thread, and writes a page.

    Args:
        name: as for `parser`, as are `text` and `shared`.
        text: the module's docstring.
        measured: gives the records of a model.
        page: gives the page of all records.
        models: choices of `--model`.
        default: those that are measured if none is named; empty for all.
        further: options of this command alone, by flag.
        after: what is done with all records, and the exit status.
        **shared: which of the shared options it has.
    """

    def main(arguments: Sequence[str] | None = None) -> int:
        made = parser(name, text, models=models, **shared)
        for flag, details in (further or {}).items():
            made.add_argument(flag, **details)
        options = made.parse_args(arguments)
        torch.set_num_threads(1)
        bar = tqdm(options.model or list(default or models), unit="model", disable=options.page)
        found = (record for model in bar for record in measured(model, options))
        return run(name, options, found, page) or after(options, read(lines_of(options)))

    return main


def apart(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[int, list[Any]]:
    """The exit status and the results of a function that runs in a process of its own.

    Args:
        function: of a module of the bench; it gives results one by one, which JSON can hold.
        *arguments: what it takes, as JSON.
        environment: of the process; this one's by default.
    """
    module = function.__globals__["__spec__"].name  # where `__name__` is "__main__", too
    line = [sys.executable, "-m", "bench.command", module, function.__name__]
    child = subprocess.run(
        [*line, json.dumps(arguments)], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    marked = [each for each in child.stdout.splitlines() if each.startswith(_MARK)]
    return child.returncode, [json.loads(each.removeprefix(_MARK)) for each in marked]


_MARK = "result: "


def _called_apart(module: str, name: str, arguments: str) -> None:
    torch.set_num_threads(1)
    for result in getattr(importlib.import_module(module), name)(*json.loads(arguments)):
        sys.stdout.write(f"{_MARK}{json.dumps(result)}\n")
        sys.stdout.flush()


def run(
    name: str,
    options: argparse.Namespace,
    measured: Iterable[Record],
    page: Callable[[Sequence[Record]], list[str]],
) -> int:
    """Adds each record, as it is measured, to the lines, then writes the page of all lines.

    Returns:
        1 if there is no line.
    """
    lines = lines_of(options)
    if not options.page:
        head = machine_record(f"bench.{name}")
        for record in measured:
            add_line(lines, head | record)
    records = read(lines)
    if not records:
        say(f"{lines} has no line")
        return 1
    write(options, page(records))
    return 0


def lines_of(options: argparse.Namespace) -> Path:
    """The file of lines of a command with `--output`."""
    return Path(f"{options.output}.jsonl")


def write(options: argparse.Namespace, page: Iterable[str]) -> None:
    """Writes a page to its file and to the terminal."""
    text = "\n".join(page) + "\n"
    path = Path(f"{options.output}.md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def say(message: str) -> None:
    """Writes progress to stderr."""
    sys.stderr.write(f"bench: {message}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    _called_apart(*sys.argv[1:])
