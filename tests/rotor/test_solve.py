"""The table against an exhaustive search, closed forms and known sequences.

Every plan against the replay.
"""

from __future__ import annotations

import heapq
import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rotor import Chain, InfeasibleBudgetError, Option, Sequence, Stage, Table, replay, solve_table


def random_chain(
    rng: random.Random,
    num_stages: int,
    *,
    num_options: int = 2,
    gradients: bool = False,
    scale: int = 1,
) -> Chain:
    """Return a chain of small random numbers with spans of two, sizes about multiples of
    ``scale``."""

    def size(high: int) -> int:
        return rng.randint(0, high) * scale + (rng.randrange(scale) if scale > 1 else 0)

    inputs = [size(4) for _ in range(num_stages)] + [0]
    stages = tuple(
        Stage(
            input_bytes=inputs[s],
            output_gradient_bytes=size(2),
            forward_ms=rng.randint(1, 5),
            forward_peak_bytes=inputs[s + 1] + size(3),
            parameter_gradient_bytes=size(2) if gradients else 0,
        )
        for s in range(num_stages)
    )

    def option(last: int) -> Option:
        saved = inputs[last + 1] + size(5)
        return Option(
            saved_bytes=saved,
            forward_peak_bytes=saved + size(2),
            backward_peak_bytes=saved + size(6),
            forward_ms=rng.randint(1, 5),
            backward_ms=rng.randint(1, 12),
        )

    spans = {
        (s, s + more): tuple(option(s + more) for _ in range(rng.randint(1, num_options)))
        for more in (0, 1)
        for s in range(num_stages - more)
        if more == 0 or rng.random() < 0.7
    }
    return Chain(stages=stages, spans=spans)


def fastest(chain: Chain, budget: int) -> float:
    """Return the least time within ``budget`` over all persistent schedules.

    Dijkstra over what is held.

    A state is what is held (checkpoints, kept spans, deepest last), the boundary that stands at
    hand without being held (or None), and the stage whose gradient is in hand. Nothing here knows
    of subchains.
    """
    n = len(chain.stages)
    x = [stage.input_bytes for stage in chain.stages] + [0]
    start = ((("x", 0, 0, 0),), None, n - 1)
    done: set[object] = set()
    queue: list[
        tuple[float, int, tuple[tuple[tuple[str, int, int, int], ...], int | None, int]]
    ] = [(0.0, 0, start)]
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
            (x[a] if a else 0) if kind == "x" else chain.spans[a, b][o].saved_bytes
            for kind, a, b, o in held
        )
        bytes_held += sum(stage.parameter_gradient_bytes for stage in chain.stages[at + 1 :])
        gradient = chain.stages[at].output_gradient_bytes
        kind, a, b, o = held[-1]
        follow = []
        top = a if kind == "x" else b + 1
        if kind == "keep" and b == at and loose is None:
            option = chain.spans[a, b][o]
            if bytes_held - option.saved_bytes + option.backward_peak_bytes <= budget:
                left = held[:-1]
                if a and left[-1][:2] == ("x", a):
                    left = left[:-1]
                follow.append((option.backward_ms, (left, None, a - 1)))
        here = top if loose is None else loose
        if here <= at:
            beside = bytes_held + gradient + (0 if loose is None else x[here])
            stage = chain.stages[here]
            if here < at and beside + stage.forward_peak_bytes <= budget:
                follow.append((stage.forward_ms, (held, here + 1, at)))
            if loose is not None:
                follow.append((0, ((*held, ("x", here, 0, 0)), None, at)))
            else:
                for (first, last), options in chain.spans.items():
                    for index, option in enumerate(options):
                        if (
                            first == here
                            and last <= at
                            and beside + option.forward_peak_bytes <= budget
                        ):
                            follow.append(
                                (
                                    option.forward_ms,
                                    ((*held, ("keep", first, last, index)), None, at),
                                )
                            )
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


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_exact_table_equals_exhaustive_search_at_every_budget(seed: int, gradients: bool) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng, 1 + seed % 5, gradients=gradients)
    table = solve_table(chain, 60, num_slots=60)
    for budget in range(61):
        assert table.time_ms(budget) == fastest(chain, budget)
    check_plans(chain, table)


@pytest.mark.parametrize("seed", range(20))
def test_coarse_table_loses_at_most_the_bound_and_never_a_byte(seed: int) -> None:
    rng = random.Random(100 + seed)
    chain = random_chain(rng, 12, num_options=4, gradients=seed % 2 == 0, scale=13)
    top = 1500
    exact, coarse = solve_table(chain, top, num_slots=top), solve_table(chain, top, num_slots=25)
    assert coarse.minimum_bytes == exact.minimum_bytes
    loss = len(chain.stages) * coarse.unit_bytes
    for budget in range(0, top + 1, 7):
        assert (
            exact.time_ms(budget) <= coarse.time_ms(budget) <= exact.time_ms(max(0, budget - loss))
        )
    check_plans(chain, exact)
    check_plans(chain, coarse)


