"""The lower convex hull of (saved bytes, time), exactly and in polynomial time, by minimum cuts.

The Lagrangian relaxation  min time + lambda * saved bytes  is a minimum cut, like project selection
(Picard, 1976): with `R_o` = op o is recomputed and `N_v` = value v is needed, a plan pays

    time_o            where R_o = 1                          edge  o -> sink
    lambda * bytes_v  where N_v = 1 and R_maker(v) = 0       edge  v -> maker(v)
    infinity          where R_o = 1 and N_v = 0, o reads v   edge  o -> v

and N_v = 1 for required v (edge source -> maker). The variables on the source side of the cut equal
1. Walking from the two ends of the frontier, each cut either finds a new vertex strictly below the
chord between two known ones, whose slope is its lambda, or proves the chord an edge of the hull
(Eisner and Severance, 1976). Weights are integers (ticks * bytes), so nothing depends on rounding.
Cuts are found by Dinic's algorithm (1970), part by part; the hull of the whole is the Minkowski sum
of the parts' hulls: all their steps, cheapest time per byte first.

Each returned plan is the fastest for its own saved bytes. Pareto points above the hull are not
found.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from checkmate.problem import Knapsack, Solution, Status
from checkmate.reduction import Part, PartOp, assemble, reduce
from checkmate.verify import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """A vertex of a part's hull: its costs, and the positions in the part of the recomputed ops."""

    saved_bytes: int
    ticks: int
    recomputed: frozenset[int]


def convex_hull(
    problem: Knapsack, *, choose: Callable[[list[tuple[int, int]]], Collection[int]] | None = None
) -> tuple[Solution, ...]:
    """Plans on the lower convex hull of the frontier, by minimum cuts, without an ILP.

    Args:
        problem: The problem; whole models of some hundreds of ops are fine.
        choose: Gets (saved bytes, ticks) of every plan in order and returns the positions of those
            to assemble, since that takes longer than to find them. None assembles all.

    Returns:
        Verified plans of strictly falling saved bytes and strictly rising time. Every vertex of the
        hull is among them. Others lie on its edges: there, several parts have equal price, and some
        of them have moved.
    """
    reduced = reduce(problem)
    known: dict[tuple[PartOp, ...], tuple[Vertex, ...]] = {}
    hulls: list[tuple[Vertex, ...]] = []
    for part in reduced.parts:
        if part.ops not in known:
            known[part.ops] = part_hull(part)
        hulls.append(known[part.ops])
    recomputed = set(reduced.free)
    for part, vertices in zip(reduced.parts, hulls, strict=True):
        recomputed.update(part.indices[i] for i in vertices[0].recomputed)
    walk = merge_steps([[(v.saved_bytes, v.ticks) for v in vertices] for vertices in hulls])
    saved_bytes = [sum(vertices[0].saved_bytes for vertices in hulls)]
    ticks = [sum(vertices[0].ticks for vertices in hulls)]
    for which, to in walk:
        before, after = hulls[which][to - 1], hulls[which][to]
        saved_bytes.append(saved_bytes[-1] + after.saved_bytes - before.saved_bytes)
        ticks.append(ticks[-1] + after.ticks - before.ticks)
    points = list(zip(saved_bytes, ticks, strict=True))
    wanted = range(len(points)) if choose is None else frozenset(choose(points))
    plans = [assemble(problem, recomputed, Status.OPTIMAL)] if 0 in wanted else []
    for position, (which, to) in enumerate(walk, start=1):
        part, before, after = reduced.parts[which], hulls[which][to - 1], hulls[which][to]
        recomputed.difference_update(part.indices[i] for i in before.recomputed)
        recomputed.update(part.indices[i] for i in after.recomputed)
        if position in wanted:
            plans.append(assemble(problem, recomputed, Status.OPTIMAL))
    plans = drop_dominated(plans)
    for plan in plans:
        verify(problem, plan)
    return tuple(plans)


def min_saved_bytes(problem: Knapsack) -> int:
    """The fewest bytes that any plan saves; lower limits are infeasible. One minimum cut a part."""
    return sum(_min_bytes_vertex(part).saved_bytes for part in reduce(problem).parts)


