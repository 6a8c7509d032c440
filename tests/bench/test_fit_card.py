"""The page of a fit for a large model, from a model of one layer."""

from pathlib import Path

import pytest

from bench import fit_card


@pytest.mark.slow
def test_a_page_has_the_seconds_the_table_and_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "fit.png"
    code = fit_card.main(["--layers", "1", "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert code == 0
    assert picture.stat().st_size > 0
    assert "largest batch:" in printed
    assert "![Memory by part and samples a second at each batch](fit.png)" in printed


def test_a_command_that_takes_too_long_is_a_miss() -> None:
    assert any("**miss**" in line for line in fit_card.page(90.1, "", "fit.png", ""))
    assert not any("**miss**" in line for line in fit_card.page(89.9, "", "fit.png", ""))
