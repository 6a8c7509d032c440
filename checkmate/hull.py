"""The lower convex hull of (saved bytes, time) of a part, in polynomial time, by minimum cuts.

The Lagrangian relaxation  min time + lambda * saved bytes  is a minimum cut, like project selection
(Picard, 1976): with `R_o` = op o is recomputed and `N_v` = value v is needed, a plan pays

    time_o            where R_o = 1                          edge  o -> sink
    lambda * bytes_v  where N_v = 1 and R_maker(v) = 0       edge  v -> maker(v)
    infinity          where R_o = 1 and N_v = 0, o reads v   edge  o -> v

and N_v = 1 for required v (edge source -> maker). The variables on the source side of the cut equal
1. Walking from the two ends of the frontier, each cut either finds a new vertex strictly below the
chord between two known ones, whose slope is its lambda, or proves the chord an edge of the hull
(Eisner and Severance, 1976). Weights are integers (ticks * bytes), so nothing depends on rounding.
Cuts are found by Dinic's algorithm (1970), part by part.

Divided by lambda, only the capacities into the sink depend on it, and they fall as it grows. So the
source sides of least cuts are nested: what is recomputed at one price of a byte is recomputed at
every higher one (Gallo, Grigoriadis and Tarjan, 1989). A cut between two known vertices therefore
decides about those ops alone that the leaner one recomputes and the faster one does not. The
others are contracted into the source and the sink, and the networks of a walk shrink as it goes on.

A cut that proves nothing more than that a chord lies within a tolerance of the hull may end the
walk there as well: the cut is a supporting line below the chord, and the hull lies between the two
(the sandwich algorithm: Burkard, Hamacher and Rote, 1991).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from checkmate.reduction import PartOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Vertex:
    """A vertex of a part's hull: its costs, and the positions in the part of the recomputed ops."""

    saved_bytes: int
    ticks: int
    recomputed: frozenset[int]


@lru_cache(maxsize=1024)
def part_hull(ops: tuple[PartOp, ...], tolerance: float = 0.0) -> tuple[Vertex, ...]:
    """Vertices of one part's hull, from the least time to the least bytes.

    Args:
        ops: The part's ops. The answer is kept: equal layers, program points and budgets ask again.
        tolerance: How far the line through the vertices may lie above the hull, as a share of the
            ticks between the fastest and the leanest choice. 0 finds every vertex.
    """
    total_bytes = sum(op.kept_bytes + sum(op.link_bytes) for op in ops)
    fastest = _min_cut(ops, ticks_weight=total_bytes + 1, bytes_weight=1)
    # The fewest bytes; of those, the least time.
    leanest = _min_cut(ops, ticks_weight=1, bytes_weight=1 + sum(op.ticks for op in ops))
    if fastest.saved_bytes == leanest.saved_bytes:
        return (fastest,)
    tolerated_ticks = tolerance * (leanest.ticks - fastest.ticks)
    vertices = [fastest]
    pending = [(fastest, leanest)]
    while pending:
        left, right = pending.pop()
        ticks_weight, bytes_weight = left.saved_bytes - right.saved_bytes, right.ticks - left.ticks
        between = _min_cut(
            ops, ticks_weight=ticks_weight, bytes_weight=bytes_weight, between=(left, right)
        )
        chord = left.ticks * ticks_weight + left.saved_bytes * bytes_weight
        below = chord - between.ticks * ticks_weight - between.saved_bytes * bytes_weight
        if below > tolerated_ticks * ticks_weight:
            pending += [(between, right), (left, between)]
        else:
            vertices += [between, right] if below else [right]
    return tuple(vertices)


def _min_cut(
    ops: tuple[PartOp, ...],
    *,
    ticks_weight: int,
    bytes_weight: int,
    between: tuple[Vertex, Vertex] | None = None,
) -> Vertex:
    """The choice of least `ticks_weight * ticks + bytes_weight * bytes` in a part.

    Between two vertices, of a lower and of a higher price of a byte, what the first recomputes is
    recomputed, and nothing that the second does not. Both weights are at least 1.
    """
    surely = between[0].recomputed if between else frozenset[int]()
    open_nodes = sorted(between[1].recomputed - surely) if between else range(len(ops))
    side = _cut_between(ops, open_nodes, surely, ticks_weight, bytes_weight)
    return _vertex(ops, surely.union(side))


def _cut_between(
    ops: tuple[PartOp, ...],
    open_nodes: Sequence[int],
    surely: frozenset[int],
    ticks_weight: int,
    bytes_weight: int,
) -> list[int]:
    """Those of `open_nodes` on the source side of the least cut, all else being decided."""
    place = {node: index for index, node in enumerate(open_nodes)}
    is_needed = {link for node in surely for link in ops[node].links_in}
    # A link has a node if an open op reads it, and nothing that is decided needs it.
    links = sorted({v for node in open_nodes for v in ops[node].links_in} - is_needed)
    link_place = {link: len(place) + index for index, link in enumerate(links)}
    source, sink = len(place) + len(links), len(place) + len(links) + 1
    network = _Network(sink + 1)
    total = sum(op.ticks * ticks_weight for op in ops)
    total += sum((op.kept_bytes + sum(op.link_bytes)) * bytes_weight for op in ops)
    infinite = 1 + total
    for node, index in place.items():
        op = ops[node]
        sizes = zip(op.links_out, op.link_bytes, strict=True)
        needed_bytes = op.kept_bytes + sum(size for link, size in sizes if link in is_needed)
        network.add(source, index, needed_bytes * bytes_weight)
        network.add(index, sink, op.ticks * ticks_weight if op.recomputable else infinite)
        for link in op.links_in:
            if link in link_place:
                network.add(index, link_place[link], infinite)
    for node, op in enumerate(ops):
        # Of what is recomputed for sure, no link has to be saved.
        if node not in surely:
            for link, size in zip(op.links_out, op.link_bytes, strict=True):
                if link in link_place:
                    network.add(link_place[link], place.get(node, sink), size * bytes_weight)
    side = network.source_side(source, sink)
    return [node for node, index in place.items() if side[index]]


def _vertex(ops: tuple[PartOp, ...], recomputed: frozenset[int]) -> Vertex:
    """The costs of recomputing these ops."""
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
