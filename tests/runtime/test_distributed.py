"""Data-parallel training.

A group of one, and two processes that must do what plain DistributedDataParallel does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_steps, modules_of, train
from ranks import needs_gloo, run_on_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from rockmate import Plan, Planner, RockmateModule, UnsupportedModelError
from rockmate.runtime.plan_agreement import broadcast_plan

pytestmark = needs_gloo

NUM_RANKS = 2
SMALL_BUCKETS_MB = 0.005


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_data_parallel(group: None) -> None:
    x = torch.randn(64, 16)
    model = models.Stack()

    def loss_of(module: nn.Module, step: int) -> tuple[None, torch.Tensor]:
        return None, module(x * step).square().mean()

    reference_model = copy.deepcopy(model)
    reference = train(DistributedDataParallel(reference_model), reference_model, loss_of)
    before = copy.deepcopy(model.state_dict())
    for gradients in ("accumulated", "returned"):
        for module in modules_of(model, x, gradients=gradients):
            model.load_state_dict(before)
            model.zero_grad(set_to_none=True)
            parallel = DistributedDataParallel(module)
            assert_same_steps(train(parallel, model, loss_of), reference)


def num_complete_at_the_first_visit() -> int:
    """Parameters, of 8 that take 4 MiB, which have their gradient when autograd tells the first of
    those who wait at their nodes."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    x = torch.randn(2, 512)
    module = RockmateModule(model, x, 1.0, trial="never")
    parameters, found = list(model.parameters()), list[int]()

    def note(*_: Any) -> None:
        found.append(sum(parameter.grad is not None for parameter in parameters))

    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in parameters]
    for node in nodes:
        node.register_hook(note)
    module(x).square().sum().backward()
    assert len(found) == len(nodes) == 8
    return found[0]


def test_who_waits_is_told_inside_the_backward_in_a_group(group: None) -> None:
    assert 0 < num_complete_at_the_first_visit() < 8


def test_who_waits_is_told_when_the_step_is_done_without_a_group() -> None:
    assert num_complete_at_the_first_visit() == 8