def uniform_chain(num_stages: int) -> Chain:
    """Return a chain of one-byte boundaries where each step works in 1000 bytes."""
    stage = Stage(input_bytes=1, output_gradient_bytes=0, forward_ms=1.0, forward_peak_bytes=999)
    option = Option(
        saved_bytes=1000,
        forward_peak_bytes=1000,
        backward_peak_bytes=1000,
        forward_ms=0.0,
        backward_ms=0.0,
    )
    return Chain(stages=(stage,) * num_stages, spans={(s, s): (option,) for s in range(num_stages)})


def test_tiny_storages_beside_a_huge_one_cost_nothing() -> None:
    # 60 stages save a byte each, then one saves a GiB. At a slot for each byte kept, 60 of 64 slots
    # would go.
    tiny = Option(
        saved_bytes=1, forward_peak_bytes=1, backward_peak_bytes=2, forward_ms=1.0, backward_ms=2.0
    )
    huge = Option(
        saved_bytes=2**30,
        forward_peak_bytes=2**30,
        backward_peak_bytes=2**30,
        forward_ms=1.0,
        backward_ms=2.0,
    )
    stage = Stage(input_bytes=1, output_gradient_bytes=0, forward_ms=1.0, forward_peak_bytes=1)
    chain = Chain(
        stages=(stage,) * 61, spans={(s, s): (tiny if s < 60 else huge,) for s in range(61)}
    )
    table = solve_table(chain, 2**30 + 60, num_slots=64)
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
    assert solve_table(uniform_chain(l), budget, budget).time_ms(budget) == r * l - math.comb(
        c + r, c + 1
    )


def text_at(chain: Chain, budget: int) -> str:
    return str(solve_table(chain, budget, num_slots=max(budget, 1)).sequence(budget))


def two_options(num_stages: int, unit: int = 1) -> Chain:
    """Return a chain whose stages save 5 units, or 2 and one more millisecond.

    Boundaries have 1 unit.
    """
    stage = Stage(
        input_bytes=unit, output_gradient_bytes=unit, forward_ms=3.0, forward_peak_bytes=unit
    )
    peaks = {"forward_peak_bytes": 5 * unit, "backward_peak_bytes": 7 * unit}
    full = Option(saved_bytes=5 * unit, forward_ms=3.0, backward_ms=6.0, **peaks)
    lean = Option(saved_bytes=2 * unit, forward_ms=3.0, backward_ms=7.0, **peaks)
    return Chain(
        stages=(stage,) * num_stages, spans={(s, s): (full, lean) for s in range(num_stages)}
    )


def with_span() -> Chain:
    """Return two stages with a large boundary between them, which the option of the span (0, 1)
    drops."""
    stages = tuple(
        Stage(input_bytes=size, output_gradient_bytes=1, forward_ms=1.0, forward_peak_bytes=20)
        for size in (1, 20)
    )
    own = Option(
        saved_bytes=20,
        forward_peak_bytes=20,
        backward_peak_bytes=22,
        forward_ms=1.0,
        backward_ms=2.0,
    )
    both = Option(
        saved_bytes=3,
        forward_peak_bytes=20,
        backward_peak_bytes=22,
        forward_ms=2.0,
        backward_ms=5.0,
    )
    return Chain(stages=stages, spans={(0, 0): (own,), (1, 1): (own,), (0, 1): (both,)})


@pytest.mark.parametrize(
    ("chain", "budget", "expected"),
    [
        (two_options(1), 7, "K0.0 B0.0"),
        (two_options(2), 100, "K0.0 K1.0 B1.0 B0.0"),
        (two_options(2), 12, "K0.0 K1.0 B1.0 B0.0"),
        (two_options(2), 11, "K0.1 K1.0 B1.0 B0.1"),
        (two_options(2), 8, "F0 K1.0 B1.0 K0.0 B0.0"),
        (two_options(3), 9, "F0 F1 K2.0 B2.0 K1.0 B1.0 K0.0 B0.0"),
        (two_options(3), 8, "F0 F1 K2.0 B2.0 F0 K1.0 B1.0 K0.0 B0.0"),
        (with_span(), 42, "K0.0 K1.0 B1.0 B0.0"),
        (with_span(), 41, "K0-1.0 B0-1.0"),
    ],
)
def test_known_sequences(chain: Chain, budget: int, expected: str) -> None:
    assert text_at(chain, budget) == expected


