"""Which kinds of convolutions are faster on contiguous values, by measurement."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from rockmate._torch.distributed import first_offer
from rockmate.capture.roles import Capture, copied_capture
from rockmate.costs.measure import measure_costs
from rockmate.graph.build import build_graph
from rockmate.graph.convolution_formats import kind_of, run_contiguous


def in_fastest_formats(capture: Capture, *, progress: bool = False) -> tuple[str, ...]:
    """Has convolutions compute on contiguous values, in place, where that is faster.

    Args:
        capture: a step that has values with channels last.
        progress: as for `measure_costs`.

    Returns:
        The kinds of these convolutions. Ranks of a process group take those of the first.
    """
    names = sorted(map(kind_of, capture.joint.graph.nodes))
    faster = sorted(_faster_contiguous(capture, progress=progress))
    agreed = first_offer(f"formats of {names}", ",".join(faster))
    kinds = tuple(filter(None, agreed.split(",")))
    run_contiguous(capture.joint.graph, kinds)
    return kinds


def _faster_contiguous(capture: Capture, *, progress: bool) -> frozenset[str]:
    """The kinds whose calls take less time in all on contiguous values, copies included."""
    contiguous = copied_capture(capture)
    run_contiguous(contiguous.joint.graph, None)
    graphs = [
        build_graph(each, returned_gradients=False)
        for each in (copied_capture(capture), contiguous)
    ]
    pairs = [
        (one, other)
        for one, other in zip(*(each.ops for each in graphs), strict=True)
        if one.node.target is not other.node.target
    ]
    if not pairs:
        return frozenset()
    before, after = (
        measure_costs(replace(graph, ops=ops), progress=progress).first
        for graph, ops in zip(graphs, zip(*pairs, strict=True), strict=True)
    )
    saved_ms = defaultdict[str, float](float)
    for (op, _), one, other in zip(pairs, before, after, strict=True):
        saved_ms[kind_of(op.node)] += one.time_ms - other.time_ms
    return frozenset(kind for kind, milliseconds in saved_ms.items() if milliseconds > 0)
