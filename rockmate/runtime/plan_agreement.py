"""One plan for all ranks of a data-parallel group.

Op times are measured. So ranks that plan for the same step find slightly different plans, and the
slowest would set the pace. Each rank offers its plan in the key-value store of the process group,
under a key that names the step and its options. All ranks run the first offer.

No rank waits for another. So ranks with different models, or ranks that plan at different times,
cannot block each other. A broadcast would: it is collective.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from torch import distributed

from rockmate._torch.distributed import default_store
from rockmate.bound.protocol import StoredBound
from rockmate.plan.plan import Plan


def broadcast_plan(plan: Plan, *, request: Any) -> Plan:
    """The plan that the first rank offered for the same step; `plan` without a process group.

    Args:
        plan: this rank's own.
        request: what the plan was made for besides the step and its options; its text is part of
            the key.
    """
    if (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return plan
    store = default_store()
    snapshot = plan.snapshot
    step = f"{snapshot.fingerprint} {snapshot.call_fingerprint}"
    description = f"{step} {request} {sorted(plan.options.items())}"
    key = f"rockmate/{hashlib.sha256(description.encode()).hexdigest()}"
    # With the quick bound: the tight one may take seconds, on every rank.
    own = replace(plan, bounds=StoredBound(plan.quick_lower_bound_ms)).to_text()
    first = store.compare_set(key, "", own)
    text = first if isinstance(first, str) else first.decode()
    return plan if text == own else Plan.from_text(text)
