"""`bench.dtr_trace`: what is recorded of a step, against lists made by hand and the allocator."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bench import dtr_trace
from bench.dtr import HEURISTICS, Simulation
from bench.dtr_trace import peak_of, ratio_of, recorded, trace_of
from bench.measure import allocator_peak
from bench.models import dynamic


def test_a_step_is_recorded_as_its_ops() -> None:
    x = torch.ones(8, 4, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def step() -> torch.Tensor:
        loss = x.sin().t().exp().sum()
        loss.backward()
        return loss

    step()
    program = recorded(step)
    # sin, exp, sum; then ones_like, exp's (from expand, a view) and sin's with cos; and grad += ...
    assert [op.size for op in program[:3]] == [128.0, 128.0, 4.0]
    assert [op.inputs for op in program[:3]] == [(), (0,), (1,)]
    assert program[-1].size == 0  # written into the gradient, which is no output
    released = [each for op in program for each in op.releases]
    assert len(released) == len(set(released))
    assert set(range(len(program))) - set(released) >= {2}  # the loss lives on
    for number, op in enumerate(program):
        assert all(each < number for each in op.inputs)
        for each in op.releases:
            assert all(each not in later.inputs for later in program[number + 1 :])


def test_what_is_written_in_place_is_made_anew() -> None:
    def step() -> torch.Tensor:
        y = torch.ones(16).cos()
        y.mul_(2)
        return y.sum()

    program = recorded(step)
    ones, cosine, double, total = program
    assert (cosine.inputs, double.inputs, total.inputs) == ((0,), (1,), (2,))
    assert ones.size == cosine.size == double.size == 64
    assert 1 in double.releases


@pytest.mark.parametrize("name", ["halting", "unet-skips"])
def test_the_peak_is_the_allocators(name: str) -> None:
    made = dynamic.build(name, tiny=True)
    batch = made.make_batch(0)

    def step() -> None:
        torch.manual_seed(0)
        made.model(**batch).backward()

    step()
    made.model.zero_grad(set_to_none=False)
    measured = allocator_peak(partial(step))
    assert peak_of(trace_of(name)) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_simulations_of_a_trace(heuristic: str) -> None:
    program = trace_of("halting")
    peak = peak_of(program)
    assert ratio_of(program, peak, heuristic) == pytest.approx(1.0)
    simulation = Simulation(program, 0.7 * peak, heuristic)
    assert simulation.run() > sum(op.time for op in program)
    assert len(simulation.executed) > len(program)
    assert ratio_of(program, 0.01 * peak, heuristic) is None


def test_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "traces"
    assert dtr_trace.main(["--model", "halting", "--output", str(output)]) == 0
    text = output.with_suffix(".md").read_text()
    assert text == capsys.readouterr().out
    assert "## halting" in text
    assert "| 0.7 | 1." in text
    assert output.with_suffix(".png").stat().st_size > 1000
