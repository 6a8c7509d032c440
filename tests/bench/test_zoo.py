"""`bench.zoo`: tiny builds from configurations, verdicts, and the page."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bench import zoo
from bench.registries import fields
from bench.registries import trial as trials
from bench.registries.batches import make_batch
from bench.registries.tiny import builders, names_of
from bench.registries.trial import trial
from bench.zoo import page


def test_llama_is_bitwise() -> None:
    found = trial(list(builders("causal-lm", "llama")), partial(make_batch, "causal-lm"))
    assert (found["verdict"], found["mode"]) == ("bitwise", "plan")


def test_a_model_that_eager_cannot_train_is_not_counted() -> None:
    found = trial([partial(nn.Linear, 2, 2)], lambda *_: {"y": torch.ones(1)})
    assert found["verdict"] == "eager-fails"


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train = trials._train

    def spoiled(module: nn.Module, model: nn.Module, batches: list[Any]) -> Any:
        run = train(module, model, batches)
        if module is not model:
            name = next(iter(run.steps[1].gradients))
            run.steps[1].gradients[name] *= 1.01
        return run

    monkeypatch.setattr(trials, "_train", spoiled)
    found = trial(list(builders("causal-lm", "gpt2")), partial(make_batch, "causal-lm"))
    assert found["verdict"] == "WRONG"
    assert found["difference"].startswith("step 2, gradient of")


def test_a_model_of_another_field_is_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"mlp": ["Sequential(Linear(4, 8), Tanh(), Linear(8, 2))", "(randn(6 - seed, 4),)"]}
    table = {"torch": {"field": "layers", "import": ["torch.nn"], "models": models}}
    monkeypatch.setattr(fields, "TABLE", table)
    found = trial([fields.builder("torch", "mlp")], fields.make_batch)
    assert (found["verdict"], found["mode"]) == ("bitwise", "plan")
    of_table = {"registry": "torch", "name": "mlp", "field": "layers"}
    lines = page([found | of_table | zoo.machine_record("bench.fields")], "fields")
    assert any(each.startswith("| torch | layers | 1 | 1 | 1 | 0 | 0 |") for each in lines)


def test_registries_are_known() -> None:
    assert "llama" in names_of("causal-lm")
    assert "vit" in names_of("image-classification")


def test_a_tiny_build_of_images_and_text_has_rows_for_each_image() -> None:
    model = next(builders("image-text-to-text", "cosmos3_edge"))()  # heads turn in three parts
    batch = make_batch("image-text-to-text", model, 0)
    assert model(**batch).loss.isfinite()


def record(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    return {"registry": "ctc", "name": name, "verdict": verdict, "detail": f"of {name}", **more}


def test_the_page_counts_and_names_and_the_newest_line_of_a_model_counts() -> None:
    records = [
        record("a", "WRONG"),
        record("a", "bitwise", mode="plan"),
        record("b", "within rounding", mode="frames"),
        record("c", "WRONG"),
        record("d", "eager-fails"),
    ]
    lines = "\n".join(page([{**each, **zoo.machine_record("bench.zoo")} for each in records]))
    assert "| ctc | 3 | 2 | 1 | 1 | 1 | 1 | 0 | 0 | 0 | 1 |" in lines
    assert "| ctc | `c` | WRONG | of c |" in lines
    assert "- ctc: `d`" in lines
