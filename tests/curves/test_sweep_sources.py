"""What a person may write on the command line for budgets and for a model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

from rockmate import InvalidBudgetError
from rockmate.budget import budgets_in_bytes, parse_budgets
from rockmate.cli.main import main
from rockmate.hf.model_source import load_model
from rockmate.hf.source_check import ModelSourceError
from rockmate.hf.synthetic_sample import SampleShape

# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.2:1.0:5", [0.2, 0.4, 0.6, 0.8, 1.0]),
        ("0.2:1:5", [0.2, 0.4, 0.6, 0.8, 1.0]),
        ("1:0.5:2", [1.0, 0.5]),
        ("1KiB:3KiB:3", [1024, 2048, 3072]),
        ("1000:4000:4", [1000, 2000, 3000, 4000]),
        ("2GiB, 4GiB", ["2GiB", "4GiB"]),
        ("0.25,800MB,4096", [0.25, "800MB", 4096]),
        ("0.4", [0.4]),
    ],
)
def test_budgets_as_text(text: str, expected: list[Any]) -> None:
    found = parse_budgets(text)
    are_shares = all(isinstance(value, float) for value in expected)
    assert found == (pytest.approx(expected) if are_shares else expected)
    assert [type(value) for value in found] == [type(value) for value in expected]


def test_budgets_in_bytes_ascend_and_stand_once() -> None:
    assert budgets_in_bytes([1.0, 0.5, "500B", 700, "1kB"], 1000) == [500, 700, 1000]


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", ",", "0.5,", "0.2:0.4", "0.2:0.4:1", "0.2:0.4:2000", "0.2:0.4:x", "0.2:1GiB:3"),
        *("::", "1.5", "0", "-1", "nan", "inf", "4XB"),
    ],
)
def test_budgets_that_cannot_be_read(text: str) -> None:
    with pytest.raises(InvalidBudgetError):
        parse_budgets(text)


# --- functions ------------------------------------------------------------------------------------


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory."""
    name = f"functions_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "def good():\n    return torch.nn.Linear(2, 3), torch.ones(4, 2)\n"
        "def needs(argument):\n    return argument\n"
        "def fails():\n    raise RuntimeError('on purpose')\n"
        "def model_only():\n    return torch.nn.Linear(2, 3)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_function_of_a_module_that_is_here(functions: str) -> None:
    source = load_model(f"{functions}:good")
    assert isinstance(source.model, torch.nn.Linear)
    assert source.sample_input.shape == (4, 2)
    assert "9 parameters" in source.title


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("needs", "called without arguments"),
        ("fails", r"RuntimeError: on purpose \(.*\.py, line 7\)"),
        ("model_only", "returned a Linear"),
        ("number", "has no function 'number'. It has fails, good"),
        ("", "names no function"),
    ],
)
def test_functions_that_do_not_serve(functions: str, name: str, text: str) -> None:
    with pytest.raises(ModelSourceError, match=text):
        load_model(f"{functions}:{name}")


def test_module_that_is_not_there(functions: str) -> None:
    with pytest.raises(ModelSourceError, match="no module 'nowhere'"):
        load_model("nowhere:good")
    with pytest.raises(ModelSourceError, match=f"{functions}:good$"):
        load_model(f"{functions}.py:good")
    with pytest.raises(ModelSourceError, match="which function"):
        load_model(f"{functions}.py")
    with pytest.raises(ModelSourceError, match="--batch"):
        load_model(f"{functions}:good", SampleShape(batch_size=3))


# --- configurations -------------------------------------------------------------------------------

_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "vocab_size": 97,
}  # fmt: skip
_BERT = {"model_type": "bert", **_SMALL, "max_position_embeddings": 24}
_LLAMA = {"model_type": "llama", **_SMALL, "num_key_value_heads": 2}
_GPT2 = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 97,
    "n_positions": 24, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_T5 = {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "vocab_size": 97}