@pytest.mark.parametrize("num_slots", [1, 3, 40, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_minimum_is_exact_works_and_one_byte_less_does_not(seed: int, num_slots: int) -> None:
    chain = random_chain(random.Random(seed), 4, gradients=True, scale=7)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve_table(chain, 0, num_slots).sequence(0)
    minimum = caught.value.minimum_bytes
    assert caught.value.budget_bytes == 0
    assert math.isfinite(fastest(chain, minimum))
    assert fastest(chain, minimum - 1) == math.inf
    for top in (minimum, minimum + 5, 3 * minimum):
        table = solve_table(chain, top, num_slots)
        assert table.minimum_bytes == minimum
        assert table.breakpoints()[0][0] == minimum
        assert replay(chain, table.sequence(minimum)).peak_bytes == minimum
        assert table.time_ms(minimum - 1) == math.inf
        with pytest.raises(InfeasibleBudgetError, match=f"{minimum - 1}.*{minimum}"):
            table.sequence(minimum - 1)


def test_same_input_gives_same_plan() -> None:
    chain = random_chain(random.Random(5), 14, num_options=4, scale=9)
    first, second = (solve_table(chain, 900, num_slots=50) for _ in range(2))
    assert first.breakpoints() == second.breakpoints()
    assert [first.sequence(b) for b, _ in first.breakpoints()] == [
        second.sequence(b) for b, _ in first.breakpoints()
    ]
    assert isinstance(first.sequence(900), Sequence)


def test_equal_times_in_any_order_of_addition_are_no_breakpoint() -> None:
    option = Option(
        saved_bytes=2, forward_peak_bytes=2, backward_peak_bytes=3, forward_ms=0.1, backward_ms=0.7
    )
    stage = Stage(input_bytes=1, output_gradient_bytes=1, forward_ms=0.1, forward_peak_bytes=1)
    chain = Chain(stages=(stage,) * 20, spans={(s, s): (option,) for s in range(20)})
    times = [time for _, time in solve_table(chain, 60).breakpoints()]
    assert all(a - b > 0.09 for a, b in pairwise(times))


@pytest.mark.parametrize(
    ("budget", "num_slots", "message"),
    [
        (-1, 10, "max_budget_bytes is -1; it must be at least 0"),
        (10.0, 10, r"max_budget_bytes is 10\.0; it must be a whole number \(int\)"),
        (math.nan, 10, "max_budget_bytes is nan; it must be a whole number"),
        (math.inf, 10, "max_budget_bytes is inf; it must be a whole number"),
        ("10", 10, "max_budget_bytes is '10'; it must be a whole number"),
        (None, 10, "max_budget_bytes is None; it must be a whole number"),
        (2**62 + 1, 10, rf"max_budget_bytes is {2**62 + 1}; it must be at most 2\*\*62, {2**62}"),
        (10, 0, "num_slots is 0; it must be at least 1"),
        (10, 1.5, r"num_slots is 1\.5; it must be a whole number"),
        (10, True, "num_slots is True; it must be a whole number"),
    ],
)
def test_bad_arguments(budget: Any, num_slots: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_table(two_options(1), budget, num_slots)


@pytest.mark.parametrize("budget", [math.nan, 7.5, "7", None])
def test_budget_that_is_no_whole_number(budget: Any) -> None:
    table = solve_table(two_options(1), 10)
    for ask in (table.time_ms, table.sequence):
        with pytest.raises(
            ValueError, match=f"budget_bytes is {budget!r}; it must be a whole number"
        ):
            ask(budget)


def test_whole_numbers_of_numpy_are_taken() -> None:
    ten: Any = np.int64(10)
    assert solve_table(two_options(1), ten, num_slots=ten).time_ms(ten) == solve_table(
        two_options(1), 10, num_slots=10
    ).time_ms(10)


def test_largest_sizes_are_reckoned_exactly() -> None:
    """A chain whose sizes add up to nearly the limit has the plans of the same chain in a smaller
    unit."""
    unit = 2**56
    small, large = two_options(6), two_options(6, unit)
    assert 2**61 < large._peak_bound_bytes() <= 2**62
    least, most = solve_table(small, 60, num_slots=60), solve_table(large, 60 * unit, num_slots=60)
    assert most.breakpoints() == tuple(
        (budget * unit, time) for budget, time in least.breakpoints()
    )
    assert most.minimum_bytes == least.minimum_bytes * unit
    for budget, _ in least.breakpoints():
        assert most.sequence(budget * unit) == least.sequence(budget)


def test_budget_above_the_table() -> None:
    table = solve_table(two_options(1), 10)
    for ask in (table.time_ms, table.sequence):
        with pytest.raises(ValueError, match="budget_bytes is 11; the table goes up to 10"):
            ask(11)
