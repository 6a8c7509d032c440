"""When the hooks of each parameter fire in an emitted backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rockmate.capture.roles import RoleKind
from rockmate.graph.ir import Graph
from rockmate.schedule.flights import Flights
from rockmate.schedule.schedule import Schedule


def accumulated_names(graph: Graph, schedule: Schedule) -> list[str]:
    """The parameter name of each gradient that the backward accumulates, in order."""
    names = [role.name for _, role in graph.initial_gradients]
    for index in schedule.backward:
        names += [role.name for _, role in graph.ops[index].final_gradients]
    return names


class HookSchedule:
    """Positions in the backward at which the hooks of each parameter may fire.

    They may fire once all partial gradients are accumulated and no later op reads the parameter. A
    hook may change the parameter, as an optimizer inside the backward does.
    """

    def __init__(
        self, graph: Graph, schedule: Schedule, owner_of: Mapping[str, str], flights: Flights
    ) -> None:
        """See `emit` for the arguments."""
        names = accumulated_names(graph, schedule)
        self._owner_of = owner_of
        self._num_left = Counter(owner_of[name] for name in names)
        last_gradient = dict.fromkeys(self._num_left, -1)
        last_read = dict.fromkeys(self._num_left, -1)
        owner_at = {
            graph.storage_of[node]: owner_of[role.name]
            for node, role in graph.inputs
            if role.kind is RoleKind.PARAMETER
        }
        for position, index in enumerate(schedule.backward):
            op = graph.ops[index]
            place = len(schedule.forward) + position
            # A reduction hands its gradients over where it is awaited.
            is_later = flights.is_awaited_later(place)
            wait = flights.other_end[place] - len(schedule.forward) if is_later else position
            for _, role in op.final_gradients:
                owner = owner_of[role.name]
                last_gradient[owner] = max(last_gradient[owner], wait)
            for storage in op.reads:
                if storage in owner_at:
                    last_read[owner_at[storage]] = position
        self._read_later = {
            owner for owner, position in last_gradient.items() if last_read[owner] > position
        }
        # The sink knows a parameter by the names of its gradients. The owner's need not be among
        # them.
        name_of = {owner_of[name]: name for name in names}
        self._names_after: dict[int, list[str]] = {}
        for owner in sorted(self._read_later):
            self._names_after.setdefault(last_read[owner], []).append(name_of[owner])

    def is_final(self, name: str) -> bool:
        """Whether hooks fire with the next gradient of that name; to be asked once for each."""
        owner = self._owner_of[name]
        self._num_left[owner] -= 1
        return self._num_left[owner] == 0 and owner not in self._read_later

    def names_after(self, position: int) -> Sequence[str]:
        """Parameters whose hooks fire after the op at a position, without a gradient."""
        return self._names_after.get(position, ())
