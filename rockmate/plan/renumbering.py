"""A plan with the indices of an equal step, whose trace has ops in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rockmate.costs.cost import Costs
from rockmate.graph.snapshot import SnapshotChain, StepSnapshot
from rockmate.plan.record import PlanRecord
from rockmate.schedule.schedule import Schedule

_Record = TypeVar("_Record", bound=PlanRecord)


def renumbered(plan: _Record, step: StepSnapshot) -> _Record:
    """The plan for another capture of its step; its simulation stays as it is.

    The steps are equal: `StepSnapshot.difference` finds none.
    """
    own = plan.snapshot.order
    ops = _places(own.ops, step.order.ops)
    storages = _places(own.storages, step.order.storages)
    return replace(
        plan,
        snapshot=step,
        schedule=_schedule(plan.schedule, ops, storages),
        costs=_costs(plan.costs, ops),
        chain=_chain(plan.chain, ops, storages),
    )


def _places(own: Sequence[int], other: Sequence[int]) -> list[int]:
    return [place for _, place in sorted(zip(own, other, strict=True))]


def _schedule(schedule: Schedule, ops: Sequence[int], storages: Sequence[int]) -> Schedule:
    return replace(
        schedule,
        forward=tuple(ops[index] for index in schedule.forward),
        backward=tuple(ops[index] for index in schedule.backward),
        moves=tuple(replace(move, storage=storages[move.storage]) for move in schedule.moves),
        fetches=tuple(replace(each, storage=storages[each.storage]) for each in schedule.fetches),
        def_use=None,
    )


def _costs(costs: Costs, ops: Sequence[int]) -> Costs:
    first, recompute = (
        tuple(cost for _, cost in sorted(zip(ops, table, strict=True), key=lambda pair: pair[0]))
        for table in (costs.first, costs.recompute)
    )
    return replace(costs, first=first, recompute=recompute)


def _chain(chain: SnapshotChain, ops: Sequence[int], storages: Sequence[int]) -> SnapshotChain:
    def storage(index: int | None) -> int | None:
        return None if index is None else storages[index]

    blocks = (
        replace(
            block,
            ops=tuple(ops[index] for index in block.ops),
            input=storage(block.input),
            output=storage(block.output),
        )
        for block in chain.blocks
    )
    carried = sorted(storages[index] for index in chain.carried)
    return SnapshotChain(blocks=tuple(blocks), carried=tuple(carried))
