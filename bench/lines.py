"""Lines of the product, of tests and of bench/, against their budget: part of `make lint`.

The budget stands in pyproject.toml, `[tool.rockmate.lines]`. Raising a figure takes a decision
record that says what the lines buy.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Prints each part; 1 if one is above its budget."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    is_above = False
    for part, (folders, most) in tools["rockmate"]["lines"].items():
        number = sum(map(_lines_in, (ROOT / each for each in folders)))
        is_above |= number > most
        sys.stdout.write(f"{part}: {number:,} lines, at most {most:,}\n")
    return int(is_above)


def _lines_in(folder: Path) -> int:
    return sum(len(each.read_text(encoding="utf-8").splitlines()) for each in folder.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
