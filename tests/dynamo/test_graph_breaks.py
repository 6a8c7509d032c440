"""Graph breaks are refused by line."""

from __future__ import annotations

import inspect
from pathlib import Path

import dynamo_networks
import pytest
import torch
from dynamo_networks import Deterministic, Looping, Network, Pair, batch
from helpers import assert_alike
from made_of import made_of
from torch import Tensor, distributed, nn
from torch._dynamo import config
from torch.nn.parallel import DistributedDataParallel

from rockmate import UnsupportedModelError, planned_graphs

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
    x, model = torch.randn(8, 600), Wide()

    def compiled() -> nn.Module:
        torch.compiler.reset()
        parallel = DistributedDataParallel(model, bucket_cap_mb=2)
        return torch.compile(parallel, backend="rockmate", options={"budget": "30MB"})

    with pytest.raises(UnsupportedModelError, match="Compile the model first"):
        compiled()(x)
    with config.patch(optimize_ddp=False):  # as the error says
        compiled()(x).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert_alike(gradients, [parameter.grad for parameter in model.parameters()])
