"""Mistyped, swapped and other wrong arguments are told at once, also without a sample."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from rockmate import Planner, RockmateError, RockmateModule

PACKAGE = Path(rockmate.__file__).parent
X = torch.zeros(4, 8)
# What they raise is caught or converted by the package itself.
INTERNAL = {
    "__init__.py",  # AttributeError of a module
    "_torch/fsdp.py",  # NotImplementedError, which becomes a refusal
    "_torch/version.py",  # ImportError of a module
    "capture/opaque_ops.py",
    "capture/write_log.py",  # KeyError of a defaultdict
    "graph/chunking/chunks.py",
    "offload/disk_tier.py",
    "plan/residency.py",
    "plan/serialize.py",
    "schedule/move.py",
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda m: RockmateModule(m, X, 1.0, outptus="loss"), "'outptus'. Did you mean outputs?"),
        (lambda m: RockmateModule(m, budget=1.0, outptus="loss"), "Did you mean outputs?"),
        (lambda m: RockmateModule(m, 0.7), "RockmateModule(model, budget=0.7)"),
        (lambda m: RockmateModule(m, "6GiB"), "RockmateModule(model, budget='6GiB')"),
        (lambda m: RockmateModule(m, 0.7, X), "Write RockmateModule(model, sample, 0.7)"),
        (lambda m: RockmateModule(X, m, 0.7), "Write RockmateModule(model, sample, ...)"),  # pyright: ignore
        (lambda _: RockmateModule(torch.relu, X, 0.7), "rockmate.plan_step(function"),  # pyright: ignore
        (lambda _: Planner(torch.relu, X), "rockmate.plan_step(function"),  # pyright: ignore
        (lambda _: RockmateModule(nn.ReLU, X, 0.7), "ReLU(...)"),  # pyright: ignore
        (lambda m: RockmateModule(m.forward, X, 0.7), "for a method give its module"),
        (lambda m: RockmateModule(m.append, X, 0.7), 'methods=["append"]'),
        (lambda _: RockmateModule(3, X, 0.7), "give one"),  # pyright: ignore
        (lambda m: Planner(m, X, 0.7), "Planner(model, sample).plan(budget)"),  # pyright: ignore
        (lambda m: rockmate.wrap_trainer(m, 0.7), "RockmateModule(model, budget=0.7)"),
        (lambda m: RockmateModule(m, budget=0.7, strategy="rockmat"), "choose 'none'"),
        (lambda m: RockmateModule(m, budget=0.7, replan="no"), "give True or False"),  # pyright: ignore
        (lambda m: RockmateModule(m, budget=0.7, machine="h1000"), "Known are a100"),
        (lambda m: RockmateModule(m, budget=0.7, offload="hots"), '"host"'),
        (lambda m: RockmateModule(m, budget=0.7, marks={"0": "sav"}), "'save', 'recompute'"),
        (lambda m: RockmateModule(m, budget=0.7, untraced=["rooter"]), "no submodule"),
        (lambda m: RockmateModule(m, X, budegt=0.7), "Did you mean budget?"),
        (lambda m: Planner(m, X, budget=0.7), "Planner(model, sample).plan(budget)"),
        (lambda m: rockmate.sweep(m, X, budgest=[0.7]), "Did you mean budgets?"),
        (lambda m: rockmate.sweep(m, X, mesure=True), "Did you mean measure?"),
        (lambda m: rockmate.sweep(m, X, budgets=0.7), "budgets 0.7 are no list; for one, write"),  # pyright: ignore
        (lambda m: Planner(m, X).plans(0.7), "for one, write [0.7]"),  # pyright: ignore
        (lambda m: Planner(m, X).module_of(0.7), "a Plan is needed"),  # pyright: ignore
        (lambda m: rockmate.fit(X, m, "8GiB"), "no nn.Module"),  # pyright: ignore
        (lambda m: rockmate.fit(m, "8GiB", X), "memory tensor("),  # pyright: ignore
        (lambda m: rockmate.fit(m, X, "8GiB", size=[4]), "Did you mean sizes?"),
        (lambda _: rockmate.simulated_ranks("2").__enter__(), "give 1 or more"),  # pyright: ignore
    ],
)
def test_what_was_meant_is_told(call: Callable[[Any], Any], expected: str) -> None:
    with pytest.raises(RockmateError, match=re.escape(expected)):
        call(model())


@pytest.mark.parametrize("num_bytes", [2, 70])
def test_a_few_bytes_are_told_from_gibibytes_and_percents(num_bytes: int) -> None:
    with pytest.raises(RockmateError, match=f'"{num_bytes}GiB".* {num_bytes / 100} for'):
        RockmateModule(model(), X, num_bytes)


def test_every_error_is_a_rockmate_error() -> None:
    """No builtin exception is raised where users meet it, and each class of ours has the base."""
    faults = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            raised = node.exc if isinstance(node, ast.Raise) else None
            function = raised.func if isinstance(raised, ast.Call) else None
            called = function.id if isinstance(function, ast.Name) else "AssertionError"
            # `AssertionError` is for what only this package can break.
            if called != "AssertionError" and hasattr(builtins, called) and name not in INTERNAL:
                faults.append(f"{name}:{node.lineno}")
    assert not faults, "\n".join(faults)
    errors = [getattr(rockmate, name) for name in rockmate.__all__ if name.endswith("Error")]
    assert len(errors) > 20
    assert all(issubclass(error, RockmateError) for error in errors)
