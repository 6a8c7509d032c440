"""The table against an exhaustive search, closed forms and known sequences.

Every plan against the replay.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from rotor_replay import replay

from rotor import Chain, Stage, Table


def random_chain(rng: random.Random, num_stages: int, *, scale: int = 1) -> Chain:
    """Return a chain of small random numbers, sizes about multiples of ``scale``."""

    def size(high: int) -> int:
        return rng.randint(0, high) * scale + (rng.randrange(scale) if scale > 1 else 0)

    inputs = [size(4) for _ in range(num_stages)] + [0]
    stages = []
    for s in range(num_stages):
        saved = inputs[s + 1] + size(5)
        stages.append(
            Stage(
                input_bytes=inputs[s],
                output_gradient_bytes=size(2),
                forward_ms=rng.randint(1, 5),
                forward_peak_bytes=inputs[s + 1] + size(9),
                saved_bytes=saved,
                keep_peak_bytes=saved + size(2),
                backward_ms=rng.randint(1, 12),
                backward_peak_bytes=saved + size(6),
            )
        )
    return tuple(stages)


def fastest(chain: Chain, budget: int) -> float:
    """Return the least time within ``budget`` over all persistent schedules.

    Dijkstra over what is held.

    A state is what is held (checkpoints, kept stages, deepest last), the boundary that stands at
    hand without being held (or None), and the stage whose gradient is in hand. Nothing here knows
    of subchains.
    """
    stages = chain
    x = [stage.input_bytes for stage in stages] + [0]
    start = ((("x", 0),), None, len(stages) - 1)
    done: set[object] = set()
    queue: list[tuple[float, int, tuple[tuple[tuple[str, int], ...], int | None, int]]] = [
        (0.0, 0, start)
    ]
    tie = 0
    while queue:
        time, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        held, loose, at = state
        if at < 0:
            return time
        bytes_held = sum(
            (x[a] if a else 0) if kind == "x" else stages[a].saved_bytes for kind, a in held
        )
        gradient = stages[at].output_gradient_bytes
        kind, a = held[-1]
        follow = []
        top = a if kind == "x" else a + 1
        if kind == "keep" and a == at and loose is None:
            stage = stages[a]
            if bytes_held - stage.saved_bytes + stage.backward_peak_bytes <= budget:
                left = held[:-1]
                if a and left[-1] == ("x", a):
                    left = left[:-1]
                follow.append((stage.backward_ms, (left, None, a - 1)))
        here = top if loose is None else loose
        if here <= at:
            beside = bytes_held + gradient + (0 if loose is None else x[here])
            stage = stages[here]
            if here < at and beside + stage.forward_peak_bytes <= budget:
                follow.append((stage.forward_ms, (held, here + 1, at)))
            if loose is not None:
                follow.append((0, ((*held, ("x", here)), None, at)))
            elif beside + stage.keep_peak_bytes <= budget:
                follow.append((stage.forward_ms, ((*held, ("keep", here)), None, at)))
        for cost, after in follow:
            tie += 1
            heapq.heappush(queue, (time + cost, tie, after))
    return math.inf


def check_plans(chain: Chain, table: Table) -> None:
    """Check that the plan at every breakpoint replays to the breakpoint's own bytes and time."""
    points = table.breakpoints()
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(points))
    for budget, time in points:
        result = replay(chain, table.sequence(budget))
        assert result.peak_bytes == budget
        assert result.time_ms == pytest.approx(time, rel=1e-9)


@pytest.mark.parametrize("seed", range(24))
def test_exact_table_equals_exhaustive_search_at_every_budget(seed: int) -> None:
    chain = random_chain(random.Random(seed), 1 + seed % 5)
    table = Table(chain, 60, num_slots=60)
    for budget in range(61):
        assert table.time_ms(budget) == fastest(chain, budget)
    check_plans(chain, table)


@pytest.mark.parametrize("seed", range(20))
def test_coarse_table_loses_at_most_the_bound_and_never_a_byte(seed: int) -> None:
    rng = random.Random(100 + seed)
    chain = random_chain(rng, 12, scale=13)
    top = 1500
    exact, coarse = Table(chain, top, num_slots=top), Table(chain, top, num_slots=25)
    assert coarse.minimum_bytes == exact.minimum_bytes
    loss = len(chain) * coarse.unit_bytes
    for budget in range(0, top + 1, 7):
        assert (
            exact.time_ms(budget) <= coarse.time_ms(budget) <= exact.time_ms(max(0, budget - loss))
        )
    check_plans(chain, exact)
    check_plans(chain, coarse)


def uniform_chain(num_stages: int) -> Chain:
    """Return a chain of one-byte boundaries where each step works in 1000 bytes."""
    stage = Stage(
        input_bytes=1,
        output_gradient_bytes=0,
        forward_ms=1.0,
        forward_peak_bytes=999,
        saved_bytes=1000,
        keep_peak_bytes=1000,
        backward_ms=0.0,
        backward_peak_bytes=1000,
    )
    return (stage,) * num_stages


