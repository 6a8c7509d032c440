"""LoRA over a quantized base, as PEFT and Trainer set it up, trains as without the wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from fine_tuning import llama, trained
from torch import nn

from rockmate import RockmateModule

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer, PEFT and the quantizers

LORA = {"r": 2, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
LAYERS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def by_bitsandbytes(folder: Path, **options: Any) -> nn.Module:
    """A base in 4 or 8 bits, prepared as for training in them."""
    pytest.importorskip("bitsandbytes")
    llama(num_hidden_layers=2, hidden_size=64, intermediate_size=128).save_pretrained(folder)
    base = transformers.LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(**options),
        device_map={"": "cpu"},
    )
    return peft.prepare_model_for_kbit_training(base)


def nf4(folder: Path) -> nn.Module:
    return by_bitsandbytes(
        folder,
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def eight_bits(folder: Path) -> nn.Module:
    return by_bitsandbytes(folder, load_in_8bit=True)


def by_torchao(config: Any) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    base = llama(num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    base.requires_grad_(False)
    quantization.quantize_(
        base, config, lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name
    )
    return base


def int8(folder: Path) -> nn.Module:
    quantization: Any = pytest.importorskip("torchao.quantization")
    return by_torchao(quantization.Int8WeightOnlyConfig())


def int4(folder: Path) -> nn.Module:
    """In groups of 32, each with a scale and a zero."""
    quantization: Any = pytest.importorskip("torchao.quantization")
    group = quantization.PerGroup(32)
    return by_torchao(quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group))


@pytest.mark.parametrize("base", [nf4, eight_bits, int8, int4])
def test_a_trainer_trains_the_adapters(base: Any, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(**LORA, target_modules=LAYERS)  # pyright: ignore[reportArgumentType]
        return peft.get_peft_model(base(tmp_path / "base"), config).train()

    logs, reference = trained(make, lambda model: model, tmp_path / "plain")
    modules = []

    def wrapped(model: nn.Module) -> nn.Module:
        modules.append(RockmateModule(model, budget=0.7))
        return modules[0]

    our_logs, model = trained(make, wrapped, tmp_path / "planned")
    assert our_logs == logs
    named = dict(model.named_parameters())
    trainable = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    theirs = dict(reference.named_parameters())
    for name in trainable:
        assert torch.equal(named[name], theirs[name]), name
    assert modules[0].plan.predicted_peak_bytes < modules[0].plan.baseline_peak_bytes
