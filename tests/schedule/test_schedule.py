"""`finish` removes dead runs and keeps every first draw of a random op."""

from __future__ import annotations

import torch
from made_of import made_of
from schedules import verify
from torch import Tensor, nn

from rockmate.graph.ir import Op
from rockmate.planning.step import capture_step
from rockmate.schedule.schedule import baseline_schedule, finish


@made_of(lambda: {"first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "dropout": nn.Dropout(0.5)})
class TwoDropouts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.first(x)))
        return self.dropout(self.second(torch.tanh(hidden))).square().mean()


def test_a_first_draw_stays_though_its_only_reader_is_dead() -> None:
    """Else its recomputation draws first, behind another op's draw, and the numbers change."""
    graph = capture_step(TwoDropouts().train(), torch.randn(4, 8)).graph
    forward: list[Op] = list(graph.forward_ops)
    draw, other = (op for op in forward if op.is_random)
    (reader,) = (op for op in graph.readers[draw.writes[0]] if op in forward)
    at = forward.index(reader) + 1
    # The reader's first result is recomputed before it is read, so its first run is dead.
    again = [*forward[:at], other, draw, reader, *(op for op in forward[at:] if op is not other)]
    schedule = finish(graph, [op.index for op in again], baseline_schedule(graph).backward)
    verify(graph, schedule)
    assert schedule.forward.count(draw.index) == 2
    assert schedule.forward.count(reader.index) == 1
