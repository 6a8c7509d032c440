"""Plans for ranks that are not there, and what their collectives cost."""

from __future__ import annotations

from functools import partial
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from sharded_net import assert_equal, batch, net, sharded, trained
from small_graphs import Chain
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rockmate import (
    MachineError,
    Plan,
    PlanMismatchError,
    Planner,
    RockmateError,
    RockmateModule,
    UnsupportedModelError,
    simulated_ranks,
    sweep,
)
from rockmate.costs import machine as machines
from rockmate.costs.collectives import _Link
from rockmate.costs.machine import load_machine
from rockmate.ops.collectives import is_communication

WIDTH, ROWS = 1024, 1024
LAYERS = 4
WIDTHS = [WIDTH] * (LAYERS + 1)
VALUE_BYTES = WIDTH * WIDTH * 4


def stack() -> tuple[Chain, Tensor]:
    """Layers whose weights are gathered one by one."""
    with torch.device("meta"):
        return Chain(*WIDTHS, bias=False), torch.empty(ROWS, WIDTH)


def shard_layers(model: Chain, mesh: DeviceMesh | None = None, **options: Any) -> None:
    for each in (*model.layers, model):
        fully_shard(each, mesh=mesh, **options)


def planner_for(mesh: Any, machine: Any = "h100", **options: Any) -> Planner:
    return Planner(*stack(), machine=machine, mesh=mesh, **options)


def ring_ms(num_ranks: int, num_nodes: int, value_bytes: float = VALUE_BYTES) -> float:
    """An all-gather or a reduce-scatter, by hand."""
    link = load_machine("h100").link
    hops_us = (num_ranks - num_nodes) * link["hop_latency_us"]
    hops_us += (num_nodes - 1) * link["hop_latency_us_between_nodes"]
    rate = link["gb_per_s"]
    if num_nodes > 1:
        rate = min(rate, num_ranks // num_nodes * link["gb_per_s_between_nodes"])
    sent = value_bytes * (num_ranks - 1) / num_ranks
    return (link["latency_us"] + hops_us) / 1e3 + sent / (rate * 1e6)


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes"), [(2, 1), (8, 1), (16, 2), (64, 8), (256, 32), (1024, 128)]
)
def test_times_follow_from_ranks_and_nodes(num_ranks: int, num_nodes: int) -> None:
    """Four gathers and four reductions a step, as of runs that add nothing to gradients."""
    plan = planner_for(num_ranks).plan(1.0)
    found = [
        plan.costs.recompute[op.index].time_ms
        for op in plan.graph.ops
        if is_communication(op.node.target)
    ]
    assert found == pytest.approx([ring_ms(num_ranks, num_nodes)] * 2 * LAYERS)


def test_a_ring_takes_longer_the_more_ranks_it_has() -> None:
    numbers = (1, 2, 8, 16, 64, 256, 1024)
    times = [planner_for(number).baseline_ms for number in numbers]
    assert times == sorted(times)
    assert times[-1] > 3 * times[3]
    # The same number of ranks as 128 replicas: rings of 8, and trees.
    assert planner_for((128, 8)).baseline_ms < 0.5 * times[-1]


def test_replicas_reduce_over_one_adapter_of_each_node() -> None:
    """What a rank keeps is reduced over the ranks with the same part, in a tree or a ring."""
    link = load_machine("h100").link
    base_ms = planner_for(8).baseline_ms
    for num_replicas in (2, 128):
        part = VALUE_BYTES / 8
        rate = link["gb_per_s_between_nodes"] * 1e6
        hop_ms = link["hop_latency_us_between_nodes"] / 1e3
        share = (num_replicas - 1) / num_replicas
        by_ring = 2 * ((num_replicas - 1) * hop_ms + share * part / rate)
        by_tree = 2 * (ceil(log2(num_replicas)) * hop_ms + part / (0.92 * rate))
        expected = LAYERS * (link["latency_us"] / 1e3 + min(by_ring, by_tree))
        assert (by_tree < by_ring) == (num_replicas == 128)
        found = planner_for((num_replicas, 8)).baseline_ms - base_ms
        assert found == pytest.approx(expected, rel=1e-6)


