"""Trainer with `fsdp_version: 2` on two processes: `wrap_trainer`, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from ranks import needs_gloo, run_on_ranks
from sharded_net import assert_equal, batch, whole
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.fsdp import FSDPModule

from rockmate import wrap_trainer

pytestmark = needs_gloo


def in_4_bits(linear: nn.Linear) -> nn.Module:
    """With double quantization, stored as floats: accelerate leaves integers on each rank."""
    from bitsandbytes import nn as layers

    sizes = linear.in_features, linear.out_features
    made = layers.Linear4bit(*sizes, bias=False, quant_type="nf4", quant_storage=torch.float32)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def trained(
    folder: str, is_planned: bool, kind: str, num_accumulated: int, first: str
) -> list[Tensor]:
    """Parameters and loss after two steps, the first of which may be that of an earlier run."""
    config: Any = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    for layer in model.model.layers if kind == "quantized" else ():
        layer.mlp.up_proj = in_4_bits(layer.mlp.up_proj)
    if kind != "full":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj"]))
    layer: Any = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    layer["state_dict_type"] = "SHARDED_STATE_DICT"
    arguments = transformers.TrainingArguments(
        f"{folder}/{is_planned}", use_cpu=True, max_steps=2, per_device_train_batch_size=4,
        report_to=[], save_steps=1, disable_tqdm=True, fsdp=True, fsdp_config=layer,
        gradient_accumulation_steps=num_accumulated, learning_rate=1e-2, ddp_backend="gloo",
    )  # fmt: skip
    rows: Any = [{"input_ids": each, "labels": each} for each in batch(size=32)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    module = wrap_trainer(trainer, 0.6, numerics="bitwise", mode="plan") if is_planned else None
    trainer.train(resume_from_checkpoint=f"{first}/checkpoint-1" if first else None)
    assert isinstance(trainer.model, FSDPModule)
    assert module is None or module.is_planned
    assert kind != "quantized" or any("quant_state" in vars(each) for each in model.modules())
    if kind == "quantized":  # Trainer has saved the adapters alone
        state = model.state_dict()
        if first:
            for tensor in state.values():
                tensor.zero_()
            load(state, checkpoint_id=f"{first}/weights")
            model.load_state_dict(state)
        else:
            save(state, checkpoint_id=f"{folder}/{is_planned}/weights")
        assert all(map(torch.any, map(whole, state.values())))
    values: list[Tensor] = [*map(whole, model.parameters())]
    return [*values, torch.tensor([trainer.state.log_history[-1]["train_loss"]])]


def check_trainer(_: Any, folder: str, kind: str, num_accumulated: int, first: str = "") -> None:
    """Bit for bit. A planned run goes on with what one without a plan has saved, and the reverse.

    accelerate shards on GPUs alone, so it is told that there are some.
    """
    rank, size, make = distributed.get_rank(), distributed.get_world_size(), PartialState.__init__
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not read: the group is there

    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialized
    found = []
    for is_planned in (True, False):
        other = first and f"{first}/{not is_planned}"
        found.append(trained(folder, is_planned, kind, num_accumulated, other))
    assert_equal(*found)


@pytest.mark.parametrize(
    ("kind", "num_accumulated"), [("full", 2), ("adapters", 1), ("quantized", 1)]
)
def test_two_processes(tmp_path: Path, kind: str, num_accumulated: int) -> None:
    """Four go on with what they have saved."""
    for name in {"adapters": ["peft"], "quantized": ["peft", "bitsandbytes"]}.get(kind, ()):
        pytest.importorskip(name)
    run_on_ranks(check_trainer, 2, str(tmp_path), kind, num_accumulated)
    run_on_ranks(check_trainer, 4, str(tmp_path / "resumed"), kind, 1, str(tmp_path))
