"""What a measurement ran on, as the head of its JSON lines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def machine_record(module: str) -> dict[str, Any]:
    """Command, commit, load, processor and versions of this process, run as `python -m module`."""
    return {
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "commit": _commit(),
        "load_average": os.getloadavg()[0],
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def machine_text(record: Mapping[str, Any], load: str = "") -> str:
    """Command, commit and machine in one paragraph; `load` is in place of the record's."""
    return (
        f"`{record['command']}` at commit {record['commit']}, load average "
        f"{load or format(record['load_average'], '.1f')} at the start. {hardware_text(record)}. "
        f"{versions_text(record)}."
    )


def hardware_text(record: Mapping[str, Any], *, device: str = "cpu") -> str:
    """Processor or graphics card, cores and threads, as a page names them."""
    is_cuda = device.startswith("cuda")
    hardware = record["gpu"] if is_cuda else f"{record['processor']} ({record['machine']})"
    threads = "1 thread" if record["num_threads"] == 1 else f"{record['num_threads']} threads"
    return f"{hardware}, {record['num_cores']} cores, {threads} used"


def versions_text(record: Mapping[str, Any]) -> str:
    """Versions of Python and libraries, as a page names them."""
    names = {"Python": "python", "PyTorch": "torch", "transformers": "transformers"}
    return ", ".join(f"{name} {record[key]}" for name, key in names.items())


def _commit() -> str:
    """The checkout's commit, empty outside of one."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _processor() -> str:
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")
