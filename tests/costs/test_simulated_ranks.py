"""Plans for ranks that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rockmate import MachineError, Planner, RockmateError, fully_shard, simulated_ranks
from rockmate.costs import machine as machines
from rockmate.costs.machine import load_machine

WIDTH, ROWS = 256, 1024


def planner_for(num_ranks: int) -> Planner:
    with torch.device("meta"):
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        x = torch.empty(ROWS, WIDTH)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x.square().mean()

    with simulated_ranks(num_ranks):
        return Planner(fully_shard(Net(), bucket_bytes=1), x, machine="h100")


def test_times_follow_from_ranks_and_links() -> None:
    """Four gathers and four reductions, by the formula of a ring at the described rates."""
    link = load_machine("h100").link
    value_bytes = WIDTH * WIDTH * 4

    def expected_ms(num_ranks: int, rate: float) -> float:
        sent = value_bytes * (num_ranks - 1) / num_ranks
        return 8 * (link["latency_us"] / 1e3 + sent / (rate * 1e6))

    base = planner_for(1).baseline_ms - expected_ms(1, link["gb_per_s"])
    for num_ranks, key in ((2, "gb_per_s"), (8, "gb_per_s"), (64, "gb_per_s_between_nodes")):
        found = planner_for(num_ranks).baseline_ms - base
        # A shard is written a little faster the smaller it is.
        assert found == pytest.approx(expected_ms(num_ranks, link[key]), rel=0.05)


def test_what_is_gathered_counts_whatever_the_number_of_ranks() -> None:
    few, many = planner_for(2), planner_for(256)
    assert few.baseline_peak_bytes == many.baseline_peak_bytes
    assert many.minimum_peak_bytes < many.baseline_peak_bytes
    assert not torch.distributed.is_initialized()


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_ranks is 0"), simulated_ranks(0):
        pass
    with (
        simulated_ranks(2),
        pytest.raises(RockmateError, match="there is one of 2 ranks"),
        simulated_ranks(4),
    ):
        pass
    text = (machines._shipped() / "h100.toml").read_text()
    path = tmp_path / "half.toml"
    path.write_text(text.replace("ranks_in_node = 8\n", ""))
    with pytest.raises(MachineError, match=r"lacks 'ranks_in_node' in \[link\]"):
        load_machine(path)
