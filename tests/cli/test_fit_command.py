"""The command `rockmate fit`."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from rockmate.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT


@pytest.fixture
def config(tmp_path: Path) -> str:
    content = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def content_of(config: str, tmp_path: Path, *arguments: str) -> dict:
    path = tmp_path / "fit.json"
    common = ["--machine", "h100", "--reserve", "1MiB", "--numerics", "bitwise", "--quiet"]
    assert main(["fit", config, *common, "--tokens", "32", "--json", str(path), *arguments]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_full_lora_and_frozen(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = content_of(config, tmp_path, "--memory", "16MiB", "--plot", str(tmp_path / "fit.png"))
    printed = capsys.readouterr().out
    assert re.search(r"^largest batch: \d+, ", printed, re.MULTILINE)
    assert "16.0 MiB, adamw, times estimated for h100" in printed
    assert "all parameters trained" in printed
    assert (tmp_path / "fit.png").read_bytes()[:4] == b"\x89PNG"
    lora = content_of(config, tmp_path, "--memory", "16MiB", "--lora", "--lora-rank", "4")
    frozen = content_of(config, tmp_path, "--memory", "16MiB", "--frozen", "model.*")
    assert "LoRA of rank 4" in lora["title"]
    rows = [each["rows"][-1] for each in (full, frozen, lora)]
    assert [row["is_largest"] for row in rows] == [True] * 3
    sizes = [row["batch_size"] for row in rows]
    assert sizes[0] < sizes[1] < sizes[2] or sizes[0] < sizes[2] < sizes[1]
    gradients = [row["gradient_bytes"] for row in rows]
    assert gradients[0] > gradients[1] == 64 * 256 * 4
    assert 0 < gradients[2] < gradients[0] / 2
    assert all(row["total_bytes"] <= 16 << 20 for row in rows)


def test_a_margin_is_left_and_said(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["fit", config, "--memory", "4GiB", "--machine", "h100", "--most", "4", "--quiet"]
    assert main([*common, "--json", str(tmp_path / "fit.json")]) == 0
    printed = capsys.readouterr().out
    assert "4.0 GiB with a margin of 204.8 MiB for the allocator, adamw, times" in printed
    content = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    margin_bytes = (4 << 30) // 20
    assert content["margin_bytes"] == margin_bytes
    assert content["rows"][0]["device_bytes"] == (1 << 30) + margin_bytes
    assert main([*common, "--reserve", "1GiB"]) == 0
    assert "margin of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "adapted",
    [[], ["--lora", "--lora-rank", "4"], ["--frozen", "model.*"]],
    ids=["whole", "lora", "frozen"],
)
def test_the_script_that_is_written_trains(
    adapted: list[str],
    config: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    common = ["fit", config, "--memory", "64GiB", "--tokens", "32", "--sizes", "8", "--most", "8"]
    assert main([*common, "--quiet", *adapted]) == 0
    next_line = capsys.readouterr().out.splitlines()[-1]
    assert next_line.startswith(f"next: rockmate fit {config} --memory 64GiB")
    assert next_line.endswith(" --write train.py")
    assert main(shlex.split(next_line)[2:]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: python train.py"
    names = runpy.run_path("train.py")
    assert "activation budget" in capsys.readouterr().out
    trainer, model = names["trainer"], names["model"]
    assert trainer.state.global_step == 4
    assert trainer.args.per_device_train_batch_size == 8
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    expected = {"--lora": "lora_", "--frozen": "lm_head"}.get((adapted or [""])[0], "")
    assert trained
    assert all(expected in name for name in trained)


def test_a_script_is_for_language_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    content = {"model_type": "vit", **sizes, "intermediate_size": 48, "image_size": 32}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert main(["fit", str(path), "--memory", "1GiB", "--write", str(tmp_path / "x.py")]) == 2
    assert "this one takes {'pixel_values'" in capsys.readouterr().err
    assert not (tmp_path / "x.py").exists()


def test_the_longest_sequence(config: str, tmp_path: Path) -> None:
    found = content_of(config, tmp_path, "--memory", "1GiB", "--longest", "--batch", "3")
    assert found["axis"] == "tokens"
    assert found["is_capped"]
    assert found["rows"][-1]["num_tokens"] == 64
    assert found["rows"][-1]["batch_size"] == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--memory", "lots"], "memory 'lots' cannot be read"),
        (["--memory", "0"], "memory '0' cannot be read"),
        (["--memory", "1MiB"], "are taken before the first activation"),
        (["--memory", "1GiB", "--optimizer", "magic"], "'magic' has no rule"),
        (["--memory", "1GiB", "--machine", "magic"], "'magic' is not known"),
        (["--memory", "1GiB", "--lora", "--frozen", "model"], "Leave out --frozen, or --lora"),
        (["--memory", "1GiB", "--lora-targets", "q_proj"], "--lora-targets is for --lora"),
        (["--memory", "1GiB", "--machine", "h100", "--frozen", "modle"], "fits no parameter"),
        (["--memory", "1GiB", "--machine", "h100", "--frozen", "*"], "leaves nothing to train"),
        (
            ["--memory", "1GiB", "--machine", "h100", "--lora", "--lora-targets", "nothing"],
            "PEFT cannot adapt LlamaForCausalLM",
        ),
        (
            ["--memory", "1GiB", "--write", "x.py", "--optimizer", "rmsprop"],
            "--write writes scripts",
        ),
        (["--memory", "1GiB", "--measure", "--machine", "h100"], "not measured from here"),
    ],
)
def test_refusals(
    config: str, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", config, "--quiet", *arguments]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("rockmate fit: error: ")
    assert text in said


TWO_AXES = """
import torch
from torch import nn


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, queries, keys):
        rows = torch.tanh(self.layer(queries)).transpose(0, 1)
        return (rows @ keys.exp()).square().mean()


def net():
    return Scores(), {"queries": torch.randn(5, 4, 16), "keys": torch.randn(4, 16, 3)}
"""


def test_a_batch_axis_that_has_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"axes_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(TWO_AXES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = ["fit", f"{name}:net", "--memory", "1MiB", "--reserve", "1KiB", "--machine"]
    command += ["cpu-avx2", "--quiet"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "sizes [4, 5] differ" in said
    assert "--batch-axis pixel_values=0,labels=0" in said
    assert main([*command, "--batch-axis", "queries=1,keys=0", "--json", "fit.json"]) == 0
    rows = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert row["input_bytes"] == row["batch_size"] * (5 * 16 + 16 * 3) * 4
    assert main([*command, "--batch-axis", "query=1"]) == 2
    assert "Its inputs are 'keys', 'queries'" in capsys.readouterr().err
