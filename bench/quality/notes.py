"""The notes of the page: where plans miss a target, and what is known about it."""

from __future__ import annotations

from itertools import pairwise

from bench.quality.records import (
    ROUNDING,
    Record,
    Records,
    chunked_gap,
    form_text,
    has_two_layers,
    key_of,
    percent,
    place,
    planning_s,
)
from bench.quality.targets import (
    LARGEST_GAP,
    LAYERS,
    LEAST_BUDGET,
    PLANNING_S,
    SMALLEST_PEAK_OF_ROTOR,
)


def notes(lines: Records) -> list[str]:
    """The sections of notes; each has a line for every figure that misses its target."""
    return [
        *_gap_notes(lines),
        "",
        "## Where a schedule that was tried is faster than the plan",
        "",
        "Near the lower bound the search stops early, so that a further budget takes a fraction of "
        "a second. Farther away it is greedy, and results differ from budget to budget. A frontier "
        "leaves out dominated plans. A plan in chunks may be faster than an unchunked one with "
        "more memory: by default the step stays unchunked where that fits.",
        "",
        *_beaten_notes(lines),
        *_rising_notes(lines),
        "",
        "## Where planning takes long",
        "",
        *_planning_notes(lines),
        "",
        *_peak_notes(lines),
    ]


def _gap_notes(lines: Records) -> list[str]:
    loose = [
        _loose_note(lines, r)
        for r in lines.ours
        if r["purpose"] == "budget" and r["gap"] > LARGEST_GAP
    ]
    chunked = [
        _chunked_note(r)
        for r in lines.chunked
        if r["budget"] >= LEAST_BUDGET and chunked_gap(r) > LARGEST_GAP
    ]
    return [
        f"## Where the gap is above {LARGEST_GAP:.0%}",
        "",
        "Close to the smallest peak, memory is short at many program points, and the bound "
        "considers a few of them.",
        "",
        *loose,
        *chunked,
    ]


def _peak_notes(lines: Records) -> list[str]:
    own = {model: record for model, record in lines.models.items() if not has_two_layers(model)}
    minima = [
        _minimum_note(model, record) for model, record in own.items() if "minimum_places" in record
    ]
    skipped = [
        f"- {r['model']}, knapsack that saves {r['saved_share']:g} of all values: {r['why']}"
        for r in lines.skipped
    ]
    unsolved = [
        f"- {r['model']}, {r['strategy']} at {r['budget']:g}: {r['why']}"
        for r in lines.plans
        if "why" in r
    ]
    return [
        "## Where the smallest peaks are, and what solvers have no answer for",
        "",
        "Smallest peaks with chunks are simulated with estimated workspaces, since measuring every "
        "chunk would take long. Rotor's are without chunks. Chunks divide the loss block and "
        "feed-forwards. They gain little where attention or a normalization at full resolution is "
        "largest, as in BERT, ViT, ResNet and RegNet.",
        "",
        *minima,
        *skipped,
        *unsolved,
    ]


def _planning_notes(lines: Records) -> list[str]:
    """The stages of planning, for models that take longer than their limit."""
    found = []
    for model, num_layers in LAYERS.items():
        record = lines.models.get(model)
        if record is None:
            continue
        second_s = record.get("tightest_plan_s")
        if planning_s(record) + (second_s or 0.0) <= PLANNING_S[num_layers]:
            continue
        spent, step_s = record["timings_s"], record["baseline_ms"] / 1e3
        second = f", a second one at the smallest peak {second_s:.2f} s" if second_s else ""
        found.append(
            f"- {model}: measuring its ops takes {spent['costs']:.2f} s for a step of "
            f"{step_s:.2f} s, preparation {spent['solve']:.2f} s, the first plan "
            f"{record['first_plan_s']:.2f} s{second}."
        )
    return found


def _minimum_note(model: str, record: Record) -> str:
    """Where the smallest peak is, the share of the op there, and the proved limit."""
    places, shares = record["minimum_places"], record["minimum_own_shares"]
    least, rotor = (record["minimum_peak_bytes"][name] for name in ("rockmate", "rotor"))
    proved = record["proved_minimum_bytes"] / rotor
    if least <= SMALLEST_PEAK_OF_ROTOR * rotor:
        verdict = ""
    elif proved > SMALLEST_PEAK_OF_ROTOR:
        verdict = f": {SMALLEST_PEAK_OF_ROTOR} is out of reach"
    else:
        verdict = (
            f"; whether {SMALLEST_PEAK_OF_ROTOR} can be reached is not known: "
            f"ours has {least / rotor:.3f}"
        )
    return (
        f"- {model}: the smallest peak is in {places['rockmate']}, {shares['rockmate']:.0%} of it "
        f"that op's own; Rotor's is in {places['rotor']}, {shares['rotor']:.0%} of it that op's "
        f"own. No schedule without chunks is below {proved:.3f} of Rotor's{verdict}."
    )


def _beaten_notes(lines: Records) -> list[str]:
    """Yardsticks that are faster than the plan at their peak, and the plan's gap to the bound."""
    gap = {key_of(r): r["gap"] for r in lines.ours}
    beaten = [
        r
        for r in lines.yardsticks
        if r["ours_ms"] is not None and r["ours_ms"] > r["ms"] * (1 + ROUNDING)
    ]
    return [
        f"- {place(lines, r)}: the plain knapsack is {percent(r['ours_ms'] / r['ms'] - 1)} faster; "
        f"the plan is {percent(gap[key_of(r)])} of the step above the bound."
        for r in beaten
    ]


def _rising_notes(lines: Records) -> list[str]:
    """Plans that are slower than another one with less memory."""
    found = []
    for model in lines.models:
        own = [r for r in lines.unchunked if r["model"] == model]
        plans = sorted(own, key=lambda r: (r["budget_bytes"], -r["ms"]))
        for smaller, larger in pairwise(plans):
            if larger["ms"] > smaller["ms"] * (1 + ROUNDING):
                beyond = percent(larger["ms"] / smaller["ms"] - 1)
                share = place(lines, smaller).rpartition(" ")[2]
                found.append(f"- {place(lines, larger)}: the plan at {share} is {beyond} faster.")
    return found


_LEAST_BOUND = "the bound is the least of those of all chunkings that were considered"


def _loose_note(lines: Records, record: Record) -> str:
    """A plan with a large gap, and its budget beside the smallest peaks."""
    model = lines.models[record["model"]]
    head = f"- {record['model']} at {record['budget']:g}: {percent(record['gap'])}"
    if record["chunks"]:
        return (
            f"{head}, in chunks ({record['chunks']}), since no other plan is known to fit there; "
            f"{_LEAST_BOUND}."
        )
    known = record["budget_bytes"] / model["minimum_peak_bytes"]["rockmate"]
    proved = record["budget_bytes"] / model["proved_minimum_bytes"]
    return (
        f"{head}; the budget is {known:.2f} times the smallest known peak, {proved:.2f} times the "
        "proved one."
    )


def _chunked_note(record: Record) -> str:
    """A plan of the series with a large gap, only the loss returned."""
    head = f"- {record['model']} at {record['budget']:g}, only the loss returned"
    return f"{head}: {percent(chunked_gap(record))}, {form_text(record)}; {_LEAST_BOUND}."
