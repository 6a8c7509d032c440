"""Problems for the tests of `checkmate`.

Transformer blocks, random graphs, exhaustive search, and a check of plans.
"""

import random
from itertools import combinations
from math import fsum, isclose
from typing import Any

from checkmate import Knapsack, Op, Solution


class Builder:
    """Collects ops of a kind and values, in units of 1 MiB; times are jittered by a generator."""

    def __init__(self, rng: random.Random | None, kind: type[Any] = Op) -> None:
        self.rng, self.kind = rng, kind
        self.ops: list[Any] = []
        self.value_bytes: list[int] = []
        self.required: set[int] = set()

    def given(self, units: float) -> int:
        """A value that no op makes."""
        self.value_bytes.append(int(units * 1_048_576))
        return len(self.value_bytes) - 1

    def op(
        self, time_ms: float, inputs: list[int], *units: float, recomputable: bool = True
    ) -> list[int]:
        """An op and its outputs, of so many units each."""
        if self.rng is not None:
            time_ms *= self.rng.uniform(0.8, 1.2)
        outputs = [self.given(size) for size in units]
        self.ops.append(
            self.kind(
                time_ms=time_ms,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                recomputable=recomputable,
            )
        )
        return outputs

    def knapsack(self) -> Knapsack:
        """The problem so far."""
        return Knapsack(
            ops=tuple(self.ops),
            value_bytes=tuple(self.value_bytes),
            required=frozenset(self.required),
        )

    def layer(self, x: int) -> int:
        """One transformer layer of 20 ops, from its input to its output."""
        for half in (self._attention, self._mlp):
            self.required.add(x)
            normed, mean, rstd = self.op(0.05, [x], 1, 1 / 512, 1 / 512)
            self.required |= {normed, mean, rstd}
            out = half(normed)
            dropped, mask = self.op(0.04, [out], 1, 0.25)
            self.required.add(mask)
            (x,) = self.op(0.03, [x, dropped], 1)
        return x

    def _attention(self, normed: int) -> int:
        (qkv,) = self.op(0.6, [normed], 3)
        (query,) = self.op(0.03, [qkv], 1)
        (key,) = self.op(0.03, [qkv], 1)
        (value,) = self.op(0.03, [qkv], 1)
        (scaled,) = self.op(0.02, [query], 1)
        (scores,) = self.op(0.3, [scaled, key], 4)
        (masked,) = self.op(0.08, [scores], 4)
        (weights,) = self.op(0.1, [masked], 4)
        dropped, mask = self.op(0.12, [weights], 4, 1)
        (mixed,) = self.op(0.3, [dropped, value], 1)
        (merged,) = self.op(0.0, [mixed], 1)
        (out,) = self.op(0.2, [merged], 1)
        self.required |= {scaled, key, value, weights, dropped, mask, merged}
        return out

    def _mlp(self, normed: int) -> int:
        (wide,) = self.op(0.8, [normed], 4)
        (active,) = self.op(0.1, [wide], 4)
        (out,) = self.op(0.8, [active], 1)
        self.required |= {wide, active}
        return out


def transformer(num_layers: int, *, seed: int | None = None) -> Knapsack:
    """A chain of layers of 20 ops each.

    With a seed every op's time is its own, the hardest case.
    """
    builder = Builder(None if seed is None else random.Random(seed))
    x = builder.given(1)
    for _ in range(num_layers):
        x = builder.layer(x)
    return builder.knapsack()


def first_ops(problem: Knapsack, num_ops: int) -> Knapsack:
    """The first ops of a problem, as a block of that many."""
    ops = problem.ops[:num_ops]
    made = {value for op in ops for value in op.outputs}
    return Knapsack(ops=ops, value_bytes=problem.value_bytes, required=problem.required & made)


def random_graph(
    seed: int, *, num_ops: int = 7, dense: bool = False, coarse: bool = True, time_unit: float = 0.1
) -> Knapsack:
    """A random graph with multi-output, zero-cost, zero-byte and non-recomputable ops."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 8), rng.randint(1, 8)]
    ops: list[Op] = []
    for _ in range(num_ops):
        inputs = rng.sample(range(len(sizes)), min(len(sizes), rng.randint(1, 4 if dense else 2)))
        outputs = tuple(range(len(sizes), len(sizes) + rng.choice((1, 1, 1, 2, 3))))
        sizes += [
            rng.choice((0, 1, 1, 2, 4, 8)) if coarse else rng.randint(1, 10**9) for _ in outputs
        ]
        time_ms = (
            rng.choice((0, 0, 1, 2, 3, 7, 20)) * time_unit if coarse else rng.uniform(0.01, 5.0)
        )
        ops.append(
            Op(
                time_ms=time_ms,
                inputs=tuple(inputs),
                outputs=outputs,
                recomputable=rng.random() > 0.1,
            )
        )
    return Knapsack(
        ops=tuple(ops),
        value_bytes=tuple(sizes),
        required=frozenset(v for v in range(len(sizes)) if rng.random() < 0.45),
    )


def exhaustive(problem: Knapsack) -> list[tuple[int, float]]:
    """The Pareto set (saved bytes falling, time rising) by trying every set of recomputed ops."""
    made = {value for op in problem.ops for value in op.outputs}
    redoable = [index for index, op in enumerate(problem.ops) if op.recomputable]
    costs: list[tuple[int, float]] = []
    for count in range(len(redoable) + 1):
        for chosen in combinations(redoable, count):
            rebuilt = {value for index in chosen for value in problem.ops[index].outputs}
            needed = set(problem.required).union(*(problem.ops[index].inputs for index in chosen))
            saved = (needed & made) - rebuilt
            time_ms = round(sum(problem.ops[index].time_ms for index in chosen), 9)
            costs.append((sum(problem.value_bytes[v] for v in saved), time_ms))
    front: list[tuple[int, float]] = []
    for saved_bytes, time_ms in sorted(costs, key=lambda cost: (cost[1], cost[0])):
        if not front or saved_bytes < front[-1][0]:
            front.append((saved_bytes, time_ms))
    return front


def verify(problem: Knapsack, plan: Solution) -> None:
    """Goes over the recomputed ops in order, with the set of available values."""
    made = {value for op in problem.ops for value in op.outputs}
    assert plan.saved <= made
    available = set(range(len(problem.value_bytes))) - made | plan.saved
    assert list(plan.recomputed) == sorted(set(plan.recomputed))
    runs = [problem.ops[index] for index in plan.recomputed]
    for op in runs:
        assert op.recomputable
        assert available.issuperset(op.inputs)
        available.update(op.outputs)
    assert problem.required <= available
    assert plan.saved_bytes == sum(problem.value_bytes[v] for v in plan.saved)
    assert isclose(plan.time_ms, fsum(op.time_ms for op in runs), rel_tol=1e-12)
