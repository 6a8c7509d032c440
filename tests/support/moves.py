"""Moves in tests: a link that is always worth it, random moves, and a tier that poisons memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import rockmate.planning.checked_forms
import rockmate.runtime.step_arguments
from rockmate import Plan, Planner, RockmateModule
from rockmate.costs.cost import Link
from rockmate.graph.ir import Graph
from rockmate.schedule.liveness import DefUse, op_def_use
from rockmate.schedule.move import Move, movable_storages
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import Schedule, with_moves
from rockmate.schedule.simulate import simulate

# Copies take next to no time, so that moving beats recomputing.
FAST = Link(out_gb_per_s=1e4, in_gb_per_s=1e4, latency_ms=1e-9)

X = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))


def layers(width: int = 256, number: int = 6) -> nn.Sequential:
    """A model whose values move at half of its peak."""
    torch.manual_seed(0)
    parts = [part for _ in range(number) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts).train()


class Net(nn.Sequential):
    """Layers with the loss behind them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def rows(seed: int = 0, number: int = 32) -> Tensor:
    return torch.randn(number, 128, generator=torch.Generator().manual_seed(seed))


def module_of(folder: Path, model: nn.Module | None = None, **options: Any) -> RockmateModule:
    """`model`, or `layers`, whose values move to a disk."""
    module = RockmateModule(model or layers(), X, 0.5, offload=f"disk:{folder}", **options)
    assert module.plan.schedule.moves
    return module


def medium_planner(name: str, folder: Path, **options: Any) -> Planner:
    """Of a model whose values may move to files."""
    workload = models.medium(name)
    home = f"disk:{folder}"
    return Planner(workload.model, workload.sample, machine="cpu-avx2", offload=home, **options)


def step(module: Callable[..., Tensor], x: Tensor = X) -> None:
    module(x).square().mean().backward()


def use_fast_link(monkeypatch: pytest.MonkeyPatch, link: Link = FAST) -> None:
    """Has planners take the rates of `link` for those of any tier."""
    monkeypatch.setattr(rockmate.planning.checked_forms, "link_to", lambda *_: link)


def random_moves(graph: Graph, schedule: Schedule, draw: random.Random, share: float) -> list[Move]:
    """Valid moves of some of the gaps in which values wait, at random places."""
    def_use = DefUse.of(op_def_use(graph), schedule.forward, schedule.backward)
    movable, num_forward = movable_storages(graph), len(schedule.forward)
    accesses: dict[int, list[tuple[int, bool]]] = {}
    for storage, position, is_definition in zip(
        def_use.storage.tolist(),
        def_use.position.tolist(),
        def_use.is_definition.tolist(),
        strict=True,
    ):
        accesses.setdefault(storage, []).append((position, is_definition))
    moves = []
    for storage, found in accesses.items():
        if storage not in movable or draw.random() > share:
            continue
        made = 0
        for (last, is_made), (first, is_made_again) in pairwise(found):
            made = last if is_made else made
            if is_made_again or last >= num_forward or last + 1 > num_forward:
                continue
            send = draw.randint(made + 1, last + 1)
            sent = draw.randint(last + 1, first)
            fetch = draw.randint(sent, first)
            fetched = draw.randint(fetch, first)
            moves.append(Move(storage=storage, send=send, sent=sent, fetch=fetch, fetched=fetched))
            made = fetched
    return moves


def moved(plan: Plan, draw: random.Random, share: float = 0.7) -> Plan:
    """The plan with random moves."""
    moves = random_moves(plan.graph, plan.schedule, draw, share)
    schedule = with_moves(plan.graph, plan.schedule, moves)
    costs = replace(plan.costs, link=FAST)
    simulation = simulate(plan.graph, schedule, costs)
    return replace(
        plan,
        schedule=schedule,
        costs=costs,
        simulation=simulation,
        predicted_peak_bytes=simulation.peak_bytes,
        offload=OffloadRequest("disk", "nowhere"),
    )


class PoisonCopy:
    """A copy that does its work as late as it may, and spoils what must not be read."""

    def __init__(self, finish: object) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()  # pyright: ignore

    def took_ms(self) -> float:
        return 0.0


class PoisonSlab:
    """Bytes in memory. What has been sent is filled with NaN, what is fetched is NaN until then."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy_out(self, offset: int, source: Tensor) -> PoisonCopy:
        at_issue = source.clone()

        def finish() -> None:
            assert torch.equal(at_issue, source), "a value changes while it is copied out"
            self.data[offset : offset + len(source)] = source
            source.fill_(255)

        return PoisonCopy(finish)

    def copy_in(self, offset: int, target: Tensor) -> PoisonCopy:
        target.fill_(255)

        def finish() -> None:
            assert bool((target == 255).all()), "a value is written before it has come back"
            target.copy_(self.data[offset : offset + len(target)])

        return PoisonCopy(finish)

    def release(self) -> None:
        self.data.fill_(255)


class PoisonTier:
    """Slabs that spoil memory."""

    def borrow(self, num_bytes: int) -> PoisonSlab:
        return PoisonSlab(num_bytes)


def use_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every step move values to a `PoisonTier`."""
    monkeypatch.setattr(rockmate.runtime.step_arguments, "tier_of", lambda *_: PoisonTier())


def live_bytes_of_walk(graph: Graph, schedule: Schedule, overhead: Sequence[int]) -> list[int]:
    """Bytes at each run, counted forwards with a set of what is in memory: no liveness tables.

    A value leaves the set once no later run reads it before it is made or fetched anew.
    """
    steps = [graph.ops[index] for index in schedule.steps]
    num_forward = len(schedule.forward)
    reads = [{s.index for s in op.reads} for op in steps]
    writes = [{s.index for s in op.writes} for op in steps]
    counted = {s.index for s in graph.storages if not s.is_static and not s.is_tangent}
    results = {s.index for s in graph.storages if s.is_result}
    sent = {(m.storage, m.sent) for m in schedule.moves}
    fetch = {(m.storage, m.fetch) for m in schedule.moves}
    size = [s.num_bytes for s in graph.storages]

    def is_wanted(storage: int, after: int) -> bool:
        if storage in results:
            return True
        for position in range(after + 1, len(steps) + 1):
            if (storage, position) in sent:
                return True
            if (storage, position) in fetch or position == len(steps):
                return False
            if storage in reads[position]:
                return True
            if storage in writes[position]:
                return False
        return False

    live: set[int] = set()
    found = []
    for position, op in enumerate(steps):
        live -= {storage for storage in live if (storage, position) in sent}
        live |= {storage for storage, gap in fetch if gap == position}
        before = sum(size[s] for s in live)
        live |= writes[position] & counted
        ends = {s for s in live if not is_wanted(s, position)}
        taken = 0
        if position in schedule.in_place:
            taken = op.writes[0].num_bytes
        tangents = sum(s.num_bytes for s in graph.storages if s.is_tangent)
        beside = tangents if position >= num_forward else 0
        total = sum(size[s] for s in live) - taken + overhead[position]
        has_come = any(gap == position for _, gap in fetch)
        found.append(beside + (max(total, before) if has_come else total))
        live -= ends
    return found
