"""The packages import one way: each one only what stands before it in `ORDER`."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = (
    "errors",
    "extras",
    "_util",
    "budget",
    "_torch",
    "state",
    "ops",
    "capture",
    "graph",
    "costs",
    "fusion",
    "schedule",
    "offload",
    "bound",
    "plan",
    "runtime",
    "memory_limit",
    "planning",
    "trial",
    "frames",
    "entry",
    "dynamo",
    "curves",
    "checks",
    "hf",
    "adoption",
    "cli",
)
SOLVERS = ("highspy", "rotor", "checkmate")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name, package files (`__init__`) under the
    package's."""
    found = {}
    for path in sorted((ROOT / "rockmate").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file, wherever they stand."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a file imports.

    A name of a module counts as the module.
    """
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def stage(module: str) -> int:
    return ORDER.index(module.split(".")[1])


def internal(module: str) -> list[str]:
    return [name for name in imports_of(MODULES[module]) if name.split(".")[0] == "rockmate"]


INNER = [name for name in MODULES if name not in ("rockmate", "rockmate.__main__")]


def above(module: str) -> list[str]:
    """What a module imports that stands above it; the package itself stands above all."""
    names = internal(module)
    return [name for name in names if name == "rockmate" or stage(name) > stage(module)]


def test_a_module_imports_only_what_stands_below_it() -> None:
    faults = [f"{module} imports {names}" for module in INNER if (names := above(module))]
    assert not faults, "\n".join(faults)


def test_no_module_is_reached_from_itself() -> None:
    graph = {name: set(internal(name)) & set(INNER) for name in INNER}
    TopologicalSorter(graph).prepare()


def test_every_module_has_a_stage() -> None:
    assert {name.split(".")[1] for name in INNER} == set(ORDER)


def reached_from(module: str) -> set[str]:
    """The modules that importing one loads."""
    seen, waiting = {module}, [module]
    while waiting:
        for name in internal(waiting.pop()):
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return seen - {"rockmate"}


def names_of(path: Path) -> set[str]:
    """What a file imports, each name with its module."""
    found = set()
    for node in import_statements(path):
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found |= {f"{prefix}{alias.name}" for alias in node.names}
    return found


def test_a_plan_knows_no_modules() -> None:
    for module in (name for name in INNER if name.startswith("rockmate.plan.")):
        nn = {name for name in names_of(MODULES[module]) if name.startswith("torch.nn")}
        assert not nn, f"{module} imports {nn}"


def test_what_runs_a_plan_reaches_no_search_and_no_solver() -> None:
    runtime = [name for name in INNER if name.startswith("rockmate.runtime.")]
    reached = set().union(*(reached_from(name) for name in (*runtime, "rockmate.plan.plan")))
    assert not {name for name in reached if name.startswith("rockmate.planning")}
    for module in reached:
        tops = {name.split(".")[0] for name in imports_of(MODULES[module])}
        assert not tops & set(SOLVERS), f"{module}, which runs plans, imports {tops}"
