"""The step of one rank among ranks that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rockmate.costs.machine import Machine, load_machine
from rockmate.errors import MachineError, frames_advised
from rockmate.planning.mark_log import log_marks
from rockmate.sharding.simulated import MeshSizes, Shard, SimulatedMesh
from rockmate.step import CapturedStep, capture_step


def machine_of(
    machine: str | Path | Machine | None, mesh: MeshSizes | None, shard: Shard | None = None
) -> Machine | None:
    """The machine to plan for, whose name tells the mesh; None to measure here.

    Raises:
        MachineError: the machine cannot be used, or there is a mesh and none is given.
        ValueError: `mesh` has no sizes of a mesh, or there is a `shard` without it.
    """
    if mesh is None:
        if shard is not None:
            raise ValueError("shard says how a model is sharded on a mesh. Give mesh, too.")
        return None if machine is None else load_machine(machine)
    simulated = SimulatedMesh.of(mesh, shard)
    if machine is None:
        msg = (
            f"mesh is {mesh!r}, whose ranks are not here, so nothing can be measured on them. Say "
            'what they are: machine="h100", or the path of a description.'
        )
        raise MachineError(msg)
    found = load_machine(machine)
    return replace(found, name=f"{found.name}, {simulated}")


def captured_step(
    model: nn.Module,
    sample_input: Any,
    *,
    mesh: MeshSizes | None,
    shard: Shard | None,
    **options: Any,
) -> CapturedStep:
    """`capture_step`, of one rank of a mesh if there is one, with marks in the log.

    `options` are those of `capture_step`.
    """
    if mesh is None:
        with frames_advised():
            step = capture_step(model, sample_input, **options)
    else:
        step = _step_on(SimulatedMesh.of(mesh, shard), model, sample_input, options)
    log_marks(step, options["existing_checkpoints"])
    return step


def _step_on(
    simulated: SimulatedMesh, model: nn.Module, sample_input: Any, options: dict[str, Any]
) -> CapturedStep:
    with simulated.holding(model) as sharded:
        step = capture_step(sharded, sample_input, **options)
    absence = (
        f"the plan is for a mesh of {simulated}, and its ranks are not here. Save it (Plan.save), "
        "and on each rank shard the model in the same way and wrap it: "
        "RockmateModule(rockmate.fully_shard(model, mesh), batch, plan=Plan.load(path))."
    )
    return replace(step, absence=absence)
