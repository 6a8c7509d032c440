"""Moves to another memory tier: simulated for GPUs, and measured with a disk on this machine.

    python -m bench.offload --simulated --output FILE.jsonl
    python -m bench.offload --measured FOLDER --output FILE.jsonl   # lines are added
    python -m bench.offload --peers FOLDER --output FILE.jsonl
    python -m bench.offload --batches --output FILE.jsonl            # simulated
    python -m bench.offload --batches FOLDER --output FILE.jsonl     # measured
    python -m bench.offload --page FILE.jsonl > bench/results/offload_<yyyymm>.md

What each part does is in the modules of `bench.moves`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from bench.machine import machine_record
from bench.moves import batches, measured, peers, simulated
from bench.moves.page import Record, page
from bench.moves.small_models import BRANCHED, SMALL

_SIMULATED = "simulated"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was measured kept its promise."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="plan for machines")
    parser.add_argument("--layers", type=int, default=simulated.NUM_LAYERS)
    parser.add_argument("--tokens", type=int, default=simulated.NUM_TOKENS)
    parser.add_argument("--measured", metavar="FOLDER", help="train with moves to a folder")
    parser.add_argument("--peers", metavar="FOLDER", help="train beside others that offload")
    parser.add_argument(
        "--batches",
        nargs="?",
        const=_SIMULATED,
        metavar="FOLDER",
        help="the largest batches: simulated, or measured with moves to a folder",
    )
    parser.add_argument("--models", nargs="*", help="of a measured part (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where lines are added")
    parser.add_argument("--page", type=Path, metavar="FILE", help="of which the page is printed")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.page:
        text = arguments.page.read_text(encoding="utf-8")
        sys.stdout.write("\n".join(page([json.loads(line) for line in text.splitlines()])) + "\n")
        return 0
    head = machine_record("bench.offload")
    records: list[Record] = []
    for record in _records(arguments):
        records.append({**head, **record})
        if arguments.output:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(records[-1]) + "\n")
    if not arguments.output:
        sys.stdout.write("\n".join(page(records)) + "\n")
    return 0 if all(map(_is_held, records)) else 1


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
        for name in arguments.models or (*SMALL, *BRANCHED):
            yield from measured.measured(name, arguments.measured)
    if arguments.peers:
        for name in arguments.models or peers.MODELS:
            yield from peers.against_peers(name, arguments.peers)
    if arguments.batches is not None:
        folder = None if arguments.batches == _SIMULATED else arguments.batches
        for name in arguments.models or batches.DEPTHS:
            yield from batches.batches(name, folder)


if __name__ == "__main__":
    sys.exit(main())
