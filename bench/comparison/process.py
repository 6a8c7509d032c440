"""The processes that measure and plan one model, and what they are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import measure, models
from bench.command import Record

ROOT = Path(__file__).resolve().parents[2]
"""The folder that `python -m bench...` starts in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One model of a comparison.

    Attributes:
        model: its name.
        lines: the file to add lines to.
        plans: the folder of saved plans.
        device: "cpu" or "cuda".
        rounds: timed rounds, after one to warm up.
        method: names of methods; all if empty.
        quick: fewer settings and budgets.
        tiny: the model for tests.
        peers_only: no plans.
        loss_only: the outputs besides the loss are not kept, so that it may run in chunks.
    """

    model: str
    lines: Path
    plans: Path
    device: str = "cpu"
    rounds: int = 3
    method: tuple[str, ...] = ()
    quick: bool = False
    tiny: bool = False
    peers_only: bool = False
    loss_only: bool = False

    @classmethod
    def from_command_line(cls) -> Task:
        """The task of this process."""
        fields = json.loads(sys.argv[1])
        paths = {name: Path(fields[name]) for name in ("lines", "plans")}
        return cls(**{**fields, **paths, "method": tuple(fields["method"])})

    @property
    def measured(self) -> Record:
        """The options that decide what is measured, in the form of JSON."""
        left_out = ("model", "lines", "plans")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        return found | {"method": list(self.method)}

    def run(self, module: str, environment: Mapping[str, str]) -> int:
        """Runs a module on the task in a process of its own; its exit status."""
        told = json.dumps(asdict(self), default=str)
        command = [sys.executable, "-m", f"bench.comparison.{module}", told]
        return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode

    def workload(self) -> models.Workload:
        """The model with its loss inside."""
        return models.build(self.model, tiny=self.tiny, device=self.device).with_loss_inside()

    @property
    def capture(self) -> dict[str, Any]:
        """Options of the capture."""
        return {"outputs": "loss"} if self.loss_only else {}


def start(task: Task) -> int:
    """Measures one model in a process of its own; its exit status."""
    return task.run("measurement", os.environ | measure.RESIDENT_ENVIRONMENT)
