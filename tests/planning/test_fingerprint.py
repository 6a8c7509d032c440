"""Plans of three tiny models equal the committed ones, and the comparison finds a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pins import has_pinned_versions

from bench import fingerprint

COMMITTED = Path(fingerprint.__file__).parent / "results" / "fingerprint_tiny.jsonl"


@pytest.mark.skipif(not has_pinned_versions(), reason="plans are those of the pinned versions")
@pytest.mark.parametrize("name", ["mlp", "vit-base", "hrnet"])
def test_plans_equal_the_committed_ones(name: str) -> None:
    expected = [json.loads(line) for line in COMMITTED.read_text().splitlines()]
    found = list(fingerprint.fingerprint(name, is_tiny=True))
    assert fingerprint.differences(found, [r for r in expected if r["model"] == name]) == []


def test_every_model_is_committed() -> None:
    models = {json.loads(line)["model"] for line in COMMITTED.read_text().splitlines()}
    assert models == set(fingerprint.MODELS)


def test_the_command_writes_compares_and_tells_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plans.jsonl"
    assert fingerprint.main(["--tiny", "--model", "mlp", "--output", str(path)]) == 0
    compare = ["--tiny", "--compare", str(path)]
    assert fingerprint.main(compare) == 0
    assert capsys.readouterr().out == "7 lines are equal\n"
    head, plan, *others = (json.loads(line) for line in path.read_text().splitlines())
    changed = [head, plan | {"peak_bytes": 1}, *others[1:]]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in changed))
    assert fingerprint.main(compare) == 1
    text = capsys.readouterr().out
    assert f"mlp at 0.9: peak_bytes is {plan['peak_bytes']}, expected 1" in text
    assert "mlp at 0.7: unexpected" in text


def test_a_time_may_differ_by_rounding_alone() -> None:
    record = {"kind": "plan", "model": "m", "budget": 0.5, "time_ms": 1.0}
    assert fingerprint.differences([record | {"time_ms": 1.0 + 1e-12}], [record]) == []
    assert fingerprint.differences([record | {"time_ms": 1.0 + 1e-6}], [record]) != []


def test_the_command_needs_something_to_write_or_compare(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        fingerprint.main(["--tiny"])
    assert "--output" in capsys.readouterr().err
