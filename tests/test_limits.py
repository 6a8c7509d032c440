"""Limits on size: files, functions and the number of files at the top, as CONTRIBUTING has them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert not {each.name for each in functions if num_lines(each) > MAX_FUNCTION_LINES}


def test_few_files_stand_directly_in_the_package() -> None:
    assert len(list((ROOT / "rockmate").glob("*.py"))) <= MAX_TOP_FILES
