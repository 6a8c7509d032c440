"""`rockmate check`: small steps, eager and planned, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rockmate.cli.arguments import add_run_arguments, only_errors_logged
from rockmate.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from rockmate.checks.run import CheckRow

_PACKAGES = ("rockmate-planner", "torch", "transformers", "peft", "accelerate", "numpy", "triton")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    command = commands.add_parser(
        "check",
        help="whether this machine and these versions keep what is promised",
        description=(
            "Train about a dozen small models, eager and planned, on this machine's device: equal "
            "bits or rounding, predicted and measured peak, predicted and measured time, and on a "
            "GPU how often the host waits. Takes one to two minutes. Exit code 1 if a promise does "
            "not hold."
        ),
    )
    command.add_argument("--device", help="as cpu or cuda:0 (default: a GPU if there is one)")
    command.add_argument(
        "--only", metavar="TEXT", default="", help="only steps whose name contains it"
    )
    command.add_argument("--json", action="store_true", help="print JSON, to attach to a report")
    add_run_arguments(command)


def run(arguments: argparse.Namespace) -> int:
    """Runs the check and gives the exit code."""
    import torch

    from rockmate._util import progress_bar
    from rockmate.checks.cases import cases
    from rockmate.checks.run import check_behaviour_row, check_case
    from rockmate.hf.model_source import check_device

    check_device(arguments.device or "cpu")
    device = torch.device(arguments.device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    rows = [check_behaviour_row()]
    with tempfile.TemporaryDirectory() as folder, only_errors_logged("rockmate"):
        known = cases(device, folder)
        chosen = [case for case in known if arguments.only in case.name]
        if not chosen:
            names = ", ".join(case.name for case in known)
            raise InvalidArgumentError(f"no step is named {arguments.only!r}; there are {names}")
        progress = progress_bar(
            chosen, desc="check", leave=False, disable=True if arguments.quiet else None
        )
        for case in progress:
            progress.set_postfix_str(case.name)
            rows.append(check_case(case, device))
    machine = _machine(device)
    if arguments.json:
        record = {"machine": machine, "rows": list(map(asdict, rows))}
        sys.stdout.write(json.dumps(record, indent=1) + "\n")
    else:
        sys.stdout.write(_text(machine, rows))
    return 1 if any(row.failures for row in rows) else 0


def _machine(device: torch.device) -> dict[str, Any]:
    import torch

    versions = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    machine = {
        "device": str(device),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "num_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = f"{properties.name}, {properties.total_memory >> 20} MiB"
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["cuda"] = torch.version.cuda
        version = Path("/sys/module/nvidia/version")  # of the kernel module
        machine["driver"] = version.read_text(encoding="ascii").strip() if version.exists() else ""
    return machine


def _text(machine: dict[str, Any], rows: Sequence[CheckRow]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = machine.get("gpu") or machine["processor"]
    lines = [
        f"{machine['device']}: {where}, {machine['num_threads']} threads; Python "
        f"{machine['python']}, {versions}",
        "",
        f"{'step':<24}{'gradients':<22}{'peak, predicted -> measured':<34}{'time':<16}",
    ]
    lines += [_line(row) for row in rows]
    failed = [row for row in rows if row.failures]
    lines += ["", *(f"FAILED: {row.name}: {each}" for row in failed for each in row.failures)]
    lines += [f"skipped: {row.name}: {row.skipped}" for row in rows if row.skipped]
    num_passed = sum(not row.failures and not row.skipped for row in rows)
    lines.append(f"{num_passed} of {len(rows)} hold.")
    return "\n".join(lines) + "\n"


def _line(row: CheckRow) -> str:
    from rockmate.budget import size_text

    if row.skipped or row.measured_peak_bytes is None or row.predicted_peak_bytes is None:
        return f"{row.name:<24}{'FAILED' if row.failures else 'skipped' if row.skipped else 'ok'}"
    difference = row.gradient_difference
    gradients = f"within {difference:.0e}" if difference else "equal bits"
    peak = f"{size_text(row.predicted_peak_bytes)} -> {size_text(row.measured_peak_bytes)}"
    peak += f" of {size_text(row.eager_peak_bytes or 0)}"
    times = "" if row.predicted_ratio is None else f"{row.predicted_ratio:.2f} -> "
    times += f"{row.measured_ratio:.2f}x"
    waits = "" if row.num_waits is None else f", {row.num_waits} waits"
    failed = "  FAILED" if row.failures else ""
    return f"{row.name:<24}{gradients:<22}{peak:<34}{times}{waits}{failed}"
