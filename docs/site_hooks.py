"""Puts pages from the root of the repository into the site, and keeps every page's links right.

A page links to other files by paths that are right in the repository, so that links also work
where the repository is browsed. In the site, the content of docs/ stands at the root, README.md is
the front page, and the files of `ADDED` stand at their own paths. MkDocs calls the two hooks.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FRONT_PAGE = "README.md"
ADDED = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "CITATION.cff",
    "LICENSE",
    "examples/README.md",
    "bench/results/**/*",
)
_LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.DOTALL | re.MULTILINE)


def in_site(path: str) -> str:
    """A path of the repository as a path of the site."""
    return "index.md" if path == FRONT_PAGE else path.removeprefix("docs/")


def in_repository(path: str, added: set[str]) -> str:
    """A path of the site as a path of the repository."""
    if path == "index.md":
        return FRONT_PAGE
    return path if path in added else f"docs/{path}"


def added_paths() -> list[str]:
    """Files outside docs/ that the site has too."""
    found = [path for pattern in ADDED for path in ROOT.glob(pattern) if path.is_file()]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def on_files(files: Files, config: Any) -> Files:
    """Adds the files of `ADDED`."""
    for path in added_paths():
        page = File.generated(config, in_site(path), abs_src_path=str(ROOT / path))
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links outside code from paths of the repository to paths of the site."""
    place = page.file.src_uri
    if place == "index.md":
        page.meta["hide"] = ["navigation"]
    folder = posixpath.dirname(in_repository(place, set(added_paths())))

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        path = posixpath.relpath(in_site(target), posixpath.dirname(place) or ".")
        return f"{match[1]}{path}{match[3]}"

    parts = _CODE.split(markdown)
    return "".join(part if _CODE.fullmatch(part) else _LINK.sub(moved, part) for part in parts)
