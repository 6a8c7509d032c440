from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dynamo_networks
import pytest
import torch

import rockmate
from bench import walkthrough

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted([README, ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")])
ARCHITECTURE = DOCS / "internals" / "architecture.md"


@dataclass(frozen=True)
class Snippet:
    """One block of Python in a page that users read."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets(pages: Iterable[Path]) -> Iterator[Snippet]:
    """The blocks of some pages, each with the line that it begins at."""
    for page in pages:
        text = page.read_text()
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            yield Snippet(page, text.count("\n", 0, found.start(1)) + 1, found[1])


SNIPPETS = list(snippets(sorted((DOCS / "guide").glob("*.md"))))
REFERENCE = sorted(page for page in (DOCS / "reference").glob("*.md") if any(snippets([page])))
# Links that leave the repository. Tests need no network: each is looked at when it is added.
OUTER_LINKS = {"https://semver.org"}


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
        assert "loss equal to eager's: True; gradients bitwise equal: 14 of 14" in text
        assert "generator state equal: True" in text


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


def causal_model() -> Any:
    """The `model` of the pages: a tiny GPT-2."""
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
    model = transformers.GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


# The trainer warns of pinned memory where there is no GPU.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_snippet_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for files that a snippet saves
    torch.manual_seed(0)
    tokens = torch.randint(64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    dynamo_networks.register()
    run(snippet, {"model": causal_model(), "batch": batch, "torch": torch})


def run(snippet: Snippet, names: dict[str, Any]) -> None:
    lines = "\n" * (snippet.line - 1)  # a traceback then names the page's own line
    names.setdefault("__name__", "snippet")  # classes of no module are taken for Python's own
    exec(compile(lines + snippet.code, str(snippet.page), "exec"), names)


def test_a_further_grid_of_images_takes_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    """As vision_language.md says. Its own batches are the sample and three other grids."""
    names: dict[str, Any] = {}
    run(next(each for each in SNIPPETS if each.page.stem == "vision_language"), names)
    with caplog.at_level("INFO", "rockmate"):
        for grids in [(12, 16), (8, 12)], [(4, 4), (16, 8)], [(16, 8), (4, 12)]:
            names["module"](**names["batch"](*grids))
    assert not [text for text in caplog.messages if text.startswith(("captured", "planned"))]


EXTRAS = ("transformers", "accelerate", "peft", "matplotlib")


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
def test_readme_runs_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks, in order, in one empty namespace; the first with no extra installed."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, *others = snippets([README])
    with monkeypatch.context() as without:
        for name in EXTRAS:
            without.setitem(sys.modules, name, None)
        run(first, names)
    printed = capsys.readouterr().out
    assert "predicted peak" in printed
    assert float(printed.split()[1]) < 0.5, "it has learned"
    assert len(others) >= 2
    for snippet in others:
        run(snippet, names)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_examples_of_the_reference_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dynamo_networks.register()
    names: dict[str, Any] = {}
    for snippet in snippets([page]):
        run(snippet, names)
        printed = capsys.readouterr().out
        if page.stem == "errors" and "try:\n" in snippet.code:
            assert printed, f"{snippet}: no error came"


def test_every_public_name_has_an_example() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE)
    entries = re.split(r"^::: rockmate\.(\w+)$", text, flags=re.MULTILINE)[1:]
    examples = dict(zip(entries[::2], entries[1::2], strict=True))
    missing = [
        name
        for name in rockmate.__all__
        if not re.search(rf"```python\n[^`]*\b{name}\b", examples.get(name, ""))
    ]
    assert not missing


def test_tutorial_runs_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = DOCS / "tutorial.ipynb"
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for cell in json.loads(page.read_text())["cells"]:
            if cell["cell_type"] == "code":
                run(Snippet(page, 1, "".join(cell["source"])), names)
    finally:
        torch.set_num_threads(threads)
    assert names["accuracy"] > 0.95
    assert "lower bound" in capsys.readouterr().out


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 15
    assert len(REFERENCE) >= 11


def test_readme_is_a_landing_page() -> None:
    assert len(README.read_text().splitlines()) < 200


def test_links_lead_somewhere() -> None:
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not missing, "\n".join(missing)


def in_site() -> set[Path]:
    """Files of the built site, by their places in the repository."""
    hooks = (DOCS / "site_hooks.py").read_text()
    (added,) = re.findall(r"^ADDED = (\(.*?^\))", hooks, flags=re.DOTALL | re.MULTILINE)
    found = (path for pattern in ast.literal_eval(added) for path in ROOT.glob(pattern))
    return {path for path in (*found, *DOCS.rglob("*")) if path.is_file()}


def test_links_of_the_site_lead_to_what_is_in_it() -> None:
    """To other pages and files of the site, to headings that exist, or to known outer places."""
    files = in_site()
    dead = []
    for page in sorted(path for path in files if path.suffix == ".md"):
        code, flags = r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(code, "", page.read_text(), flags=flags)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if link.startswith("http"):
                is_dead = link not in OUTER_LINKS
            else:
                has_headings = anchor and target.suffix == ".md" and target in files
                is_dead = target not in files or (has_headings and anchor not in anchors(target))
            if is_dead:
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert not dead, "\n".join(dead)


def anchors(page: Path) -> set[str]:
    """Those of headings, as the site and code hosts make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)", "", heading) for heading in headings)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", each.lower().strip())) for each in plain}


def test_search_finds_what_users_ask_for() -> None:
    """The site's search looks for words of pages."""
    text = "\n".join(page.read_text() for page in (DOCS / "guide").glob("*.md"))
    words = ("FSDP2", "gradient_checkpointing", "every_n_layers", "activation_memory_budget")
    assert not [word for word in (*words, "DeepSpeed", "Unsloth", "ZeRO") if word not in text]


def test_named_files_exist() -> None:
    folders = ("rockmate", "rotor", "checkmate", "bench", "tests", "examples")
    known = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        named = sorted(set(re.findall(r"`([\w/]+\.py)`", text)))
        missing += [
            f"{page.relative_to(ROOT)}: {name}"
            for name in named
            if not any(path.endswith(f"/{name}") for path in known)
        ]
    assert not missing, "\n".join(missing)


def test_architecture_has_a_paragraph_for_every_package() -> None:
    text = ARCHITECTURE.read_text()
    packages = [path.parent.name for path in (ROOT / "rockmate").glob("*/__init__.py")]
    modules = [path.name for path in (ROOT / "rockmate").glob("[!_]*.py")]
    named = [f"**`{name}`**" for name in (*packages, "rotor", "checkmate")]
    missing = [name for name in (*named, *(f"`{name}`" for name in modules)) if name not in text]
    assert not missing


def test_reference_has_every_public_name() -> None:
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    entries = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    assert sorted(entry.rpartition(".")[2] for entry in entries) == sorted(rockmate.__all__)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert not [page for page in pages if page not in text]
