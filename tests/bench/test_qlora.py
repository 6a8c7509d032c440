"""The benchmark of QLoRA on its smallest model."""

import pytest

from bench import qlora


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of bitsandbytes and transformers
def test_a_page_has_a_row_for_each_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(qlora, "SHARES", (1.0, 0.5))  # the logits of a small model are most of it
    qlora.main(["--layers", "2", "--width", "128", "--rounds", "1"])
    printed = capsys.readouterr().out
    assert printed.count("| equal |") == len(qlora.SHARES)
    assert "| time over eager's at half of the peak | <= 1.08 |" in printed
