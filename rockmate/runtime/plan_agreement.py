"""One plan for all ranks of a data-parallel group.

Op times are measured. So ranks that plan for the same step find slightly different plans, and the
slowest would set the pace. Each rank offers its plan in the key-value store of the process group,
under a key that names the step and its options. All ranks run the first offer.

A step that contains collectives itself (tensor parallelism) makes ranks wait in any case. Before
its first run each rank reads, in the store, which collectives the others of the group will run.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import distributed

from rockmate._torch.distributed import default_store, first_offer, ranks_of, timeout_s
from rockmate.bound.protocol import StoredBound
from rockmate.errors import PlanMismatchError
from rockmate.plan.plan import Plan


def broadcast_plan(plan: Plan, *, step: str, request: Any) -> Plan:
    """The plan that the first rank offered for the same step; `plan` without a process group.

    Args:
        plan: this rank's own.
        step: what the plan was made for: the same text on all ranks, whatever form of the step each
            of them chose. It is part of the key.
        request: what the plan was made for besides the step and its options; its text is part of
            the key.
    """
    description = f"{step} {request}"
    # With the quick bound: the tight one may take seconds, on every rank.
    own = replace(plan, bounds=StoredBound(plan.quick_lower_bound_ms)).to_text()
    text = first_offer(description, own)
    return plan if text == own else Plan.from_text(text)


# How long a rank waits for another to plan a step with collectives.
WAIT_S = 300.0
_num_confirmed: Counter[str] = Counter()


def confirm_collectives(collectives: Sequence[tuple[str, str]]) -> None:
    """Checks that all ranks of each group run the same collectives at the same places of the step.

    To be called before the first step of a plan, on every rank. A rank that runs others would leave
    the others waiting, or give them wrong numbers. So might ranks that run the collectives of two
    groups in different orders. Where all members of each group run its collectives at the same
    places among all of theirs, no rank waits for ever: those of the first place end, then those of
    the second.

    Args:
        collectives: those of one step, in words, each with the name of its process group.

    Raises:
        PlanMismatchError: a rank runs others, or in another order, or has not planned within
            `WAIT_S` or the timeout of the process group.
    """
    store, rank = default_store(), distributed.get_rank()
    of_group: dict[str, list[str]] = {}
    for place, (text, group) in enumerate(collectives):
        of_group.setdefault(group, []).append(f"{place} {text}")
    own: dict[str, tuple[str, str]] = {}  # group -> where its members say what they run, and this
    for group, texts in sorted(of_group.items()):
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        own[group] = f"rockmate/collectives/{group}/{_num_confirmed[group]}", digest
        _num_confirmed[group] += 1
        store.set(f"{own[group][0]}/{rank}", digest)
    for group, (key, digest) in own.items():
        for other in ranks_of(group):
            if _read(store, f"{key}/{other}", other) != digest:
                msg = (
                    f"rank {other} runs other collectives in its planned step than this rank, or "
                    "in another order, so they would wait for each other or mix up values. Give "
                    "all ranks the same model, sample shapes and budget. Where parameters are "
                    'sharded unevenly, use mode="frames".'
                )
                raise PlanMismatchError(msg)


def _read(store: distributed.Store, key: str, rank: int) -> str:
    wait_s = min(WAIT_S, timeout_s())
    try:
        store.wait([key], timedelta(seconds=wait_s))
        return store.get(key).decode()
    except (RuntimeError, distributed.DistError) as error:
        msg = (
            f"rank {rank} has not planned a step with the collectives of this rank within "
            f"{wait_s:.0f} s. Plan on all ranks of a group with the same "
            "model, sample shapes and budget."
        )
        raise PlanMismatchError(msg) from error
