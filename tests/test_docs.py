from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench import walkthrough

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def printed() -> list[walkthrough.Section]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            return list(walkthrough.sections())
    finally:
        torch.set_num_threads(threads)


def in_document() -> dict[str, str]:
    return walkthrough.marked_blocks(walkthrough.DOCUMENT.read_text())


def words(line: str) -> str:
    """A line without what may differ from run to run: its numbers."""
    return re.sub(r"[\d.,]+", "#", line).strip()


def test_every_marked_block_is_printed_by_the_script(printed: list[walkthrough.Section]) -> None:
    assert list(in_document()) == [section.name for section in printed]


def test_marked_blocks_are_what_the_script_prints(printed: list[walkthrough.Section]) -> None:
    blocks = in_document()
    for section in printed:
        if section.is_exact:
            assert blocks[section.name] == section.block, (
                f"{section.name}: run python -m bench.walkthrough --write"
            )
        else:
            known, now = blocks[section.name].splitlines(), section.block.splitlines()
            assert [words(line) for line in known[:3]] == [words(line) for line in now[:3]], (
                section.name
            )
            assert known[-2:] == now[-2:]


def test_walkthrough_keeps_its_promises(printed: list[walkthrough.Section]) -> None:
    for text in (in_document()["run"], printed[-1].text):
        sizes = {
            name: int(size.replace(",", ""))
            for name, size in re.findall(r"^(.*?) {2,}([\d,]+) bytes$", text, re.MULTILINE)
        }
        assert sizes["measured peak"] <= sizes["budget"]
        assert sizes["predicted peak"] == pytest.approx(sizes["measured peak"], rel=0.02)
        assert (
            "loss equal to eager's: True; gradients bitwise equal: 14 of 14; generator state equal: True"
            in text
        )


def test_live_storages_add_up_to_the_peak(printed: list[walkthrough.Section]) -> None:
    text = next(section.text for section in printed if section.name == "simulation")
    (peak,) = re.findall(r"predicted peak +([\d,]+) bytes", text)
    live = re.findall(r"^ +(-?[\d,]+) bytes  ", text, flags=re.MULTILINE)
    assert sum(int(size.replace(",", "")) for size in live) == int(peak.replace(",", ""))


def test_writing_replaces_the_blocks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated:one -->\nold\n<!-- /generated -->\nafter\n")
    section = walkthrough.Section(name="one", language="text", text="new", is_exact=True)
    walkthrough.write([section], page)
    assert page.read_text() == f"before\n{section.block}\nafter\n"
    with pytest.raises(ValueError, match="two"):
        walkthrough.write(
            [section, walkthrough.Section(name="two", language="text", text="", is_exact=True)],
            page,
        )


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set:UserWarning"
)  # of the trainer, where there is no GPU
@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_readme_snippet_runs(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for what a snippet saves
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_layer=2,
        n_head=2,
        n_embd=32,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    names = {"model": model, "batch": batch, "batches": [batch, batch], "torch": torch}
    exec(compile(SNIPPETS[index], f"README.md, python block {index}", "exec"), names)


def test_readme_has_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("folder", ["rockmate", "rotor", "checkmate"])
def test_architecture_names_every_file(folder: str) -> None:
    text = walkthrough.DOCUMENT.read_text()
    files = [path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    missing = [
        name for name in files if f"`{name}`" not in text and f"`{folder}/{name}`" not in text
    ]
    assert not missing