def test_groups_across_nodes_and_within() -> None:
    """Eight ranks of one node, and one of each of eight: rates, hops, and kinds of collectives."""
    link = _Link(1e3, 100.0, 8, 10.0, 10.0, 100.0)
    within, across = range(8), range(0, 64, 8)
    seven_eighths = 7 / 8 * 1e8 / 1e6
    gather = "_c10d_functional.all_gather_into_tensor.default"
    assert link.time_ms(gather, 1e8, within) == pytest.approx(1.07 + seven_eighths / 100)
    assert link.time_ms(gather, 1e8, across) == pytest.approx(1.7 + seven_eighths / 10)
    exchange = "_c10d_functional.all_to_all_single.default"
    assert link.time_ms(exchange, 1e8, within) == pytest.approx(1.01 + seven_eighths / 100)
    assert link.time_ms(exchange, 1e8, across) == pytest.approx(1.1 + seven_eighths / 10)
    # Of sixteen ranks on two nodes half of the data leaves the node, each part by its adapter.
    assert link.time_ms(exchange, 1e8, range(16)) == pytest.approx(1.1 + 50 / 10)
    spread = "_c10d_functional.broadcast.default"
    assert link.time_ms(spread, 1e8, within) == pytest.approx(1.07 + 1)
    assert link.time_ms(spread, 1e8, [5]) == pytest.approx(2)


def test_a_mesh_is_what_sharding_by_hand_gives(caplog: pytest.LogCaptureFixture) -> None:
    """Of a model that is here, and stays as it is."""
    caplog.set_level("INFO")
    model, tokens = net(), batch()
    before = [(id(each), each.data_ptr(), type(each)) for each in model.parameters()]
    planner = Planner(model, tokens, machine="h100", mesh=(4,))
    assert before == [(id(each), each.data_ptr(), type(each)) for each in model.parameters()]
    assert type(model.layers[0]) is type(net().layers[0])
    assert not distributed.is_initialized()
    assert "whatever reshard_after_forward says" in caplog.text
    with simulated_ranks(4):
        by_hand = Planner(sharded(net()), tokens, machine="h100")
    ours, theirs = planner.plan(0.6), by_hand.plan(0.6)
    assert ours.schedule == theirs.schedule
    assert ours.snapshot.fingerprint == theirs.snapshot.fingerprint
    assert ours.predicted_ms == theirs.predicted_ms
    assert ours.machine == "h100, 4 ranks"
    assert "with overlap" in ours.summary()
    assert ours.overlapped_ms < ours.predicted_ms


def test_planning_goes_on_when_the_ranks_are_gone() -> None:
    """In chunks, which are rewritten and priced late, and for bounds and frontiers."""
    planner = Planner(net(), batch(), machine="h100", mesh=(2, 4))
    plan = planner.plan(1, on_infeasible="least")
    assert plan.predicted_peak_bytes < planner.minimum_peak_bytes
    assert plan.options.loss_chunks
    assert plan.lower_bound_ms <= plan.predicted_ms
    assert len(planner.frontier()) > 2
    assert Plan.from_text(plan.to_text()).predicted_ms == plan.predicted_ms


def test_what_is_gathered_counts_whatever_the_number_of_ranks() -> None:
    few, many = planner_for(2), planner_for(256)
    assert few.baseline_peak_bytes == many.baseline_peak_bytes
    assert many.minimum_peak_bytes < many.baseline_peak_bytes


def test_a_function_shards_as_it_likes() -> None:
    """Tensor parallelism below sharded parameters; half as much is gathered in half precision."""

    def shard(model: Chain, mesh: DeviceMesh) -> None:
        styles: dict[str, Any] = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], styles)
        shard_layers(model, mesh["data"])

    found = planner_for({"data": 4, "tensor": 8}, shard=shard)
    calls = [op.call for op in found.plan(1.0).snapshot.ops]
    assert any("all_reduce" in call for call in calls)
    assert found.plan(1.0).machine == "h100, 4 x 8 ranks (data, tensor)"
    assert found.baseline_ms < planner_for((4, 8)).baseline_ms

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    half = planner_for(8, shard=partial(shard_layers, mp_policy=policy))
    assert half.baseline_peak_bytes < planner_for(8).baseline_peak_bytes