def merge_steps(hulls: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The steps of several hulls in one order: the least time for each spared byte first.

    Args:
        hulls: For each part, its (saved bytes, ticks), from the least time to the least bytes.

    Returns:
        Pairs (part, index of the vertex that the step reaches). Ties go to the earlier part.
    """
    steps: list[tuple[Fraction, int, int]] = []
    for which, points in enumerate(hulls):
        for to, ((bytes_before, ticks_before), (bytes_after, ticks_after)) in enumerate(
            pairwise(points), start=1
        ):
            steps.append(
                (Fraction(ticks_after - ticks_before, bytes_before - bytes_after), which, to)
            )
    return [(which, to) for _, which, to in sorted(steps)]


def drop_dominated(plans: Iterable[Solution]) -> list[Solution]:
    """Drop dominated plans, so that bytes strictly fall and times, as floats, strictly rise."""
    kept: list[Solution] = []
    for plan in sorted(plans, key=lambda plan: (plan.saved_bytes, plan.time_ms)):
        if not kept or plan.time_ms < kept[-1].time_ms:
            kept.append(plan)
    kept.reverse()
    return kept


def part_hull(part: Part) -> tuple[Vertex, ...]:
    """The vertices of one part's hull, from the least time to the least bytes."""
    total_bytes = sum(op.kept_bytes + sum(op.link_bytes) for op in part.ops)
    fastest = _min_cut(part, ticks_weight=total_bytes + 1, bytes_weight=1)
    leanest = _min_bytes_vertex(part)
    if fastest.saved_bytes == leanest.saved_bytes:
        return (fastest,)
    vertices = [fastest]
    pending = [(fastest, leanest)]
    while pending:
        left, right = pending.pop()
        ticks_weight, bytes_weight = left.saved_bytes - right.saved_bytes, right.ticks - left.ticks
        between = _min_cut(part, ticks_weight=ticks_weight, bytes_weight=bytes_weight)
        chord = left.ticks * ticks_weight + left.saved_bytes * bytes_weight
        if between.ticks * ticks_weight + between.saved_bytes * bytes_weight < chord:
            pending += [(between, right), (left, between)]
        else:
            vertices.append(right)
    return tuple(vertices)


def _min_bytes_vertex(part: Part) -> Vertex:
    """The choice of the fewest bytes; of those, the one of the least time."""
    return _min_cut(part, ticks_weight=1, bytes_weight=1 + sum(op.ticks for op in part.ops))


def _min_cut(part: Part, *, ticks_weight: int, bytes_weight: int) -> Vertex:
    """The choice of least `ticks_weight * ticks + bytes_weight * bytes` in a part."""
    ops = part.ops
    source, sink = len(ops), len(ops) + 1
    num_links = sum(len(op.links_out) for op in ops)
    network = _Network(len(ops) + 2 + num_links)
    infinite = 1 + sum(
        op.ticks * ticks_weight + (op.kept_bytes + sum(op.link_bytes)) * bytes_weight for op in ops
    )
    for node, op in enumerate(ops):
        network.add(source, node, op.kept_bytes * bytes_weight)
        network.add(node, sink, op.ticks * ticks_weight if op.recomputable else infinite)
        for link in op.links_in:
            network.add(node, sink + 1 + link, infinite)
        for link, size in zip(op.links_out, op.link_bytes, strict=True):
            network.add(sink + 1 + link, node, size * bytes_weight)
    side = network.source_side(source, sink)
    recomputed = frozenset(node for node in range(len(ops)) if side[node])
    needed = {link for node in recomputed for link in ops[node].links_in}
    saved_bytes = 0
    for node, op in enumerate(ops):
        if node not in recomputed:
            saved_bytes += op.kept_bytes
            saved_bytes += sum(
                s for link, s in zip(op.links_out, op.link_bytes, strict=True) if link in needed
            )
    return Vertex(
        saved_bytes=saved_bytes, ticks=sum(ops[i].ticks for i in recomputed), recomputed=recomputed
    )


class _Network:
    """A flow network with integer capacities; edge e ^ 1 is the reverse of edge e."""

    def __init__(self, num_nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(num_nodes)]
        self.head: list[int] = []
        self.room: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """Add an edge; one of no capacity is left out."""
        if capacity > 0:
            self.edges[tail].append(len(self.head))
            self.edges[head].append(len(self.head) + 1)
            self.head += [head, tail]
            self.room += [capacity, 0]

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Whether each node is on the source's side of the least cut, by Dinic's algorithm.

        Of several least cuts, the one with the smallest source side.
        """
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            self._block(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        level = [-1] * len(self.edges)
        level[source] = 0
        queue = deque([source])
        head, room, edges = self.head, self.room, self.edges
        while queue:
            node = queue.popleft()
            if node == sink:
                continue
            for edge in edges[node]:
                if room[edge] and level[head[edge]] < 0:
                    level[head[edge]] = level[node] + 1
                    queue.append(head[edge])
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        """Push a blocking flow through the level graph, depth first, without recursion."""
        head, room, edges = self.head, self.room, self.edges
        cursor = [0] * len(edges)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                push = min(room[edge] for edge in path)
                first_full = len(path)
                for position in reversed(range(len(path))):
                    edge = path[position]
                    room[edge] -= push
                    room[edge ^ 1] += push
                    if not room[edge]:
                        first_full = position
                node = head[path[first_full] ^ 1]
                del path[first_full:]
                continue
            out = edges[node]
            while cursor[node] < len(out):
                edge = out[cursor[node]]
                if room[edge] and level[head[edge]] == level[node] + 1:
                    break
                cursor[node] += 1
            if cursor[node] < len(out):
                path.append(out[cursor[node]])
                node = head[path[-1]]
            elif path:
                node = head[path.pop() ^ 1]
                cursor[node] += 1
            else:
                return
