"""A captured model runs the kernels that eager runs, as the profiler sees them, and obeys every
batch's padding mask."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import architectures
import pytest
import torch
from architectures import Batch, masked_tokens
from helpers import Loss, assert_close, assert_same, one_step
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from rockmate import Planner, RockmateModule
from rockmate.graph.ir import Graph
from rockmate.planning.step import capture_step

NAMES = ("gpt2", "llama", "qwen3", "gemma", "mistral", "bert")
COLUMNS = 12  # no other dimension of these models is 12
_GLUE = """
_to_copy add arange cat clone mul new_ones ones pow scalar_tensor sum tril where
cross_entropy_backward dropout_apply dropout_mask
"""
GLUE = frozenset(_GLUE.split())
"""What a graph says otherwise than eager.

Sums of gradients, casts, masks and tables that are made once, and this project's own calls.
"""


def batch(*, masked: bool, seed: int = 1) -> Batch:
    made = masked_tokens(seed)
    return made if masked else {name: made[name] for name in ("input_ids", "labels")}


@functools.cache
def masked_planner(name: str) -> Planner:
    return Planner(architectures.make(name), batch(masked=True))


@functools.cache
def graph_of(name: str, *, masked: bool) -> Graph:
    return (
        masked_planner(name).plan(1.0).graph
        if masked
        else capture_step(architectures.make(name), batch(masked=False)).graph
    )


@functools.cache
def profiled(name: str, *, masked: bool) -> list[FunctionEvent]:
    """What one forward and backward of the model calls in eager."""
    model, inputs = architectures.make(name), batch(masked=masked)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(**inputs).loss.backward()
    return [event for event in profiler.events() or () if event.name.startswith("aten::")]


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("name", NAMES)
def test_graph_calls_are_those_of_a_profile_of_eager(name: str, masked: bool) -> None:
    eager = Counter(event.name.removeprefix("aten::") for event in profiled(name, masked=masked))
    targets = [op.node.target for op in graph_of(name, masked=masked).ops]
    ours = Counter(
        t._opname if isinstance(t, torch._ops.OpOverload) else t.__name__ for t in targets
    )
    kernels = {
        kind for kind in eager if "attention_for_cpu" in kind or kind in {"bmm", "mm", "addmm"}
    }
    assert kernels & ours.keys() & {"bmm", "_scaled_dot_product_flash_attention_for_cpu"}
    compared = (ours.keys() - GLUE) | kernels
    assert {kind: ours[kind] for kind in compared} == {kind: eager[kind] for kind in compared}


@pytest.mark.parametrize("name", NAMES)
def test_no_mask_is_made_where_eager_has_none(name: str) -> None:
    def is_mask(shape: list[int]) -> bool:
        return len(shape) == 4 and shape[1] == 1 and shape[2:] == [COLUMNS, COLUMNS]

    def in_graph(masked: bool) -> bool:
        values = [op.node.meta["val"] for op in graph_of(name, masked=masked).ops]
        return any(is_mask(list(value.shape)) for value in values if isinstance(value, Tensor))

    def in_eager(masked: bool) -> bool:
        return any(
            is_mask(list(shape))
            for event in profiled(name, masked=masked)
            for shape in event.input_shapes
        )

    assert (in_graph(masked=False), in_graph(masked=True)) == (False, True)
    assert (in_eager(masked=False), in_eager(masked=True)) == (False, True)


def loss_of(inputs: Batch) -> Loss:
    return lambda module, _: (None, module(**inputs).loss)


def with_mask(rows: list[list[int]]) -> Batch:
    return {**masked_tokens(5), "attention_mask": torch.tensor(rows)}


MASKS = {
    "right": with_mask([[1] * 12, [1] * 5 + [0] * 7]),
    "left": with_mask([[0] * 3 + [1] * 9, [1] * 12]),
    "none padded": with_mask([[1] * 12, [1] * 12]),
}


@pytest.mark.parametrize("numerics", ["any_order", "bitwise"])
@pytest.mark.parametrize("name", NAMES)
def test_each_batch_is_masked_by_its_own_padding(name: str, numerics: str) -> None:
    options: Any = {"numerics": numerics, "on_infeasible": "least"}
    module = RockmateModule(architectures.make(name), batch(masked=True), 0.6, **options)
    losses = set()
    for kind, inputs in MASKS.items():
        eager = architectures.make(name)
        module.original.zero_grad()
        expected = one_step(eager, eager, loss_of(inputs), 3)
        ours = one_step(module, module.original, loss_of(inputs), 3)
        # Eager reads the mask, finds nothing to mask, and runs its kernel without one.
        is_read = kind != "none padded" or numerics == "bitwise"
        (assert_same if is_read else assert_close)(ours, expected)
        losses.add(ours.loss.item())
    assert len(losses) == len(MASKS)
