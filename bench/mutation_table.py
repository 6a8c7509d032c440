"""Planted faults of `bench.mutations`: each replaces text that occurs once in a file."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One planted fault.

    Attributes:
        fault: what is wrong with the mutated code.
        path: the file, from the root of the repository.
        text: the text that is replaced; it occurs once.
        mutated: its replacement.
        first: the tests that run first, since they stand next to the code.
    """

    fault: str
    path: str
    text: str
    mutated: str
    first: str


MUTATIONS = (
    Mutation(
        "an op's workspace is not counted",
        "rockmate/schedule/simulate.py",
        "running = after + freed_bytes + overhead_bytes",
        "running = after + freed_bytes",
        "tests/schedule",
    ),
    Mutation(
        "tangents are not counted",
        "rockmate/schedule/simulate.py",
        "made_bytes[num_forward] += ops.tangent_bytes",
        "made_bytes[num_forward] += 0",
        "tests/schedule",
    ),
    Mutation(
        "a schedule drops the draw of an unread random op",
        "rockmate/schedule/schedule.py",
        "ops.has_final_gradient[steps] | (ops.is_random[steps] & def_use.is_first)",
        "ops.has_final_gradient[steps]",
        "tests/schedule",
    ),
    Mutation(
        "CUDA storages are not rounded to the allocator's blocks",
        "rockmate/graph/build.py",
        "return -(-value.untyped_storage().nbytes() // granularity) * granularity",
        "return value.untyped_storage().nbytes()",
        "tests/graph",
    ),
    Mutation(
        "an op writes over an operand that another argument views",
        "rockmate/graph/in_place.py",
        "return any(graph.storage_of[node] is graph.storage_of[operand] for node in others)",
        "return False",
        "tests/graph",
    ),
    Mutation(
        "two draws of equal arguments are merged",
        "rockmate/graph/value_numbering.py",
        "and not is_random(target)",
        "and target is not None",
        "tests/graph",
    ),
    Mutation(
        "a mean in chunks is not divided by its number of elements",
        "rockmate/graph/chunking/rules.py",
        "divisor=prod(shape_of(call.args[0])[dim] for dim in dims),",
        "divisor=1,",
        "tests/graph",
    ),
    Mutation(
        "a product of two gradients counts as linear",
        "rockmate/graph/chunking/linearity.py",
        "return len(inside) == 1",
        "return len(inside) >= 1",
        "tests/graph",
    ),
    Mutation(
        "a recomputation is estimated at the time of the first run",
        "rockmate/costs/estimate.py",
        "cost(op, op.recompute_target or op.node.target) for op in graph.ops)",
        "cost(op, op.node.target) for op in graph.ops)",
        "tests/costs",
    ),
    Mutation(
        "the lower bound counts values that no later op reads",
        "rockmate/bound/program_point.py",
        "storage.is_kept_to_end or not after.isdisjoint(readers.get(storage, ()))",
        "storage.is_kept_to_end or readers.get(storage, ())",
        "tests/bound",
    ),
    Mutation(
        "the lower bound counts the result of an op in place",
        "rockmate/bound/program_point.py",
        "for storage in own) + overhead_bytes - taken_bytes",
        "for storage in own) + overhead_bytes",
        "tests/bound",
    ),
    Mutation(
        "the local search misses memory that a run in place saves",
        "rockmate/planning/live_ranges.py",
        "self.costs.first[op.index].overhead_bytes - reused_bytes",
        "self.costs.first[op.index].overhead_bytes",
        "tests/planning",
    ),
    Mutation(
        "rotor's recomputations ignore the bytes at rest",
        "rotor/fill.py",
        "+ terms.at_rest[t][:, None]\n        return _Recomputations(",
        "+ 0 * terms.at_rest[t][:, None]\n        return _Recomputations(",
        "tests/rotor",
    ),
    Mutation(
        "a knapsack solution leaves out forced values",
        "checkmate/reduction.py",
        "saved=problem.forced | chosen,",
        "saved=frozenset(chosen),",
        "tests/checkmate",
    ),
    Mutation(
        "an edited schedule of a plan file is not checked",
        "rockmate/plan/serialize.py",
        '    _check_schedule_rows(plan, content["schedule"], origin)\n',
        "",
        "tests/plan",
    ),
    Mutation(
        "a recomputed random op draws new numbers",
        "rockmate/runtime/graph_writer.py",
        "if op.is_random and is_recompute:",
        "if op.is_random and is_recompute and op.final_gradients:",
        "tests/runtime",
    ),
    Mutation(
        "the second partial gradient of a parameter replaces the first",
        "rockmate/runtime/gradient_sink.py",
        "total.add_(gradient)",
        "total.copy_(gradient)",
        "tests/runtime",
    ),
    Mutation(
        "every slice of a weight gradient is computed from the first rows",
        "rockmate/runtime/gradient_sink.py",
        "rows = left.narrow(0, start, length)",
        "rows = left.narrow(0, 0, length)",
        "tests/graph",
    ),
    Mutation(
        "a call of other sizes runs the plan of the sample",
        "rockmate/plan_cache.py",
        "if not changed and call == first.planned.call:",
        "if not changed and call.kind == first.planned.call.kind:",
        "tests/entry",
    ),
    Mutation(
        "a change between train and eval mode goes unnoticed",
        "rockmate/capture/model_signature.py",
        "if self.training != now.training:",
        "if len(self.training) != len(now.training):",
        "tests/entry",
    ),
)