def test_tiny_storages_beside_a_huge_one_cost_nothing() -> None:
    # 60 stages save a byte each, then one saves a GiB. At a slot for each byte kept, 60 of 64 slots
    # would go.
    bytes_of = {"forward_peak_bytes": 1, "saved_bytes": 1, "keep_peak_bytes": 1}
    tiny = replace(uniform_chain(1)[0], **bytes_of, backward_ms=2.0, backward_peak_bytes=2)
    sizes = dict.fromkeys(("saved_bytes", "keep_peak_bytes", "backward_peak_bytes"), 2**30)
    chain = (*[tiny] * 60, replace(tiny, **sizes))
    table = Table(chain, 2**30 + 60, num_slots=64)
    assert table.time_ms(2**30 + 60) == 61 * 3.0
    assert table.breakpoints()[-1] == (2**30 + 60, 61 * 3.0)
    check_plans(chain, table)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 7, 20, 35])
@pytest.mark.parametrize("num_checkpoints", [1, 2, 3, 5])
def test_uniform_chain_is_binomial(num_stages: int, num_checkpoints: int) -> None:
    """With c boundaries held at once and r reruns a stage, no chain longer than C(c + r, c) can be
    run.

    Griewank & Walther: the least number of forward-only steps of l stages is r l - C(c + r, c + 1),
    where C(c + r - 1, c) <= l <= C(c + r, c). The forward that each backward needs is not counted.
    """
    c, l = num_checkpoints, num_stages  # noqa: E741
    r = next(r for r in range(l + 1) if l <= math.comb(c + r, c))
    budget = 1000 + c  # x_0 is free, but the boundary in hand counts
    assert Table(uniform_chain(l), budget, budget).time_ms(budget) == (
        l + r * l - math.comb(c + r, c + 1)
    )


def equal_stages(num_stages: int, unit: int = 1) -> Chain:
    """Return a chain whose stages save 5 units, with boundaries of 1 unit."""
    stage = Stage(
        input_bytes=unit,
        output_gradient_bytes=unit,
        forward_ms=3.0,
        forward_peak_bytes=unit,
        saved_bytes=5 * unit,
        keep_peak_bytes=5 * unit,
        backward_ms=6.0,
        backward_peak_bytes=7 * unit,
    )
    return (stage,) * num_stages


@pytest.mark.parametrize(
    ("chain", "budget", "expected"),
    [
        (equal_stages(1), 7, "K0 B0"),
        (equal_stages(2), 100, "K0 K1 B1 B0"),
        (equal_stages(2), 12, "K0 K1 B1 B0"),
        (equal_stages(2), 11, "F0 K1 B1 K0 B0"),
        (equal_stages(3), 9, "F0 F1 K2 B2 K1 B1 K0 B0"),
        (equal_stages(3), 8, "F0 F1 K2 B2 F0 K1 B1 K0 B0"),
    ],
)
def test_known_sequences(chain: Chain, budget: int, expected: str) -> None:
    sequence = Table(chain, budget, num_slots=max(budget, 1)).sequence(budget)
    assert " ".join(map(str, sequence)) == expected


@pytest.mark.parametrize("num_slots", [1, 3, 40, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_minimum_is_exact_works_and_one_byte_less_does_not(seed: int, num_slots: int) -> None:
    chain = random_chain(random.Random(seed), 4, scale=7)
    minimum = Table(chain, 0, num_slots).minimum_bytes
    assert math.isfinite(fastest(chain, minimum))
    assert fastest(chain, minimum - 1) == math.inf
    for top in (minimum, minimum + 5, 3 * minimum):
        table = Table(chain, top, num_slots)
        assert table.minimum_bytes == minimum
        assert table.breakpoints()[0][0] == minimum
        assert replay(chain, table.sequence(minimum)).peak_bytes == minimum
        assert table.time_ms(minimum - 1) == math.inf


def test_same_input_gives_same_plan() -> None:
    chain = random_chain(random.Random(5), 14, scale=9)
    first, second = (Table(chain, 900, num_slots=50) for _ in range(2))
    assert first.breakpoints() == second.breakpoints()
    assert [first.sequence(b) for b, _ in first.breakpoints()] == [
        second.sequence(b) for b, _ in first.breakpoints()
    ]


def test_equal_times_in_any_order_of_addition_are_no_breakpoint() -> None:
    stage = replace(equal_stages(1)[0], forward_ms=0.1, backward_ms=0.7)
    chain = (stage,) * 20
    times = [time for _, time in Table(chain, 60).breakpoints()]
    assert all(a - b > 0.09 for a, b in pairwise(times))


def test_largest_sizes_are_reckoned_exactly() -> None:
    """A chain whose sizes add up to nearly the limit has the plans of the same chain in a smaller
    unit."""
    unit = 2**56
    small, large = equal_stages(6), equal_stages(6, unit)
    least, most = Table(small, 60, num_slots=60), Table(large, 60 * unit, num_slots=60)
    assert most.breakpoints() == tuple(
        (budget * unit, time) for budget, time in least.breakpoints()
    )
    assert most.minimum_bytes == least.minimum_bytes * unit
    for budget, _ in least.breakpoints():
        assert most.sequence(budget * unit) == least.sequence(budget)
