"""Whether ranks that run collectives of several groups, each in its own order, come to an end.

Ranks of one group may agree on the order of its collectives, and yet wait for each other for ever:
one rank runs A of the first group, then B of the second; another runs B, then A. With more ranks
the circle may be longer than two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def blocked_ranks(
    orders: Mapping[int, Sequence[str]], members: Mapping[str, Sequence[int]]
) -> dict[int, str]:
    """The ranks that would wait for ever, with the group in whose collective they would.

    A collective ends when all members of its group have come to it. Which of several that can end
    ends first makes no difference: it takes no other one's turn.

    Args:
        orders: rank -> the groups of its collectives, in the order in which it runs them.
        members: group -> its ranks, which all have an order.
    """
    place = dict.fromkeys(orders, 0)

    def next_group(rank: int) -> str | None:
        order = orders[rank]
        return order[place[rank]] if place[rank] < len(order) else None

    waiting = set(orders)
    while waiting:
        group = next_group(waiting.pop())
        if group is None:
            continue
        ranks = members[group]
        if all(next_group(rank) == group for rank in ranks):
            for rank in ranks:
                place[rank] += 1
            waiting.update(ranks)
    left = {rank: next_group(rank) for rank in orders}
    return {rank: group for rank, group in left.items() if group is not None}
