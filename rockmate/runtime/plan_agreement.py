"""One plan for all ranks of a data-parallel group.

Op times are measured. So ranks that plan for the same step find slightly different plans, and the
slowest would set the pace. Each rank offers its plan in the key-value store of the process group,
under a key that names the step and its options. All ranks run the first offer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rockmate._torch.distributed import first_offer
from rockmate.bound.protocol import StoredBound
from rockmate.plan.plan import Plan


def broadcast_plan(plan: Plan, *, request: Any) -> Plan:
    """The plan that the first rank offered for the same step; `plan` without a process group.

    Args:
        plan: this rank's own.
        request: what the plan was made for besides the step and its options; its text is part of
            the key.
    """
    snapshot = plan.snapshot
    step = f"{snapshot.fingerprint} {snapshot.call_fingerprint}"
    description = f"{step} {request} {sorted(plan.options.items())}"
    # With the quick bound: the tight one may take seconds, on every rank.
    own = replace(plan, bounds=StoredBound(plan.quick_lower_bound_ms)).to_text()
    text = first_offer(description, own)
    return plan if text == own else Plan.from_text(text)
