"""`checkmate.solve_staged`: against exhaustive search, replay, known schedules.

Statuses, bounds.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import replace
from itertools import combinations
from typing import Any

import highspy
import pytest
from checkmate_cases import Builder

import checkmate
from checkmate import StagedOp, StagedProblem, StagedSolution, Status
from checkmate.staged import in_use_bytes


def transformer(num_layers: int, seed: int = 1) -> StagedProblem:
    """Forward and backward of so many layers (12 and 16 ops each) and a head.

    Value 0 is the input.
    """
    builder = Builder(random.Random(seed), StagedOp)
    op, x, layers = builder.op, builder.given(0), []

    def grad(time_ms: float, inputs: list[int], units: float) -> int:
        return op(time_ms, inputs, units, recomputable=False)[0]

    for _ in range(num_layers):
        n1, s1 = op(0.05, [x], 1, 1 / 256)
        (qkv,) = op(0.6, [n1], 3)
        (scores,) = op(0.3, [qkv], 4)
        (weights,) = op(0.1, [scores], 4)
        (mixed,) = op(0.3, [weights, qkv], 1)
        (out,) = op(0.2, [mixed], 1)
        (h,) = op(0.03, [x, out], 1)
        n2, s2 = op(0.05, [h], 1, 1 / 256)
        (wide,) = op(0.8, [n2], 4)
        (active,) = op(0.1, [wide], 4)
        (narrow,) = op(0.8, [active], 1)
        layers.append((x, n1, s1, qkv, weights, mixed, h, n2, s2, wide, active))
        (x,) = op(0.03, [h, narrow], 1)
    n, s = op(0.05, [x], 1, 1 / 256)
    (logits,) = op(1.0, [n], 8)
    (logs,) = op(0.2, [logits], 8)
    (loss,) = op(0.01, [logs], 1 / 65536)
    d_logits = grad(0.2, [logs], 8)
    grad(1.0, [d_logits, n], 2)
    d = grad(0.1, [grad(1.0, [d_logits], 1), x, s], 1)
    for x, n1, s1, qkv, weights, mixed, h, n2, s2, wide, active in reversed(layers):
        grad(0.8, [d, active], 1)
        d_wide = grad(0.15, [grad(0.8, [d], 4), wide], 4)
        grad(0.8, [d_wide, n2], 1)
        d_h = grad(0.03, [d, grad(0.1, [grad(0.8, [d_wide], 1), h, s2], 1)], 1)
        grad(0.2, [d_h, mixed], 0.25)
        d_mixed = grad(0.2, [d_h], 1)
        d_scores = grad(0.15, [grad(0.3, [d_mixed, qkv], 4), weights], 4)
        d_qkv = grad(0.9, [d_scores, qkv, d_mixed, weights], 3)
        grad(0.6, [d_qkv, n1], 0.75)
        d = grad(0.03, [d_h, grad(0.1, [grad(0.6, [d_qkv], 1), x, s1], 1)], 1)
    return StagedProblem(
        ops=tuple(builder.ops), value_bytes=tuple(builder.value_bytes), held=frozenset({loss})
    )


def random_step(seed: int, num_ops: int = 6) -> StagedProblem:
    """A forward with branches, then a backward that reads it in reverse.

    Several outputs, free ops, zero bytes.
    """
    rng = random.Random(seed)
    sizes, ops = [0], []
    latest, made = 0, []
    num_forward = (num_ops + 1) // 2 + rng.choice((0, 1))
    for _ in range(num_forward):
        inputs = set(rng.sample(range(len(sizes)), min(len(sizes), rng.choice((1, 1, 2)))))
        inputs |= {latest} if rng.random() < 0.7 else set()
        outputs = tuple(range(len(sizes), len(sizes) + rng.choice((1, 1, 1, 2))))
        sizes += [rng.choice((0, 1, 2, 3, 4, 8)) for _ in outputs]
        made += outputs
        latest = outputs[-1]
        ops.append(
            StagedOp(
                time_ms=rng.choice((0, 1, 2, 3, 7)) * 0.1,
                inputs=tuple(sorted(inputs)),
                outputs=outputs,
                recomputable=rng.random() > 0.1,
                overhead_bytes=rng.choice((0, 0, 1, 3)),
            )
        )
    for index in range(num_ops - num_forward):
        inputs = {latest, made[max(0, len(made) - 1 - index * 2)]} | (
            {rng.choice(made)} if rng.random() < 0.4 else set()
        )
        latest = len(sizes)
        sizes.append(rng.choice((1, 2, 3)))
        ops.append(
            StagedOp(
                time_ms=0.1,
                inputs=tuple(sorted(inputs)),
                outputs=(latest,),
                recomputable=rng.random() < 0.2,
                overhead_bytes=rng.choice((0, 0, 2)),
            )
        )
    held = {latest} | {value for value in made if rng.random() < 0.08}
    return StagedProblem(ops=tuple(ops), value_bytes=tuple(sizes), held=frozenset(held))


def exhaustive(
    problem: StagedProblem, budget_bytes: int, *, first: int = 0, any_order: bool = False
) -> float | None:
    """The least time by Dijkstra's search over (first runs done, last op run again in this stage,
    live values).

    Any value may be dropped before any run. With `any_order`, recomputed ops of a stage may run in
    any order and more than once.
    """
    order = range(len(problem.ops))
    made = {value for op in problem.ops for value in op.outputs}
    sizes = problem.value_bytes
    best: dict[tuple[int, int, frozenset[int]], float] = {(0, -1, frozenset()): 0.0}
    heap: list[tuple[float, int, int, tuple[int, ...]]] = [(0.0, 0, -1, ())]
    while heap:
        time_ms, stage, last, values = heapq.heappop(heap)
        live = frozenset(values)
        if best[stage, last, live] < time_ms:
            continue
        if stage == len(order):
            return time_ms
        for index in order[: stage + 1]:
            op, recompute = problem.ops[index], index != order[stage]
            inputs = set(op.inputs) & made
            if recompute and (
                not op.recomputable or order[stage] < first or (index <= last and not any_order)
            ):
                continue
            if not inputs <= live:
                continue
            after = (stage, -1 if any_order else index) if recompute else (stage + 1, -1)
            copies = sum(
                sizes[value] for value in op.outputs if recompute and value in problem.held
            )
            loose = sorted(live - problem.held - inputs - set(op.outputs))
            for count in range(len(loose) + 1):
                for dropped in combinations(loose, count):
                    kept = (live | set(op.outputs)) - set(dropped)
                    if (
                        sum(sizes[value] for value in kept) + copies + op.overhead_bytes
                        > budget_bytes
                    ):
                        continue
                    state, cost = (*after, kept), time_ms + op.time_ms
                    if cost < best.get(state, float("inf")):
                        best[state] = cost
                        heapq.heappush(heap, (cost, *after, tuple(sorted(kept))))
    return None


def replay_peak(problem: StagedProblem, steps: tuple[int, ...]) -> int:
    """The peak by asking of each value at each step whether it is in use there."""

    def next_event(value: int, position: int) -> str:
        for index in steps[position + 1 :]:
            if value in problem.ops[index].inputs:
                return "read"
            if value in problem.ops[index].outputs:
                return "made"
        return "end"

    peak, made = 0, set()
    for position, index in enumerate(steps):
        op = problem.ops[index]
        used = op.overhead_bytes + sum(
            problem.value_bytes[v] for v in made & problem.held & set(op.outputs)
        )
        made |= set(op.outputs)
        for value in made:
            in_use = value in problem.held or value in op.inputs or value in op.outputs
            if in_use or next_event(value, position) == "read":
                used += problem.value_bytes[value]
        peak = max(peak, used)
    return peak


def solve_staged(problem: StagedProblem, budget_bytes: int, **options: Any) -> StagedSolution:
    """The answer, whose schedule is replayed if there is one."""
    solution = checkmate.solve_staged(problem, budget_bytes, **options)
    if solution.found:
        assert_valid(problem, solution)
        assert solution.peak_bytes == replay_peak(problem, solution.steps) <= budget_bytes
        assert solution.bound_ms <= solution.time_ms
    return solution


def assert_valid(problem: StagedProblem, solution: StagedSolution) -> None:
    """Reads find their values, and all ops run."""
    available = set(range(len(problem.value_bytes)))
    available -= {value for op in problem.ops for value in op.outputs}
    ran = set()
    for index in solution.steps:
        op = problem.ops[index]
        assert index not in ran or op.recomputable
        assert available.issuperset(op.inputs)
        ran.add(index)
        available.update(op.outputs)
    assert len(ran) == len(problem.ops)
    assert problem.held <= available
    runs = [problem.ops[index].time_ms for index in solution.steps]
    assert solution.time_ms == pytest.approx(sum(runs), rel=1e-12)


def assert_staged(problem: StagedProblem, solution: StagedSolution) -> None:
    """First runs in order; within a stage each op at most once, in order."""
    assert list(dict.fromkeys(solution.steps)) == [*range(len(problem.ops))]
    ran, last = set(), -1
    for index in solution.steps:
        if index in ran:
            assert index > last
            last = index
        else:
            ran.add(index)
            last = -1


def test_equals_exhaustive_search_at_every_budget() -> None:
    """From loose over each binding budget to the first infeasible one, with and without the
    restriction."""
    recomputing = infeasible = 0
    num_cases = 150
    for seed in range(num_cases):
        problem = random_step(seed, num_ops=5 + seed % 3)
        once = range(len(problem.ops))
        loose = replay_peak(problem, tuple(once))
        first = len(problem.ops) // 2 if seed % 3 == 0 else 0
        for budget in range(loose, -1, -1):
            least = exhaustive(problem, budget, first=first)
            solution = solve_staged(problem, budget, first_recompute_op=first)
            if least is None:
                found = solution.status, solution.steps, solution.bound_ms
                assert found == (Status.INFEASIBLE, (), float("inf"))
                infeasible += 1
                break
            assert solution.status is Status.OPTIMAL
            assert solution.time_ms == pytest.approx(least, abs=1e-9)
            assert solution.bound_ms == pytest.approx(least, abs=1e-6)
            assert solution.bound_ms <= solution.time_ms
            assert solution.peak_bytes == replay_peak(problem, solution.steps) <= budget
            assert_staged(problem, solution)
            recomputing += len(solution.steps) > len(once)
    assert recomputing >= num_cases // 3
    assert infeasible >= num_cases // 2


def test_a_chain_has_the_known_schedule() -> None:
    """Forward 0 1 2 of sizes 4, backward 3 4 5 which read them last to first.

    Gradients of size 1, the last one held.
    """
    forward = [StagedOp(time_ms=float(i + 1), inputs=(i,), outputs=(i + 1,)) for i in range(3)]
    backward = [
        StagedOp(
            time_ms=1.0,
            inputs=(3 + i, 3 - i),
            outputs=(4 + i,),
            recomputable=False,
            overhead_bytes=2,
        )
        for i in range(3)
    ]
    problem = StagedProblem(
        ops=(*forward, *backward), value_bytes=(0, 4, 4, 4, 1, 1, 1), held=frozenset({6})
    )
    assert solve_staged(problem, 15).steps == (0, 1, 2, 3, 4, 5)
    binding = solve_staged(problem, 14)
    assert (binding.steps, binding.time_ms, binding.peak_bytes) == ((0, 1, 2, 3, 0, 4, 5), 10.0, 12)
    assert solve_staged(problem, 8).status is Status.INFEASIBLE


def chain(sizes: tuple[int, ...], overhead_bytes: int, read: tuple[int, ...]) -> StagedProblem:
    """Three ops one after the other, a fourth that takes much room, and a reader of values."""
    return StagedProblem(
        ops=(
            StagedOp(time_ms=1.0, inputs=(), outputs=(0,)),
            StagedOp(time_ms=2.0, inputs=(0,), outputs=(1,)),
            StagedOp(time_ms=3.0, inputs=(1,), outputs=(2,)),
            StagedOp(time_ms=4.0, inputs=(), outputs=(), overhead_bytes=overhead_bytes),
            StagedOp(time_ms=5.0, inputs=read, outputs=()),
        ),
        value_bytes=sizes,
    )


def test_a_chain_made_again_holds_only_what_is_made() -> None:
    """Op 3 leaves room for nothing.

    Then value 2 is not yet there while value 0 is made anew, nor value 0 any more with it.
    """
    problem = chain((8, 1, 8), 9, (2,))
    solution = solve_staged(problem, 9)
    found = solution.steps, solution.peak_bytes, solution.time_ms
    assert found == ((0, 1, 2, 3, 0, 1, 2, 4), 9, 21.0)


def test_stages_are_a_restriction() -> None:
    """Before op 4 everything is made again.

    Within 12 bytes only if op 0 runs twice there, which no stage does.
    """
    problem = chain((4, 8, 1), 12, (0, 2))
    assert replay_peak(problem, (0, 1, 2, 3, 0, 1, 2, 0, 4)) == 12
    assert exhaustive(problem, 12, any_order=True) == 22.0
    assert exhaustive(problem, 12) is None
    assert solve_staged(problem, 12).status is Status.INFEASIBLE
    assert solve_staged(problem, 13).steps == (0, 1, 2, 3, 0, 4)


def test_recomputation_only_from_an_op_on() -> None:
    """Op 2 has no room for value 1, which op 3 reads.

    It must be made again before op 4, the first of the backward.
    """
    reads = ((), (1,), (2,), (3, 1), (4, 2))
    ops = tuple(
        StagedOp(time_ms=1.0, inputs=read, outputs=(index,)) for index, read in enumerate(reads, 1)
    )
    problem = StagedProblem(ops=ops, value_bytes=(0, 4, 4, 9, 1, 1))
    free, restricted = solve_staged(problem, 14), solve_staged(problem, 14, first_recompute_op=4)
    assert free.steps == (0, 1, 2, 0, 3, 1, 4)
    assert restricted.status is Status.INFEASIBLE
    assert solve_staged(problem, 17, first_recompute_op=4).steps == (0, 1, 2, 3, 1, 4)


def test_held_values_and_their_copies() -> None:
    ops = (
        StagedOp(time_ms=1.0, inputs=(), outputs=(0, 1)),
        StagedOp(time_ms=4.0, inputs=(0,), outputs=(2,)),
        StagedOp(time_ms=8.0, inputs=(1,), outputs=(3,), overhead_bytes=90),
    )
    problem = StagedProblem(ops=ops, value_bytes=(10, 10, 100, 10), held=frozenset({0}))
    solution = solve_staged(problem, 120)
    assert (solution.steps, solution.time_ms, solution.peak_bytes) == ((0, 1, 2), 13.0, 120)
    # Dropping value 1 for op 1 saves 10 bytes there; op 0 then makes a copy of value 0, which is
    # still held.
    assert solve_staged(problem, 119).status is Status.INFEASIBLE
    lighter = replace(problem, ops=(*ops[:2], replace(ops[2], overhead_bytes=0)))
    assert solve_staged(lighter, 119).steps == (0, 1, 0, 2)
    assert solve_staged(lighter, 119).peak_bytes == 110
    assert solve_staged(StagedProblem(ops=(), value_bytes=()), 0).steps == ()


def test_a_schedule_just_above_the_budget_is_cut_off() -> None:
    """One byte in two thousand million is below any solver's tolerance."""
    sizes = (700_000_001, 650_000_003, 600_000_007)
    forward = [StagedOp(time_ms=t, inputs=(), outputs=(i,)) for i, t in enumerate((1.0, 2.0, 3.0))]
    pause = StagedOp(time_ms=1.0, inputs=(), outputs=())
    readers = [StagedOp(time_ms=1.0, inputs=(i,), outputs=()) for i in range(3)]
    problem = StagedProblem(
        ops=(*forward, replace(pause, overhead_bytes=1), *readers), value_bytes=sizes
    )
    assert solve_staged(problem, 1_950_000_012).steps == (0, 1, 2, 3, 4, 5, 6)
    for budget in (1_950_000_011, 1_950_000_010):
        solution = solve_staged(problem, budget)
        assert solution.time_ms == exhaustive(problem, budget)
        assert solution.peak_bytes == replay_peak(problem, solution.steps) <= budget


