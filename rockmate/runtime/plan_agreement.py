"""One plan for all ranks of a data-parallel group.

Op times are measured. So ranks that plan for the same step find slightly different plans, and the
slowest would set the pace. Each rank offers its plan in the key-value store of the process group,
under a key that names the step and its options. All ranks run the first offer.

A step that contains collectives itself (tensor parallelism) makes ranks wait in any case. Before
its first run each rank reads, in the store, which collectives the others of the group will run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch import distributed

from rockmate._torch.distributed import default_store, first_offer, ranks_of, timeout_s
from rockmate.bound.protocol import StoredBound
from rockmate.errors import PlanMismatchError
from rockmate.plan.plan import Plan
from rockmate.runtime.collective_order import blocked_ranks


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
    """Checks that all ranks run the same collectives of each group, and that none waits for ever.

    To be called before the first step of a plan, on every rank. A rank that runs others would leave
    the others waiting, or give them wrong numbers. So would ranks that run the collectives of two
    groups in different orders; for that, a rank also reads what those run whom it meets only by
    way of others.

    Args:
        collectives: those of one step, in words, each with the name of its process group.

    Raises:
        PlanMismatchError: a rank runs others, or in another order, or has not planned within
            `WAIT_S` or the timeout of the process group.
    """
    store, rank = default_store(), distributed.get_rank()
    own = _Step.of(collectives)
    for key in own.keys.values():
        store.set(f"{key}/{rank}", own.to_text())
    steps = {rank: own}
    waiting = [rank]
    while waiting:
        step = steps[waiting.pop()]
        for group, key in step.keys.items():
            for other in step.members[group]:
                if other not in steps:
                    steps[other] = _read(store, f"{key}/{other}", other)
                    waiting.append(other)
                if other in own.members.get(group, ()):
                    _confirm_group(own, steps[other], group, other)
    if len(own.keys) > 1:
        _confirm_order(steps, rank)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one rank runs.

    Attributes:
        order: the groups of its collectives, in order.
        digests: group -> of its collectives, in words.
        members: group -> its ranks.
        keys: group -> where its members have put what they run.
    """

    order: Sequence[str]
    digests: Mapping[str, str]
    members: Mapping[str, Sequence[int]]
    keys: Mapping[str, str]

    @classmethod
    def of(cls, collectives: Sequence[tuple[str, str]]) -> _Step:
        texts: dict[str, list[str]] = {}
        for text, group in collectives:
            texts.setdefault(group, []).append(text)
        members = {group: ranks_of(group) for group in texts}
        names = {group: f"{group} {sorted(members[group])}" for group in texts}
        keys = {}
        for group in sorted(texts):
            keys[names[group]] = f"rockmate/collectives/{group}/{_num_confirmed[group]}"
            _num_confirmed[group] += 1
        digests = {
            names[group]: hashlib.sha256("\n".join(found).encode()).hexdigest()
            for group, found in texts.items()
        }
        order = [names[group] for _, group in collectives]
        return cls(order, digests, {names[group]: members[group] for group in texts}, keys)

    def to_text(self) -> str:
        """As JSON; groups by number, since most steps run hundreds of collectives of few."""
        groups = list(self.digests)
        number = {group: index for index, group in enumerate(groups)}
        found = [
            (group, self.digests[group], list(self.members[group]), self.keys[group])
            for group in groups
        ]
        return json.dumps([found, [number[group] for group in self.order]])

    @classmethod
    def from_text(cls, text: str) -> _Step:
        """What `to_text` has written."""
        found, order = json.loads(text)
        return cls(
            [found[index][0] for index in order],
            {group: digest for group, digest, _, _ in found},
            {group: ranks for group, _, ranks, _ in found},
            {group: key for group, _, _, key in found},
        )


def _read(store: distributed.Store, key: str, rank: int) -> _Step:
    wait_s = min(WAIT_S, timeout_s())
    try:
        store.wait([key], timedelta(seconds=wait_s))
        return _Step.from_text(store.get(key).decode())
    except (RuntimeError, distributed.DistError) as error:
        msg = (
            f"rank {rank} has not planned a step with the collectives of this rank within "
            f"{wait_s:.0f} s. Plan on all ranks of a group with the same "
            "model, sample shapes and budget."
        )
        raise PlanMismatchError(msg) from error


def _confirm_group(own: _Step, other: _Step, group: str, rank: int) -> None:
    if other.digests.get(group) != own.digests[group]:
        theirs, ours = other.order.count(group), own.order.count(group)
        msg = (
            f"rank {rank} runs other collectives in its planned step than this rank, or in another "
            f"order ({theirs} there, {ours} here), so they would wait for each other or mix up "
            "values. Give all ranks the same model, sample shapes and budget. Where parameters are "
            'sharded unevenly, use mode="frames".'
        )
        raise PlanMismatchError(msg)


def _confirm_order(steps: Mapping[int, _Step], rank: int) -> None:
    members = {group: ranks for step in steps.values() for group, ranks in step.members.items()}
    blocked = blocked_ranks({each: step.order for each, step in steps.items()}, members)
    if blocked:
        where = ", ".join(f"rank {each} in {group}" for each, group in sorted(blocked.items())[:4])
        msg = (
            f"ranks run the collectives of several process groups in different orders, and would "
            f"wait for ever (group, [its ranks]): {where}. Give all ranks the same model, sample "
            f"shapes and budget. This is rank {rank}."
        )
        raise PlanMismatchError(msg)
