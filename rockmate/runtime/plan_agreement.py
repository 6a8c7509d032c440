"""One plan for all ranks of a data-parallel group.

Op times are measured, so ranks that plan for the same step arrive at slightly different plans, and the slowest would set the pace. Each
rank therefore offers its plan, under a key made of what was planned, in the key-value store that the process group was set up with;
the first offer is what all of them run. No rank waits for another, so ranks that hold other models, or that plan at other times,
cannot block each other.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch import distributed

from rockmate._torch.distributed import default_store
from rockmate.bound.protocol import StoredBound
from rockmate.plan.plan import Plan


def broadcast_plan(plan: Plan, *, asked_for: Any) -> Plan:
    """The plan that the first rank offered for the same step, `plan` itself without a process group.

    Args:
        plan: this rank's own.
        asked_for: what the plan was made for beside the step and its options; its text is part of the key.
    """
    if (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return plan
    store = default_store()
    asked = f"{plan.snapshot.fingerprint} {plan.snapshot.call_fingerprint} {asked_for} {sorted(plan.options.items())}"
    key = f"rockmate/{hashlib.sha256(asked.encode()).hexdigest()}"
    own = replace(
        plan, bounds=StoredBound(plan.quick_lower_bound_ms)
    ).to_text()  # the closer bound may take seconds, on every rank
    first = store.compare_set(key, "", own)
    text = first if isinstance(first, str) else first.decode()
    return plan if text == own else Plan.from_text(text)