def test_the_same_answer_twice() -> None:
    problem = transformer(1)
    peak = replay_peak(problem, tuple(range(len(problem.ops))))
    solution = solve_staged(problem, int(0.6 * peak))
    assert solution == solve_staged(problem, int(0.6 * peak))
    assert solution.status is Status.OPTIMAL
    assert solution.peak_bytes == replay_peak(problem, solution.steps)
    assert_staged(problem, solution)
    assert solution.time_ms > problem.min_time_ms


def test_out_of_time_is_said_and_the_bound_is_true() -> None:
    problem = transformer(2)
    budget = int(0.45 * replay_peak(problem, tuple(range(len(problem.ops)))))
    nothing = solve_staged(problem, budget, time_limit_s=1e-9)
    assert (nothing.status, nothing.bound_ms) == (Status.NOT_FOUND, problem.min_time_ms)
    best = solve_staged(problem, budget)
    assert best.status is Status.OPTIMAL
    for limit in (0.3, 0.6):
        begin = time.monotonic()
        early = solve_staged(problem, budget, time_limit_s=limit)
        # wall time: a busy machine overshoots by seconds
        assert time.monotonic() - begin < limit + 60
        assert problem.min_time_ms <= early.bound_ms <= best.time_ms + 1e-6
        assert early.status is not Status.INFEASIBLE
        assert early.time_ms >= best.time_ms - 1e-6


def test_an_incumbent_at_the_time_limit_is_feasible_not_optimal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        highspy.Highs, "getModelStatus", lambda _: highspy.HighsModelStatus.kTimeLimit
    )
    problem = transformer(1)
    budget = int(0.7 * replay_peak(problem, tuple(range(len(problem.ops)))))
    solution = solve_staged(problem, budget)
    assert solution.status is Status.FEASIBLE
    assert solution.bound_ms <= solution.time_ms


def test_bytes_in_use_agree_with_the_replay_for_orders_that_no_solver_made() -> None:
    for seed in range(60):
        problem, rng = random_step(seed), random.Random(seed)
        steps: list[int] = []
        for index in range(len(problem.ops)):
            earlier = rng.choices(range(index), k=2) if index else []
            steps += [each for each in earlier if problem.ops[each].recomputable]
            steps.append(index)
        assert max(in_use_bytes(problem, steps)) == replay_peak(problem, tuple(steps))
