"""Dotted names of this repository in comments, docstrings and documents exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rockmate", "rotor", "checkmate", "bench")
TEXTS = sorted(
    path
    for pattern in (*(f"{name}/**/*.py" for name in PACKAGES), "docs/**/*.md", "*.md")
    for path in ROOT.glob(pattern)
)
NAME = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")


def exists(name: str) -> bool:
    """Whether a dotted name is a package, a module, or a word of the module that it names."""
    place, parts = ROOT, name.split(".")
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if not parts:
        return True
    module = place / f"{parts[0]}.py"
    if module.is_file():
        parts.pop(0)
    else:
        module = place / "__init__.py"
    source = module.read_text(encoding="utf-8")
    return all(re.search(rf"\b{part}\b", source) for part in parts[:1])


def test_dotted_names_exist() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in sorted(set(NAME.findall(path.read_text(encoding="utf-8"))))
        if not exists(name)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("rockmate.graph", True),
        ("rockmate.graph.blocks", True),
        ("rockmate.graph.blocks.partition", True),
        ("rockmate.Planner", True),
        ("rockmate.blocks", False),
        ("rockmate.graph.blocks.divide", False),
    ],
)
def test_names_are_looked_up_in_the_tree(name: str, is_there: bool) -> None:
    assert exists(name) == is_there
