"""`bench.dtr`: runs that another count follows op by op, and the paper's theorem."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench import dtr
from bench.dtr import HEURISTICS, Op, OutOfBudgetError, Simulation, linear_network, ops_for_each


def random_program(seed: int) -> list[Op]:
    draw = random.Random(seed)
    count = draw.randint(4, 20)
    inputs = [
        tuple(draw.sample(range(number), min(number, draw.randint(0, 3))))
        for number in range(count)
    ]
    last = {each: number for number, read in enumerate(inputs) for each in read}
    return [
        Op(
            read, draw.choice([1.0, 2.0, 5.0]), draw.choice([1.0, 3.0]),
            tuple(each for each in read if last[each] == number),
        )
        for number, read in enumerate(inputs)
    ]  # fmt: skip


def follow(program: list[Op], simulation: Simulation, budget: float) -> None:
    """Keeps what the program has not released, less evictions; each op finds its inputs."""
    live: set[int] = set()
    next_op, released = 0, set[int]()
    evictions = list(simulation.evicted_at)
    for position, number in enumerate(simulation.executed):
        while evictions and evictions[0][0] == position:
            live.remove(evictions.pop(0)[1])
        assert live.issuperset(program[number].inputs)
        live.add(number)
        # What was made again for another output alone may be gone: it takes no more room than this.
        needed = {number, *program[number].inputs}
        assert sum(program[each].size for each in (live - released) | needed) <= budget
        if number == next_op:
            next_op += 1
            released.update(program[number].releases)
    assert next_op == len(program)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_each_op_finds_its_inputs_within_the_budget(heuristic: str) -> None:
    num_evicted = 0
    for seed in range(100):
        program = random_program(seed)
        whole = sum(op.size for op in program)
        for share in (0.5, 0.7, 1.0):
            simulation = Simulation(program, share * whole, heuristic)
            try:
                time = simulation.run()
            except OutOfBudgetError:
                assert share < 1
                continue
            follow(program, simulation, share * whole)
            assert time == sum(program[number].time for number in simulation.executed)
            num_evicted += len(simulation.evicted_at)
            if share == 1.0:
                assert simulation.executed == list(range(len(program)))
    assert num_evicted > 20


def test_linear_networks_take_as_many_ops_as_the_paper_says() -> None:
    assert len(linear_network(9)) == 18
    ratios = {name: [ops_for_each(size, name) for size in (64, 256)] for name in HEURISTICS}
    for name in ("h_DTR", "h_DTR_eq"):
        assert ratios[name][1] < 1.1 * ratios[name][0] < 1.7
    for name in ("h_DTR_local", "LRU", "largest"):
        assert ratios[name][1] > 1.3 * ratios[name][0]


def test_page_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dtr.main(["--layers", "16", "--output", str(tmp_path / "dtr")]) == 0
    assert (tmp_path / "dtr.md").read_text() == capsys.readouterr().out
    assert "| 16 | 1.22 |" in (tmp_path / "dtr.md").read_text()
    assert (tmp_path / "dtr.png").stat().st_size > 1000
