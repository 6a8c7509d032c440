"""Grids of images after the first other one need no capture, with attention in windows, too."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from helpers import assert_same, train
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from bench.lengths import images_of
from bench.measure import allocator_peak
from rockmate import RockmateModule

GRIDS = (
    [(16, 12), (12, 8)],
    [(8, 8), (12, 8)],
    [(12, 16), (8, 12)],
    [(4, 4), (16, 8)],
    [(16, 16), (8, 12)],
)


def tiny_model() -> nn.Module:
    """Windows of 2 x 2 rows in one block of images, and all of an image in the other."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
        },
        image_token_id=200, video_token_id=201, vision_start_token_id=202, vision_end_token_id=203,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def test_other_numbers_of_windows_take_over_a_schedule(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    eager = copy.deepcopy(model)
    batches = [images_of(model.config, grids, seed) for seed, grids in enumerate(GRIDS)]
    module = RockmateModule(model, batches[0], 0.6, outputs="loss")

    def loss(callee: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        return None, callee(**batches[step - 1]).loss

    caplog.set_level(logging.INFO, "rockmate")
    ours, reference = (train(*each, loss, len(batches)) for each in [(module, model), (eager,) * 2])
    for pair in zip(ours, reference, strict=True):
        assert_same(*pair)
    texts = [each for each in caplog.messages if "captured" in each]
    assert [each.split(" in ")[0] for each in texts] == ["captured with symbolic sizes"]
    peak = allocator_peak(lambda: module(**batches[0]).loss.backward())
    assert peak == module.plan.predicted_peak_bytes
    assert module.plan.schedule.num_recomputations() > 0
