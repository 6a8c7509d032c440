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
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule

from rockmate import wrap_trainer

pytestmark = needs_gloo


def trained(folder: str, *, is_planned: bool, num_accumulated: int, has_adapters: bool) -> Any:
    config: Any = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    if has_adapters:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    layer = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = transformers.TrainingArguments(
        folder, use_cpu=True, max_steps=2, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, fsdp=True, fsdp_config=layer,
        gradient_accumulation_steps=num_accumulated, learning_rate=1e-2, ddp_backend="gloo",
    )  # fmt: skip
    rows: Any = [{"input_ids": each, "labels": each} for each in batch(size=32)]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    module = wrap_trainer(trainer, 0.6, numerics="bitwise", mode="plan") if is_planned else None
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    assert module is None or module.is_planned
    values: list[Tensor] = [*map(whole, model.parameters())]
    return [*values, torch.tensor([trainer.state.log_history[-1]["train_loss"]])]


def check_trainer(_: Any, folder: str, options: dict[str, Any]) -> None:
    """Bit for bit. accelerate shards on GPUs alone, so it is told that there are some."""
    rank, make = str(distributed.get_rank()), PartialState.__init__
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # not read: the group is there

    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = initialized
    assert_equal(*(trained(folder, is_planned=each, **options) for each in (True, False)))


@pytest.mark.parametrize(("num_accumulated", "has_adapters"), [(2, False), (1, True)])
def test_two_processes(tmp_path: Path, num_accumulated: int, has_adapters: bool) -> None:
    options = {"num_accumulated": num_accumulated, "has_adapters": has_adapters}
    run_on_ranks(check_trainer, 2, str(tmp_path), options)
