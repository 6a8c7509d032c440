"""Graph breaks: refused by line, or the parts share the budget, which the whole step keeps."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import dynamo_networks
import pytest
import torch
from dynamo_networks import Deterministic, Looping, Network, Pair, batch
from helpers import assert_alike
from made_of import made_of
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from rockmate import InfeasibleBudgetError, Planner, UnsupportedModelError, planned_graphs

# Dynamo reads `.grad` of each input and hides the warning, which is an error in tests.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
ROWS = 256


def line_of(text: str) -> int:
    source = Path(dynamo_networks.__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(source, 1) if text in line)


def test_a_break_is_refused_by_its_line() -> None:
    pair = Pair(Network(break_at=2), {"budget": "2MB"})
    line = line_of("# the break")
    with pytest.raises(UnsupportedModelError, match=f"dynamo_networks.py:{line} in forward"):
        pair.compiled(batch(ROWS))


def test_a_frame_that_dynamo_leaves_is_refused_by_the_line_that_calls_a_part() -> None:
    pair = Pair(Looping(), {"budget": "2MB"})
    first = line_of("class Looping")
    with pytest.raises(UnsupportedModelError, match="in several graphs") as caught:
        pair.compiled(batch(ROWS))
    length = len(inspect.getsource(Looping).splitlines())
    lines = [f"dynamo_networks.py:{line} in forward" for line in range(first, first + length)]
    assert any(line in str(caught.value) for line in lines)


def test_a_break_that_leaves_one_part_with_gradients_is_no_matter() -> None:
    class Reporting(Network):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            torch._dynamo.graph_break()
            return loss

    pair = Pair(Reporting(), {"budget": 0.7})
    for seed in range(2):
        pair.check(batch(ROWS, seed), seed=seed)
    assert pair.peak_bytes(batch(ROWS)) <= planned_graphs()[-1].plan.budget_bytes


def one_graph(rows: int) -> Planner:
    """Plans for the same network without a break."""
    return Planner(Network(), batch(rows))


@pytest.mark.parametrize("network", [Network, Looping])
@pytest.mark.parametrize("share", [1.0, 0.85])
def test_parts_keep_the_budget_of_the_step(network: type[Network], share: float) -> None:
    whole_bytes = one_graph(ROWS).baseline_peak_bytes
    budget = int(share * whole_bytes)
    model = network(break_at=2) if network is Network else network()
    pair = Pair(model, {"budget": budget, "graph_breaks": "share"})
    for seed in range(3):  # the first step shows the parts
        pair.check(batch(ROWS, seed), seed=seed)
        if seed:
            assert pair.peak_bytes(batch(ROWS)) <= budget
    assert len(planned_graphs()) >= 2


def test_more_memory_is_used_for_less_recomputation() -> None:
    ratios = []
    for budget in ("365KB", "2MB"):
        torch.compiler.reset()
        pair = Pair(Network(2, break_at=1), {"budget": budget, "graph_breaks": "share"})
        for _ in range(2):
            pair.check(batch(ROWS))
        ratios.append(sum(len(graph.plan.schedule.backward) for graph in planned_graphs()[-2:]))
    assert ratios[1] < ratios[0]


def test_the_predicted_peak_of_a_step_is_the_measured_one(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(Network(break_at=2), {"budget": "2MB", "graph_breaks": "share"})
    with caplog.at_level(logging.WARNING, "rockmate"):
        for _ in range(2):
            pair.check(batch(ROWS))
    [record] = [each for each in caplog.records if "runs 2 graphs" in each.getMessage()]
    assert "their predicted peaks are" in record.getMessage()
    first, second = (graph.plan for graph in planned_graphs()[-2:])
    expected = max(
        first.simulation.saved_bytes + second.predicted_peak_bytes,
        first.predicted_peak_bytes + 4,  # and the loss, which the caller may hold
    )
    assert expected * 0.98 <= pair.peak_bytes(batch(ROWS)) <= expected


def test_a_fraction_is_one_of_all_parts() -> None:
    pair = Pair(Network(2, break_at=1), {"budget": 0.8, "graph_breaks": "share"})
    for _ in range(2):
        pair.check(batch(ROWS))
    baselines = [graph.plan.baseline_peak_bytes for graph in planned_graphs()[-2:]]
    assert pair.peak_bytes(batch(ROWS)) <= 0.8 * sum(baselines)


def test_other_sizes_have_shares_of_their_own() -> None:
    pair = Pair(Network(2, break_at=1), {"budget": "365KB", "graph_breaks": "share"})
    for rows in (256, 192) * 2:
        pair.check(batch(rows))
        pair.check(batch(rows))  # with shares
        assert pair.peak_bytes(batch(rows)) <= 365_000


def test_numbers_that_vary() -> None:
    pair = Pair(Network(2, break_at=1), {"budget": "1MB", "graph_breaks": "share"})
    for scale in (1.0, 2.5, 3.5):
        pair.check(batch(64), scale)


def test_too_small_a_budget_is_refused_with_what_the_parts_need() -> None:
    pair = Pair(Network(2, break_at=1), {"budget": "100KB", "graph_breaks": "share"})
    with pytest.raises(InfeasibleBudgetError, match=r"may need more\. Without") as first:
        pair.compiled(batch(ROWS))
    torch.compiler.reset()
    budget = first.value.minimum_bytes  # of the first part, which has room
    pair = Pair(Network(2, break_at=1), {"budget": budget, "graph_breaks": "share"})
    with pytest.raises(InfeasibleBudgetError) as both:
        pair.compiled(batch(ROWS))
    torch.compiler.reset()
    budget = both.value.minimum_bytes
    pair = Pair(Network(2, break_at=1), {"budget": budget, "graph_breaks": "share"})
    for _ in range(2):
        pair.check(batch(ROWS))
    assert pair.peak_bytes(batch(ROWS)) <= budget


def test_least_goes_above_the_budget_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    options = {"budget": "100KB", "graph_breaks": "share", "on_infeasible": "least"}
    pair = Pair(Network(2, break_at=1), options)
    with caplog.at_level(logging.WARNING, "rockmate"):
        for _ in range(2):
            pair.check(batch(ROWS))
    assert "the graphs of a step need" in caplog.text


# --- data-parallel training -----------------------------------------------------------------------


@made_of(lambda: {"layers": nn.ModuleList([nn.Linear(600, 600) for _ in range(4)])})
class Wide(nn.Module):
    """Parameters of several buckets."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.fixture
def _group(tmp_path: Path) -> object:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_compiled_model_in_data_parallel() -> None:
    pair = Pair(Deterministic(), {"budget": 0.8})
    pair.compiled = DistributedDataParallel(pair.compiled)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        pair.check(batch(16))


@pytest.mark.usefixtures("_group")
def test_data_parallel_that_is_compiled() -> None:
    x = torch.randn(8, 600)
    for options in ({"budget": "9MB"}, {"budget": "30MB", "graph_breaks": "share"}):
        torch.compiler.reset()
        model = Wide()
        parallel = DistributedDataParallel(model, bucket_cap_mb=2)
        compiled = torch.compile(parallel, backend="rockmate", options=options)
        if "graph_breaks" not in options:
            with pytest.raises(UnsupportedModelError, match="Compile the model first"):
                compiled(x)
            continue
        for _ in range(2):
            model.zero_grad()
            compiled(x).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(x).backward()
        assert_alike(gradients, [parameter.grad for parameter in model.parameters()])
