"""Every planted fault can be planted, and the page says what was found."""

from __future__ import annotations

import pytest

from bench.mutations import MUTATIONS, ROOT, Mutation, page, planted


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text(encoding="utf-8")
    mutated = planted(mutation, text)
    assert mutated != text
    compile(mutated, mutation.path, "exec")
    assert (ROOT / mutation.first).is_dir()


def test_a_fault_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(ValueError, match="has 0 times"):
        planted(next(iter(MUTATIONS.values())), "another text")


def test_the_page_counts_what_was_found() -> None:
    head = {"path": "a.py", "command": "run", "commit": "0123abc"}
    results = [
        head | {"model": "one", "found_by": "tests/a.py::test_b", "seconds": 3.0},
        head | {"model": "other", "found_by": "", "seconds": 400.0},
    ]
    text = "\n".join(page(results))
    assert "find 1 of 2" in text
    assert "| not found | 400 |" in text
