"""The benchmark of QLoRA on its smallest model."""

import pytest

from bench import qlora


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes and transformers
def test_a_page_has_a_row_for_each_budget(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    qlora.main(["--layers", "2", "--width", "64", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert printed.count("| equal |") == len(qlora.SHARES)
    assert "| time over eager's at half of the peak | <= 1.08 |" in printed
