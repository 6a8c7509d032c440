"""The step of one rank among ranks that are not there."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from rockmate.capture.checkpoint_regions import log_lifted
from rockmate.capture.signature import SampleCall
from rockmate.costs.machine import Machine, load_machine
from rockmate.errors import InvalidArgumentError, MachineError, frames_advised
from rockmate.graph.marking import log_uncovered
from rockmate.planning.options import PlanOptions
from rockmate.planning.simulated_ranks import mesh_sizes, mesh_text, sharded_copy
from rockmate.planning.step import CapturedStep, capture_step


def machine_of(options: PlanOptions) -> Machine | None:
    """The machine to plan for, whose name tells the mesh; None to measure here.

    Raises:
        MachineError: the machine cannot be used, or there is a mesh and none is given.
        InvalidArgumentError: `mesh` has no sizes of a mesh, or there is a `shard` without it.
    """
    machine, mesh, shard = options.machine, options.mesh, options.shard
    if mesh is None:
        if shard is not None:
            raise InvalidArgumentError(
                "shard says how a model is sharded on a mesh. Give mesh, too."
            )
        return None if machine is None else load_machine(machine)
    sizes = mesh_sizes(mesh)
    if machine is None:
        msg = (
            f"mesh is {mesh!r}, whose ranks are not here, so nothing can be measured on them. Say "
            'what they are: machine="h100", or the path of a description.'
        )
        raise MachineError(msg)
    found = load_machine(machine)
    return replace(found, name=f"{found.name}, {mesh_text(sizes)}")


def captured_step(model: nn.Module, sample: SampleCall, options: PlanOptions) -> CapturedStep:
    """`capture_step`, of one rank of a mesh if there is one, with marks in the log."""
    capture = partial(
        capture_step,
        sample_input=sample,
        options=options.step,
        machine=machine_of(options),
        progress=options.progress,
        compile_limit_s=options.compile_limit_s,
    )
    if options.mesh is None:
        with frames_advised():
            step = capture(model)
    else:
        sizes = mesh_sizes(options.mesh)
        with sharded_copy(model, sizes, options.shard) as sharded:
            step = capture(sharded)
        absence = (
            f"the plan is for a mesh of {mesh_text(sizes)}, and its ranks are not here. Save it "
            "(Plan.save), and on each rank shard the model in the same way and wrap it: "
            "RockmateModule(model, batch, plan=Plan.load(path))."
        )
        step = replace(step, absence=absence)
    if not step.options.marks.honours_checkpoints:
        log_lifted(step.model, step.capture.num_checkpoints)
    log_uncovered(step.graph, step.options.marks)
    return step
