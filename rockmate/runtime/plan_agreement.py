"""One plan for all ranks of a data-parallel group.

Op times are measured. So ranks that plan for the same step find slightly different plans, and the
slowest would set the pace. Each rank offers its plan in the key-value store of the process group,
under a key that names the step and its options. All ranks run the first offer.

A step that contains collectives itself (sharded parameters, tensor parallelism) makes ranks wait in
any case. Before its first run each rank reads, in the store, that the others will run the same
ones. A call of other sizes runs them in the order of the schedule that it takes over, which is
known already.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from torch import distributed, nn

from rockmate._torch.distributed import default_store, first_offer, ranks_of
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
    own = plan.to_text()
    text = first_offer(description, own)
    return plan if text == own else Plan.from_text(text)


# How long a rank waits for another to plan a step with collectives.
WAIT_S = 300.0
_num_confirmed: Counter[str] = Counter()

Order = tuple[tuple[str, str], ...]
"""For each process group its name, and a digest of what a step runs and where that group meets."""
# Of the last step of each model.
_CONFIRMED: WeakKeyDictionary[nn.Module, Order] = WeakKeyDictionary()


def order_of(collectives: Sequence[tuple[str, str]]) -> Order:
    """The order of a step's collectives, which are given in words, each with its group."""

    def digest(group: str) -> str:
        lines = (f"{text} {name == group}" for text, name in collectives)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    return tuple((group, digest(group)) for group in sorted({name for _, name in collectives}))


def confirm_order(model: nn.Module, order: Order) -> None:
    """Checks that all ranks of each group run the same collectives in the same order.

    To be called before each step, on every rank. It asks others where the order is another than in
    the model's last step. A rank that runs other collectives would leave the others waiting, or
    give them wrong numbers.

    Raises:
        PlanMismatchError: a rank runs others, or in another order, or has not planned within
            `WAIT_S` or the timeout of the process group.
    """
    if order in ((), _CONFIRMED.get(model)):
        return
    store, rank = default_store(), distributed.get_rank()
    keys = {group: f"rockmate/collectives/{group}/{_num_confirmed[group]}" for group, _ in order}
    for group, digest in order:
        _num_confirmed[group] += 1
        store.set(f"{keys[group]}/{rank}", digest)
    for group, digest in order:
        for other in ranks_of(group):
            if _read(store, f"{keys[group]}/{other}", other) != digest:
                msg = (
                    f"rank {other} runs other collectives in its planned step than this rank, or "
                    "in another order, so they would wait for each other or mix up values. Give "
                    "all ranks the same model, sample shapes and budget. Where tensor parallelism "
                    'divides parameters unevenly, use mode="frames".'
                )
                raise PlanMismatchError(msg)
    _CONFIRMED[model] = order


def _read(store: Any, key: str, rank: int) -> str:
    longest = min(timedelta(seconds=WAIT_S), store.timeout)  # that is the timeout of the group
    try:
        store.wait([key], longest)
        return store.get(key).decode()
    except (RuntimeError, distributed.DistError) as error:
        msg = (
            f"rank {rank} has not planned a step with the collectives of this rank within "
            f"{longest.total_seconds():.0f} s. Plan on all ranks of a group with the same "
            "model, sample shapes and budget."
        )
        raise PlanMismatchError(msg) from error
