"""Peers train as eager does, recompute what they are said to, and leave no trace."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import measure, models, peers
from bench.peers import segments
from rockmate.curves.measure import tensor_difference

# Dynamo reads `.grad` of a layer's input, hides the warning, and stumbles where warnings are
# errors.
pytestmark = [
    pytest.mark.filterwarnings(
        "default:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    # Inductor imports a module of PyTorch's that says so.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

PEERS = peers.peers_for()
INDUCTOR = [
    *(f"inductor{kind}: default {budget}" for kind in ("", " by layer") for budget in (1, 0)),
    *(f"inductor{kind}, checkpoints: default" for kind in ("", " by layer")),
]
MIN_CUT = ["min-cut: 0.5 dp", "min-cut by layer: 0.5 dp", "min-cut by layer: 0.5 ilp"]
COMPILED = [*MIN_CUT, "default partitioner"]
PLAIN = [
    "eager", "checkpoint", "checkpoint: every 2", "sqrt(n) segments", "checkpoint_sequential",
    "selective",
]  # fmt: skip


def gradients(workload: models.Workload, peer: peers.Peer) -> dict[str, torch.Tensor]:
    workload.model.zero_grad(set_to_none=True)
    with peer(workload) as model:
        measure.training_step(workload, model, workload.make_batch(1), seed=2)
    return measure.gradients_of(workload.model)


def peak(workload: models.Workload, peer: peers.Peer) -> int:
    batch = workload.make_batch(1)
    with peer(workload) as model:
        measure.training_step(workload, model, batch, seed=2)
        return measure.allocator_peak(lambda: measure.training_step(workload, model, batch, seed=2))


def peer_of(name: str) -> peers.Peer:
    if name.endswith("ilp"):
        pytest.importorskip("scipy")
    return PEERS[name]


@contextmanager
def counted(layers: list[nn.Module]) -> Iterator[Counter[int]]:
    """How often the linear map of each layer runs."""
    counts: Counter[int] = Counter()
    hooks = [
        layer.get_submodule("0").register_forward_hook(
            lambda *_, index=index: counts.update([index])
        )
        for index, layer in enumerate(layers)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def test_inductor_is_given_at_its_best() -> None:
    for family in ("inductor", "inductor by layer"):
        assert {f"{family}: default {budget:g}" for budget in (1, 0.5, 0)} <= PEERS.keys()
        assert f"{family}: max-autotune-no-cudagraphs 1" in PEERS
        assert f"{family}, checkpoints: max-autotune-no-cudagraphs" in PEERS


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_has_eagers_gradients_but_for_rounding(name: str) -> None:
    workload = models.build("mlp", tiny=True)
    expected = gradients(workload, peers.eager)
    difference = tensor_difference(gradients(workload, peer_of(name)), expected)
    assert difference.largest_relative < 1e-5


@pytest.mark.parametrize("name", [*PLAIN, *COMPILED])
def test_gradients_are_those_of_eager(name: str) -> None:
    workload = models.build("mlp", tiny=True)
    expected = gradients(workload, peers.eager)
    assert tensor_difference(gradients(workload, peer_of(name)), expected).equal


@pytest.mark.parametrize("model", ["gpt2-2layer", "t5-small", "resnet50"])
@pytest.mark.parametrize("name", PLAIN)
def test_gradients_with_dropout_masks_and_tuples_are_those_of_eager(model: str, name: str) -> None:
    workload = models.build(model, tiny=True)
    expected = gradients(workload, peers.eager)
    if (model, name) == ("t5-small", "checkpoint_sequential"):
        with pytest.raises(ValueError, match="one tensor"):
            gradients(workload, peer_of(name))
        return
    assert tensor_difference(gradients(workload, peer_of(name)), expected).equal


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("eager", [1, 1, 1, 1]),
        ("checkpoint", [2, 2, 2, 2]),
        ("checkpoint: every 2", [2, 1, 2, 1]),
        ("sqrt(n) segments", [2, 2, 2, 2]),
        ("checkpoint_sequential", [2, 2, 1, 1]),  # the last segment saves everything
    ],
)
def test_layers_run_as_often_as_said(name: str, runs: list[int]) -> None:
    workload = models.build("mlp", tiny=True)
    gradients(workload, peer_of(name))  # the first call looks at how the layers are wired
    with counted(workload.layers(workload.model)) as counts:
        gradients(workload, peer_of(name))
    # A checkpoint stops its second run once it has what the backward reads, which is never before
    # the linear map.
    assert [counts[index] for index in range(4)] == runs


def test_segments_keep_their_ends_and_one_inside() -> None:
    workload = models.build("mlp", tiny=True)
    rows_bytes = 256 * 32 * 4
    # At the end of the forward eager holds two tensors for each of four layers, the outputs among
    # them; with two segments it is the outputs and what stands between the segments, and then at
    # most the four tensors of one segment.
    saved_bytes = peak(workload, peers.eager) - peak(workload, peers.checkpoint_segments)
    assert saved_bytes >= (8 - 6) * rows_bytes


def test_selective_recomputes_no_matrix_product() -> None:
    workload = models.build("mlp", tiny=True)

    def flops(name: str) -> int:
        with FlopCounterMode(display=False) as counter:
            gradients(workload, peer_of(name))
        return counter.get_total_flops()

    assert flops("selective") == flops("eager") < flops("checkpoint")


def test_every_second_layer_of_a_library_model() -> None:
    workload = models.build("gpt2-deep", tiny=True)
    with peers.checkpoint_layers(workload, every=2) as model:
        layers = workload.layers(workload.model)
        assert [layer.gradient_checkpointing for layer in layers] == [True, False, True]
        assert model is workload.model
    assert not any(layer.gradient_checkpointing for layer in workload.layers(workload.model))


@pytest.mark.parametrize("model", ["gpt2-2layer", "resnet50"])
def test_peers_leave_no_trace(model: str) -> None:
    workload = models.build(model, tiny=True)
    buffers = {name: value.clone() for name, value in workload.model.named_buffers()}
    state = torch.get_rng_state()
    for name in PLAIN:
        with peer_of(name)(workload):
            pass
    assert tensor_difference(dict(workload.model.named_buffers()), buffers).equal
    assert torch.equal(torch.get_rng_state(), state)
    for module in workload.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_no_segment_spans_the_code_of_the_model() -> None:
    runs = segments._runs(models.build("t5-small", tiny=True))
    assert [len(run.layers) for run in runs] == [2, 2]  # encoder, decoder
    for peer in (peers.checkpoint_segments, peers.checkpoint_in_sequence):
        with (
            pytest.raises(ValueError, match="no layer can be called"),
            peer(models.build("unet", tiny=True)),
        ):
            pass


@pytest.mark.parametrize(
    ("lend", "budget"), [(peers.compiled, 0.5), (peers.compiled_by_layer, 0.0)]
)
def test_a_smaller_memory_budget_saves_less(lend: Callable[..., Any], budget: float) -> None:
    workload = models.build("mlp", tiny=True)
    full, small = (
        peak(workload, partial(lend, backend=peers.min_cut(share, "dp"))) for share in (1.0, budget)
    )
    assert small < full


def test_a_compiled_peer_compiles_once() -> None:
    workload = models.build("mlp", tiny=True)
    inner, num_compiled = peers.min_cut(0.5, "dp"), 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal num_compiled
        num_compiled += 1
        return inner(graph, inputs)

    for _ in range(3):
        gradients(workload, lambda own: peers.compiled_by_layer(own, backend=backend))
    # the first layer, whose input takes no gradient, and all others, which are equal
    assert num_compiled == 2
