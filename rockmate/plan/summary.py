"""A plan in a few lines: budget, peak, time, saved and recomputed values, lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import inf

from rockmate.budget import size_text
from rockmate.plan.record import PlanRecord

# Number of calls named as those that are recomputed most often.
_NUM_NAMED_CALLS = 4


def summary_text(plan: PlanRecord) -> str:
    """The lines of `Plan.summary`."""
    rows = [*_promise_rows(plan), *_content_rows(plan), *_mark_rows(plan), *_remark_rows(plan)]
    return "\n".join(f"{title:<19} {text}" for title, text in rows)


def _promise_rows(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    baseline_bytes = plan.baseline_peak_bytes
    peak_share = f"{plan.predicted_peak_bytes / baseline_bytes:.1%}" if baseline_bytes else "all"
    baseline_peak = size_text(baseline_bytes)
    yield "activation budget", size_text(plan.budget_bytes)
    yield (
        "predicted peak",
        f"{size_text(plan.predicted_peak_bytes)}  "
        f"({peak_share} of {baseline_peak} without recomputation)",
    )
    yield "  reached in", plan.peak_place()
    yield (
        "predicted time",
        f"{plan.predicted_ms:.1f} ms a step, {plan.predicted_ratio:.3f}x of "
        f"{plan.baseline_ms:.1f} ms without recomputation",
    )
    if plan.captured is not None and plan.flights.other_end:
        yield "  with overlap", f"{plan.overlapped_ms:.1f} ms, collectives beside other ops"
    if plan.machine:
        yield "  estimated for", plan.machine


def _content_rows(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    yield "saved for backward", size_text(plan.simulation.saved_bytes)
    named = _most_recomputed(plan)
    num_recomputed = f"{plan.schedule.num_recomputations()} of {len(plan.snapshot.ops)} ops"
    if plan.schedule.moves:
        yield "moved", _moved_text(plan)
    if plan.schedule.fetches:
        yield "weights", _fetched_text(plan)
    yield "recomputed", f"{num_recomputed}, most often {named}" if named else num_recomputed
    yield "blocks", str(len(plan.chain.blocks))


def _moved_text(plan: PlanRecord) -> str:
    moves, lanes = plan.schedule.moves, plan.simulation.lanes
    assert lanes is not None
    moved_bytes = sum(plan.snapshot.storages[move.storage].num_bytes for move in moves)
    number = len(moves)
    waited_ms = sum(lanes.sent_waits_ms[:number]) + sum(lanes.fetched_waits_ms[:number])
    values = f"{number} value{'s' if number > 1 else ''}"
    return (
        f"{values} to {plan.tier_name} and back, {size_text(moved_bytes)}, which take "
        f"{size_text(plan.simulation.host_bytes)} there; the step waits {waited_ms:.1f} ms for them"
    )


def _fetched_text(plan: PlanRecord) -> str:
    fetches, lanes = plan.schedule.fetches, plan.simulation.lanes
    assert lanes is not None
    sizes = {each.storage: plan.snapshot.storages[each.storage].num_bytes for each in fetches}
    copied_bytes = sum(sizes[each.storage] for each in fetches)
    waited_ms = sum(lanes.fetched_waits_ms[len(plan.schedule.moves) :])
    return (
        f"{len(sizes)} of {size_text(sum(sizes.values()))} at home in "
        f"{plan.tier_name}; {len(fetches)} copies of {size_text(copied_bytes)} a step, for which "
        f"it waits {waited_ms:.1f} ms"
    )


def _mark_rows(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    marked: dict[tuple[str, str], list[int]] = {}
    for storage in plan.snapshot.storages:
        for source in storage.mark_sources:
            marked.setdefault((storage.mark, source), []).append(storage.num_bytes)
    for (mark, source), sizes in marked.items():
        values = f"{len(sizes)} value{'s' if len(sizes) > 1 else ''}"
        yield f"marked {mark}", f"{values}, {size_text(sum(sizes))}, by {source!r}"
    for word, source in plan.options.marks.uncovered(marked):
        why = "what it matches leaves it, stays, or has no memory of its own"
        yield f"marked {word}", f"covers no value, by {source!r}: {why}"


def _remark_rows(plan: PlanRecord) -> Iterator[tuple[str, str]]:
    if plan.options.kernels == "fused":
        yield "fused kernels", _fusion_text(plan)
    if plan.snapshot.num_in_flight > 1:
        number, saved_bytes = plan.snapshot.num_in_flight, plan.simulation.saved_bytes
        yield (
            "in flight",
            f"{number} forwards; the saved values of {number - 1} others, "
            f"{size_text((number - 1) * saved_bytes)}, count in every peak",
        )
    if plan.options.loss_chunks:
        note = plan.loss_block
        yield "loss block", f"{note.text} ({note.module or 'no single submodule'})"
        yield "  bitwise", _bitwise_text(plan)
    if plan.held_at_peak_bytes:
        yield (
            "outputs",
            f"{size_text(plan.held_at_peak_bytes)} of the peak are outputs beside the loss; "
            'with outputs="loss" they are planned like any other value',
        )
    if plan.lower_bound_ms:
        yield (
            "lower bound",
            f"{plan.lower_bound_ms:.1f} ms within the budget; "
            f"the plan is {plan.optimality_gap:.1%} above",
        )
    if plan.is_cut_short and plan.status == "time_limit":
        yield "search", "ended by time_limit_s; with more time the plan may be faster"
    if plan.num_unproved_blocks:
        yield "solver", "not proved to be optimal; a larger time_limit_s may help"


def _bitwise_text(plan: PlanRecord) -> str:
    """What a plan takes that adds in the order of the step as captured."""
    if plan.bitwise_ms is None:
        return "no: chunks add the same numbers in another order"
    if plan.bitwise_ms == inf:
        return "no plan without chunks fits the budget"
    ratio = plan.bitwise_ms / plan.baseline_ms if plan.baseline_ms else 1.0
    return f'{ratio:.3f}x without chunks, with numerics="bitwise"'


def _fusion_text(plan: PlanRecord) -> str:
    if plan.fusion is not None:
        return plan.fusion.summary()
    num_fused = sum(op.short_call.startswith("fused_") for op in plan.snapshot.ops)
    return f"{num_fused} of {len(plan.snapshot.ops)} ops are groups that run as one kernel each"


def _most_recomputed(plan: PlanRecord) -> str:
    counts: Counter[str] = Counter()
    for index, count in plan.recompute_counts.items():
        counts[plan.snapshot.ops[index].short_call] += count
    top = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_NUM_NAMED_CALLS]
    return ", ".join(f"{name} x{count}" for name, count in top)


def line_of(plan: PlanRecord) -> str:
    """Budget, peak and time in one line."""
    peak, ratio = size_text(plan.predicted_peak_bytes), f"{plan.predicted_ratio:.3f}x"
    return (
        f"budget {size_text(plan.budget_bytes)}, predicted peak {peak} at {ratio} of the time "
        "without recomputation"
    )