def test_a_sweep_of_a_mesh() -> None:
    rows = sweep(*stack(), budgets="0.7,1.0", machine="h100", mesh=(8,))
    assert [row.is_feasible for row in rows] == [True, True]


def check_plan_on_ranks(mesh: DeviceMesh, path: str, shape: tuple[int, ...]) -> None:
    """The plan made without the ranks, on the ranks: bit for bit PyTorch's own training."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    rank = distributed.get_rank()
    theirs = sharded(net(), mesh)
    model = sharded(net(), mesh)
    module = RockmateModule(model, batch(), plan=Plan.load(path))
    assert module.plan.schedule.num_recomputations()
    assert_equal(trained(module, model, rank), trained(theirs, theirs, rank))


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_its_plan_runs_on_the_ranks(shape: tuple[int, ...], tmp_path: Path) -> None:
    planner = Planner(net(), batch(), machine="cpu-avx2", mesh=shape, numerics="bitwise")
    plan = planner.plan(0.5, on_infeasible="least")
    for module_of in (lambda: planner.module(0.5), lambda: planner.module_of(plan)):
        with pytest.raises(PlanMismatchError, match=r"not here. Save it .*in the same way"):
            module_of()
    plan.save(tmp_path / "plan.json")
    num_ranks = 2 ** len(shape)
    run_on_ranks(check_plan_on_ranks, num_ranks, str(tmp_path / "plan.json"), shape)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (0, "at least 1"),
        ((2, -1), "at least 1"),
        ((True,), "at least 1"),
        ({}, "at least 1"),
        ((2, 2, 2), "name them"),
        ((), "name them"),
    ],
)
def test_a_mesh_of_wrong_sizes(mesh: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        planner_for(mesh)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r'mesh is \(8,\).* machine="h100"'):
        planner_for((8,), machine=None)
    with pytest.raises(ValueError, match="Give mesh, too"):
        Planner(*stack(), machine="h100", shard=shard_layers)
    with simulated_ranks(2):
        with pytest.raises(RockmateError, match="there is one of 2 ranks"):
            planner_for(8)
        model, x = stack()
        shard_layers(model)
        with pytest.raises(UnsupportedModelError, match="is divided among ranks already"):
            Planner(model, x, machine="h100", mesh=8)
    assert not distributed.is_initialized()

    class Alone(Chain):
        def __deepcopy__(self, _: Any) -> Alone:
            raise RuntimeError("only one")

    with pytest.raises(UnsupportedModelError, match=r"Alone cannot be copied \(only one\)"):
        Planner(Alone(*WIDTHS), torch.empty(ROWS, WIDTH), machine="h100", mesh=8)


def test_simulated_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ranks is 0"), simulated_ranks(0):
        pass
    with (
        simulated_ranks(2),
        pytest.raises(RockmateError, match="there is one of 2 ranks"),
        simulated_ranks(4),
    ):
        pass


def test_links_in_descriptions(tmp_path: Path) -> None:
    """Hops may be left out, but not alone."""
    text = (machines._shipped() / "h100.toml").read_text()
    path = tmp_path / "half.toml"
    path.write_text(text.replace("ranks_in_node = 8\n", ""))
    with pytest.raises(MachineError, match=r"lacks 'ranks_in_node' in \[link\]"):
        load_machine(path)
    hops = [line for line in text.splitlines() if line.startswith("hop_latency")]
    path.write_text("\n".join(line for line in text.splitlines() if line not in hops))
    assert planner_for(64, machine=path).baseline_ms < planner_for(64).baseline_ms
    text = (machines._shipped() / "l4.toml").read_text()
    path.write_text("\n".join((text, *hops)))
    with pytest.raises(MachineError, match=r"lacks 'latency_us' in \[link\]"):
        load_machine(path)
