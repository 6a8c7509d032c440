"""Collectives of a sharded plan that run beside other ops, as a trace of real steps shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import needs_gloo, run_on_ranks
from sharded_net import assert_equal, batch, net, planned, sharded, trained
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from rockmate import Planner, simulated_ranks
from rockmate.ops import gathering
from rockmate.schedule.flights import Flights, flights_of, overlapped_ms

pytestmark = needs_gloo

ISSUES = {"all_gather_into_tensor_out": "gather", "all_reduce_": "reduce"}
WORK = {"mm", "addmm", "native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward"}


class Trace(TorchDispatchMode):
    """The ops of a step in order, collectives with the address of their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        result = func(*args, **(kwargs or {}))
        if name in ISSUES:
            self.events.append((ISSUES[name], result.data_ptr()))
        elif name == "wait_tensor":
            self.events.append(("wait", args[0].data_ptr()))
        else:
            self.events.append((name, 0))
        return result


def flown_over(events: list[tuple[str, int]], kind: str) -> list[list[str]]:
    """For each collective of a kind, the names of the events between its issue and its wait."""
    found = []
    for begin, (name, address) in enumerate(events):
        if name == kind:
            end = events.index(("wait", address), begin)
            found.append([each for each, _ in events[begin + 1 : end]])
    return found


def check_trace(mesh: DeviceMesh) -> None:
    """All but the first gathers and all but the last reductions run beside work of a layer."""
    for budget in (1.0, 0.4):
        # Estimated costs: measured ones of a busy machine let a gather fly over a slow small op.
        module = planned(sharded(net(), mesh), budget, machine="cpu-avx2")
        module(batch()).backward()
        with Trace() as forward:
            loss = module(batch())
        with Trace() as backward:
            loss.backward()
        first, *others = flown_over(forward.events, "gather")
        assert not WORK.intersection(first)
        assert len(others) == 3  # the embedding's lies before the first layer's
        assert all(WORK.intersection(each) for each in others)
        again = flown_over(backward.events, "gather")
        assert bool(again) == (budget == 0.4)
        *others, last = flown_over(backward.events, "reduce")
        assert not WORK.intersection(last)
        assert len(others) == 4
        # The reduction of the layer before the embedding ends with the backward. Where memory is
        # short, layers run where there is room, and others may end without work beside them.
        if budget == 1.0:
            assert all(WORK.intersection(each) for each in others[:-1])
        else:
            assert any(WORK.intersection(each) for each in others + again)


def check_training(mesh: DeviceMesh) -> None:
    """The same bits, also where a rank is late for each collective."""
    rank = mesh.get_local_rank()
    theirs = sharded(net(), mesh)
    expected = trained(theirs, theirs, rank)
    model = sharded(net(), mesh)
    module = planned(model, 0.4)
    assert module.plan.flights.other_end

    class Late(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if rank and "_c10d_functional" in str(func):
                torch.ones(300, 300).mm(torch.ones(300, 300))
            return func(*args, **(kwargs or {}))

    with Late():
        found = trained(module, model, rank)
    assert_equal(found, expected)


def check_own_machine(mesh: DeviceMesh) -> None:
    """A plan for another machine is not taken for one by measured times."""
    plans = [
        planned(sharded(net(), mesh), 0.45, machine=machine).plan
        for machine in ("cpu-avx2", None, "cpu-avx2")
    ]
    assert plans[0].to_text() == plans[2].to_text()
    assert plans[0].predicted_ms != plans[1].predicted_ms


def check_two_forwards(mesh: DeviceMesh) -> None:
    """One backward of two forwards, and hooks that see each gradient once and whole."""
    found = []
    for is_ours in (False, True):
        model = sharded(net(2), mesh)
        module = planned(model, 0.5, in_flight=2) if is_ours else model
        seen: list[Any] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(seen.append)
        torch.manual_seed(mesh.get_local_rank())
        (module(batch(1)) + module(batch(2))).backward()
        assert len(seen) == len({id(each) for each in seen}) == len(list(model.parameters()))
        found.append([each.grad.full_tensor() for each in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


CHECKS = [check_trace, check_training, check_own_machine, check_two_forwards]


@pytest.mark.parametrize("check", CHECKS, ids=[check.__name__ for check in CHECKS])
def test_two_processes(check: Any) -> None:
    run_on_ranks(check, 2)


@pytest.fixture(scope="module")
def planner() -> Planner:
    with simulated_ranks(2):
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(gathering, "BUCKET_BYTES", 1)
        planner = Planner(sharded(net()), batch(), numerics="bitwise")
        monkeypatch.undo()
        return planner


@pytest.mark.parametrize("budget", [1.0, 0.6, 0.4, 0.0])
def test_flights_stay_below_the_peak_and_save_time(planner: Planner, budget: float) -> None:
    """Memory at each run, added up here from the schedule's own and that of flights."""
    plan = planner.plan(max(int(budget * planner.baseline_peak_bytes), planner.minimum_peak_bytes))
    flights, steps = plan.flights, plan.schedule.steps
    live = [*plan.simulation.live_bytes]
    half = len(plan.schedule.forward)
    for position, other in flights.other_end.items():
        op = plan.graph.ops[steps[position]]
        flown = range(other, position) if other < position else range(position + 1, other + 1)
        assert (position < half) == (other < half)
        for each in flown:
            live[each] += plan.costs.first[op.index].overhead_bytes
            live[each] += sum(storage.num_bytes for storage in op.writes)
    assert max(live) == plan.predicted_peak_bytes
    order = flights.issue_order(plan.schedule)
    assert sorted(order) == [*range(len(steps))]
    gathers = [each for each in order if "gather" in plan.snapshot.ops[steps[each]].call]
    assert gathers == sorted(gathers)
    alone = overlapped_ms(plan.graph, plan.schedule, plan.costs, Flights())
    assert alone == pytest.approx(plan.predicted_ms)
    assert plan.overlapped_ms < alone


def test_a_model_of_one_process_has_no_flights() -> None:
    plan = Planner(net(1), batch()).plan(0.8)
    assert not plan.flights.other_end
    assert plan.overlapped_ms == pytest.approx(plan.predicted_ms)
    found = flights_of(plan.graph, plan.schedule, plan.costs, plan.simulation)
    assert found == Flights()
