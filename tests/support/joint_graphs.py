"""Runs captured joint graphs: returned values, bitwise, and which tensors share memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate.capture.joint import capture_joint
from rockmate.capture.roles import Capture
from rockmate.capture.signature import SampleCall, flatten_call, optional_keywords

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-40, 3e38)


def verify_joint(capture: Capture) -> None:
    """Asserts what every pass over a joint graph keeps.

    The fx graph is well formed. Its placeholders and constants are the capture's inputs, and each
    returned value has a role. Each node that is read has a fake value.
    """
    graph = capture.joint.graph
    graph.lint()
    sources = {node for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    inputs = {node for node, _ in capture.inputs}
    assert sources == inputs, f"{sources ^ inputs} are inputs of the graph or of the capture only"
    returned = graph.output_node().args[0]
    assert isinstance(returned, tuple | list)
    for value, role in zip(returned, capture.output_roles, strict=True):
        assert value is not None or role is None, f"nothing is returned for {role}"
    for node in graph.nodes:
        assert not node.users or "val" in node.meta, f"{node} has no fake value"


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> Capture:
    tensors, call = flatten_call(args, kwargs, frozenset())
    return capture_joint(model, tensors, call.structure, differentiable="all")


def captured_for(model: nn.Module, sample: object) -> Capture:
    """The capture of a model for a sample, as a planner takes it."""
    given = SampleCall.of(sample)
    tensors, call = flatten_call(given.args, given.kwargs, optional_keywords(model))
    return capture_joint(model, tensors, call.structure, differentiable="loss", outputs="all")


def made_up(fake: Tensor, seed: int) -> Tensor:
    """Values of that shape, dtype and layout; for an odd seed with `SPECIAL` numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    if not fake.is_floating_point():
        return torch.randint(0, 2, fake.shape, generator=generator).to(fake.dtype)
    values = torch.randn(fake.shape, generator=generator)
    if seed % 2 and values.numel() > 4 * len(SPECIAL):
        values.view(-1)[torch.randperm(values.numel(), generator=generator)[: len(SPECIAL)]] = (
            torch.tensor(SPECIAL)
        )
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(values)


def run(
    capture: Capture, specials: bool
) -> tuple[list[Tensor | None], list[tuple[int, int]], Tensor]:
    """What the joint graph returns for made-up inputs.

    Returns:
        The returned values; pairs of given and returned tensors that share memory; the generator's
        state afterwards.
    """
    nodes = [node for node in capture.joint.graph.nodes if node.op == "placeholder"]
    given = [made_up(node.meta["val"], 2 * index + specials) for index, node in enumerate(nodes)]
    torch.manual_seed(3)
    returned = list(fx.Interpreter(capture.joint).run(*given, enable_io_processing=False))
    tensors = [t for t in [*given, *returned] if isinstance(t, Tensor)]
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    pairs = itertools.combinations(range(len(tensors)), 2)
    shared = [
        (a, b)
        for a, b in pairs
        if memory[a] == memory[b] and tensors[a].numel() and tensors[b].numel()
    ]
    return returned, shared, torch.get_rng_state()


def bits(tensor: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        tensor.element_size()
    ]
    return tensor.contiguous().view(integer)


def assert_same_bits(results: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for result, reference in zip(results, expected, strict=True):
        assert (result is None) is (reference is None)
        if result is not None and reference is not None:
            assert result.dtype == reference.dtype
            assert result.stride() == reference.stride()
            assert torch.equal(bits(result), bits(reference))
