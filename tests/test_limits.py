"""Limits on size: files, functions and the number of files at the top, as CONTRIBUTING has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import lines

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_TOP_FILES = 15
SOURCES = sorted(
    path
    for name in ("rockmate", "rotor", "checkmate", "bench")
    for path in (ROOT / name).rglob("*.py")
)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """From the first decorator to the last line, the docstring included."""
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return (function.end_lineno or first) - first + 1


def faults_of(path: Path) -> Iterator[str]:
    """What in a file is too long."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    if (length := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"{name}: {length} lines, {MAX_FILE_LINES} are the limit"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (length := num_lines(node)) > MAX_FUNCTION_LINES:
            yield f"{name}: {node.name} has {length} lines, {MAX_FUNCTION_LINES} are the limit"


def test_files_and_functions_are_short() -> None:
    faults = [fault for path in SOURCES for fault in faults_of(path)]
    assert not faults, "\n".join(faults)


def test_few_files_stand_directly_in_the_package() -> None:
    assert len(list((ROOT / "rockmate").glob("*.py"))) <= MAX_TOP_FILES


def test_lines_above_their_budget_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "ROOT", tmp_path)
    (tmp_path / "part" / "inner").mkdir(parents=True)
    (tmp_path / "part" / "one.py").write_text("a\nb\n")
    (tmp_path / "part" / "inner" / "two.py").write_text("c\n")
    for most, status in ((3, 0), (2, 1)):
        budget = f'[tool.rockmate.lines]\npart = [["part"], {most}]\n'
        (tmp_path / "pyproject.toml").write_text(budget)
        assert lines.main() == status
