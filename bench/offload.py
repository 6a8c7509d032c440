"""Moves to another memory tier: simulated for GPUs, and measured with a disk on this machine.

    python -m bench.offload --simulated            # writes bench/results/offload_cpu_<yyyymm>.*
    python -m bench.offload --measured FOLDER      # lines are added

What each part does is in the modules of `bench.moves`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.moves import measured, simulated
from bench.pages import filled


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was measured kept its promise."""
    parser = command.parser("offload", __doc__, stem="offload_cpu")
    add = parser.add_argument
    add("--simulated", action="store_true", help="plan for machines")
    add("--layers", type=int, default=simulated.NUM_LAYERS)
    add("--tokens", type=int, default=simulated.NUM_TOKENS)
    add("--measured", metavar="FOLDER", help="train with moves to a folder")
    add("--model", action="append", help="of a measured part; repeatable; default: all")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    command.run("offload", options, _records(options), page)
    return 0 if all(map(_is_held, command.read(command.lines_of(options)))) else 1


def page(records: Sequence[Record]) -> list[str]:
    """The targets, and a table for each machine and for the measured models."""
    machines = [machine_text(each) for each in {r["command"]: r for r in records}.values()]
    return filled("offload", machines="\n\n".join(machines), records=records, tight=simulated.TIGHT)


def _is_held(record: Record) -> bool:
    """Whether gradients of a record are eager's: those of one model without moves may differ."""
    return record.get("is_bitwise", True) or record.get("is_bitwise_unmoved", False)


def _records(arguments: argparse.Namespace) -> Iterator[Record]:
    if arguments.simulated:
        for machine in simulated.MACHINES:
            yield from simulated.simulated(
                machine, num_layers=arguments.layers, num_tokens=arguments.tokens
            )
    if arguments.measured:
        for name in arguments.model or measured.MODELS:
            yield from measured.measured(name, arguments.measured)


if __name__ == "__main__":
    sys.exit(main())