_T5 |= {"num_layers": 1, "num_heads": 2}
_SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
_TWO_STACKS = {"d_model": 32, "vocab_size": 97} | {
    f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _SIZES.items()
}
_BART = {"model_type": "bart", **_TWO_STACKS, "max_position_embeddings": 24}
_VIT = {"model_type": "vit", **_SMALL, "image_size": 32, "patch_size": 8}
_WHISPER = {
    "model_type": "whisper", **_TWO_STACKS, "num_mel_bins": 8, "pad_token_id": 0,
    "max_source_positions": 20, "max_target_positions": 16, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
TEXT = {"input_ids": (2, 24), "labels": (2, 24)}


@pytest.mark.parametrize(
    ("configuration", "architecture", "shapes"),
    [
        (_GPT2, "GPT2LMHeadModel", TEXT),
        (_GPT2, None, TEXT),
        (_LLAMA, "LlamaForCausalLM", {"input_ids": (2, 256), "labels": (2, 256)}),
        (_LLAMA, "LlamaForSequenceClassification", {"input_ids": (2, 256), "labels": (2,)}),
        (_BERT, None, TEXT),
        (_BERT, "BertForMaskedLM", TEXT),
        (_BERT, "BertForPreTraining", TEXT | {"next_sentence_label": (2,)}),
        (_BERT, "BertForSequenceClassification", {"input_ids": (2, 24), "labels": (2,)}),
        (_BERT, "BertForTokenClassification", TEXT),
        (
            _BERT,
            "BertForQuestionAnswering",
            {"input_ids": (2, 24), "start_positions": (2,), "end_positions": (2,)},
        ),
        (_T5, "T5ForConditionalGeneration", {"input_ids": (2, 256), "labels": (2, 256)}),
        (_T5, None, {"input_ids": (2, 256), "labels": (2, 256)}),
        (_BART, "BartForConditionalGeneration", TEXT),
        (_BART, "BartForSequenceClassification", {"input_ids": (2, 24), "labels": (2,)}),
        (_VIT, None, {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
        (
            _WHISPER,
            "WhisperForConditionalGeneration",
            {"input_features": (2, 8, 40), "labels": (2, 16)},
        ),
    ],
)
def test_configurations_train_on_their_sample(
    configuration: dict[str, Any],
    architecture: str | None,
    shapes: dict[str, tuple[int, ...]],
    tmp_path: Path,
) -> None:
    source = load_model(str(write(tmp_path, configuration, architecture)))
    assert {name: tuple(value.shape) for name, value in source.sample_input.items()} == shapes
    assert source.model.training
    if architecture is not None:
        assert type(source.model).__name__ == architecture
    loss = source.model(**source.sample_input).loss
    loss.backward()
    assert loss.isfinite()
    gradients = (parameter.grad for parameter in source.model.parameters())
    assert any(each is not None and each.any() for each in gradients)


def write(folder: Path, configuration: dict[str, Any], architecture: str | None = None) -> Path:
    path = folder / "config.json"
    path.write_text(
        json.dumps(configuration | ({"architectures": [architecture]} if architecture else {}))
    )
    return path


def test_encoders_find_hidden_tokens(tmp_path: Path) -> None:
    source = load_model(str(write(tmp_path, _BERT)))
    assert isinstance(source.model, transformers.BertForMaskedLM)
    labels = source.sample_input["labels"]
    assert 0 < (labels != -100).sum() < labels.numel()


def test_folder_sizes_and_dtype(tmp_path: Path) -> None:
    write(tmp_path, _GPT2, "GPT2LMHeadModel")
    source = load_model(str(tmp_path), SampleShape(batch_size=3, num_tokens=7), dtype="bfloat16")
    assert source.sample_input["input_ids"].shape == (3, 7)
    assert {parameter.dtype for parameter in source.model.parameters()} == {torch.bfloat16}


def test_image_size_and_its_dtype(tmp_path: Path) -> None:
    configuration = {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    }
    path = write(tmp_path, configuration, "ResNetForImageClassification")
    source = load_model(str(path), SampleShape(batch_size=1, image_size=40), dtype="bfloat16")
    assert source.sample_input["pixel_values"].shape == (1, 3, 40, 40)
    assert source.sample_input["pixel_values"].dtype == torch.bfloat16


def test_meta_device_makes_no_weights(tmp_path: Path) -> None:
    source = load_model(str(write(tmp_path, _GPT2, "GPT2LMHeadModel")), device="meta")
    assert all(parameter.is_meta for parameter in source.model.parameters())
    assert all(value.is_meta for value in source.sample_input.values())


def test_loading_leaves_the_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    load_model(str(write(tmp_path, _GPT2, "GPT2LMHeadModel")))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("configuration", "architecture", "shape", "error", "text"),
    [
        (_GPT2, "NoSuchModel", {}, ModelSourceError, "NoSuchModel"),
        ({"model_type": "none_such"}, None, {}, ModelSourceError, "none_such"),
        (_GPT2 | {"n_embd": 33}, None, {}, ModelSourceError, "cannot be built"),
        (_GPT2, None, {"num_tokens": 25}, ModelSourceError, "24 or fewer"),
        (_GPT2, None, {"image_size": 8}, ModelSourceError, "--image-size"),
        (_VIT, None, {"num_tokens": 8}, ModelSourceError, "--tokens"),
        (_BERT, "BertForNextSentencePrediction", {}, ModelSourceError, "package.module:function"),
        (_VIT, "ViTForMaskedImageModeling", {}, None, ""),
    ],
)
def test_configurations_that_do_not_serve(
    configuration: dict[str, Any],
    architecture: str | None,
    shape: dict[str, int],
    error: type[Exception] | None,
    text: str,
    tmp_path: Path,
) -> None:
    path = str(write(tmp_path, configuration, architecture))
    if error is None:
        assert load_model(path, SampleShape(**shape)).model is not None
        return
    with pytest.raises(error, match=text):
        load_model(path, SampleShape(**shape))


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is asked again"))
    with pytest.raises(ModelSourceError, match="nor can its configuration be fetched"):
        load_model("none/such")
    assert main(["fit", "none/such", "--memory", "1GiB"]) == 2


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.txt").write_text("none")
    for source, text in (
        ("", "is empty"),
        (str(tmp_path), "holds no config.json"),
        (str(tmp_path / "nothing.json"), "no file or folder"),
        (str(tmp_path / "config.txt"), "no configuration that transformers knows"),
    ):
        with pytest.raises(ModelSourceError, match=text):
            load_model(source)


def test_unknown_device(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="'nowhere' cannot be used here"):
        load_model(str(write(tmp_path, _GPT2)), device="nowhere")
