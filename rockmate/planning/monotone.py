"""More memory never takes longer: a larger budget takes the plan of a smaller one if it is faster.

A search is a heuristic, and now and then the plan that it finds for more memory is a little slower.
A plan that fits a smaller budget fits a larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from rockmate.bound.protocol import MinBound
from rockmate.plan.plan import Plan


def never_slower(plans: Mapping[int, Plan]) -> dict[int, Plan]:
    """The plans by growing budget, none of them slower than one for less memory.

    Args:
        plans: by budget in bytes.
    """
    found: dict[int, Plan] = {}
    fastest: Plan | None = None
    for budget_bytes, plan in sorted(plans.items()):
        chosen = plan
        if fastest is not None and fastest.predicted_ms < plan.predicted_ms:
            both = partial(tuple, (plan.bounds, fastest.bounds))  # the plan may be of another form
            chosen = replace(fastest, budget_bytes=budget_bytes, bounds=MinBound(both))
        found[budget_bytes] = fastest = chosen
    return found