def first_generation(module: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


@pytest.mark.filterwarnings("ignore")  # of FSDP, about a group of one
@pytest.mark.parametrize(
    "shard",
    [first_generation, partial(first_generation, use_orig_params=True)],
    ids=["flat", "original"],
)
@pytest.mark.parametrize("is_outside", [True, False])
def test_sharded_parameters_are_refused(
    group: None, shard: Callable[[nn.Module], nn.Module], is_outside: bool
) -> None:
    model = models.Stack(2)

    def train() -> None:
        module = RockmateModule(model if is_outside else shard(model), budget=1.0)
        (shard(module) if is_outside else module)(torch.randn(8, 16)).sum().backward()

    with pytest.raises(UnsupportedModelError, match=r"FSDP1\) .* DistributedDataParallel"):
        train()


def test_data_parallel_within_a_planned_module_is_refused(group: None) -> None:
    module = RockmateModule(DistributedDataParallel(models.Stack(1)), budget=1.0)
    with pytest.raises(UnsupportedModelError, match="Put it around"):
        module(torch.randn(8, 16))


def test_without_a_group_a_plan_is_its_own() -> None:
    plan = Planner(models.Stack(1), torch.randn(8, 16)).plan(1.0)
    assert broadcast_plan(plan, step="", request=None) is plan


# --- two processes --------------------------------------------------------------------------------


class Spare(models.Stack):
    """A stack with a layer that a call may leave out, so that its parameters are unused in some
    runs."""

    def __init__(self, uses_last: bool = True) -> None:
        super().__init__(num_layers=3, dropout=0.2)
        self.spare = nn.Linear(16, 16)
        self.uses_last = uses_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.spare(y) if self.uses_last else y


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def trained_ddp(
    rank: int, *, is_planned: bool, uses_last: bool = True, skips_sync: bool = False, **options: Any
) -> dict[str, Any]:
    """Three steps on this rank's data.

    Losses, weights and gradients after them, and the plan's text.
    """
    torch.manual_seed(0)
    model = Spare(uses_last)
    module = RockmateModule(model, budget=0.6) if is_planned else model
    parallel = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        if skips_sync:
            with parallel.no_sync():
                parallel(batch_of(step + 50, rank)).square().mean().backward()
        loss = parallel(batch_of(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "losses": losses,
        "weights": list(model.state_dict().values()),
        "gradients": gradients,
        "module": module,
    }


def equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["losses"] == b["losses"]
    for name in ("weights", "gradients"):
        for ours, theirs in zip(a[name], b[name], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs), name


def check_equal_to_plain(rank: int) -> None:
    variants: list[dict[str, Any]] = [
        {"skips_sync": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {
            "find_unused_parameters": True,
            "uses_last": False,
            "skips_sync": True,
            "gradient_as_bucket_view": True,
        },
    ]
    for variant in variants:
        ours = trained_ddp(rank, is_planned=True, **variant)
        assert ours["module"].plan.schedule.num_recomputations() > 0
        equal(ours, trained_ddp(rank, is_planned=False, **variant))


class Heads(nn.Module):
    """Two outputs, of which the loss takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return self.first(y), self.second(y)


def trained_heads(
    rank: int, head_of: Callable[[int, int], int], *, is_planned: bool, finds_unused: bool
) -> tuple[str, list[torch.Tensor], list[torch.Tensor | None]]:
    """The error, if any, of three steps; weights and gradients after them."""
    torch.manual_seed(0)
    model = Heads()
    module = RockmateModule(model, batch_of(0, rank), 1.0) if is_planned else model
    parallel = DistributedDataParallel(module, find_unused_parameters=finds_unused)
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=1e-2), ""
    try:
        for step in range(3):
            optimizer.zero_grad()
            head = head_of(rank, step)
            parallel(batch_of(step, rank))[head].square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        text = str(error).partition(".")[0]
    parameters = list(model.parameters())
    return text, parameters, [parameter.grad for parameter in parameters]


def check_left_out_heads(rank: int) -> None:
    head_of: Callable[[int, int], int]
    for head_of in (lambda *_: 0, lambda _, step: step % 2, lambda rank, _: rank):
        for finds_unused in (False, True):
            run = partial(trained_heads, rank, head_of, finds_unused=finds_unused)
            error, weights, gradients = run(is_planned=True)
            expected_error, *expected = run(is_planned=False)
            assert error == expected_error
            assert bool(error) != finds_unused
            assert all(map(torch.equal, weights, expected[0]))
            if finds_unused:
                for ours, theirs in zip(gradients, expected[1], strict=True):
                    assert (ours is None) == (theirs is None)
                    assert ours is None or theirs is None or torch.equal(ours, theirs)


def check_plans_agree(rank: int) -> None:
    module = trained_ddp(rank, is_planned=True)["module"]
    own = Planner(models.Stack(2), torch.randn(8, 16)).plan(1.0)
    # Op times of the two processes differ, so equal texts mean that one has taken the other's.
    for plan in (module.plan, broadcast_plan(own, step="step", request="test")):
        texts: list[Any] = [None] * NUM_RANKS
        distributed.all_gather_object(texts, plan.to_text())
        assert texts[0] == texts[1]
        assert isinstance(plan, Plan)
    alone: list[Any] = [None] * NUM_RANKS
    distributed.all_gather_object(alone, own.to_text())
    assert alone[0] != alone[1]
    if rank == 1:  # a rank that plans alone waits for nobody
        other = Planner(models.Stack(1), torch.randn(4, 16)).plan(1.0)
        broadcast_plan(other, step="step", request="alone")


def check_buckets_become_ready_one_by_one(rank: int) -> None:
    model = models.Stack(num_layers=6, dropout=0.0)
    x = batch_of(1, rank)
    module = RockmateModule(model, x, 1.0)
    parallel = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS_MB)
    events: list[str] = []

    def reduce(state: None, bucket: Any) -> Any:
        events.append("bucket")
        work = distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    # DDP checks them
    reduce.__annotations__ = {
        "bucket": distributed.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    parallel.register_comm_hook(None, reduce)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    for _ in range(2):  # buckets are arranged after the first
        events.clear()
        parallel(x).square().mean().backward()
    buckets = [place for place, event in enumerate(events) if event == "bucket"]
    names = [place for place, event in enumerate(events) if event != "bucket"]
    assert len(buckets) >= 4
    assert len(names) == len(list(model.parameters()))
    before_the_last = sum(place < names[-1] for place in buckets)
    assert before_the_last >= len(buckets) - 2, events
    first_layer = next(place for place, event in enumerate(events) if event.startswith("layers.0."))
    assert any(place < first_layer for place in buckets), events


def check_all(mesh: DeviceMesh) -> None:
    for check in (
        check_buckets_become_ready_one_by_one,
        check_plans_agree,
        check_equal_to_plain,
        check_left_out_heads,
    ):
        check(mesh.get_rank())


def test_two_processes() -> None:
    run_on_ranks(check_all, NUM_RANKS)
