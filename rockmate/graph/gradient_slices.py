"""Chooses which weight gradients are added to `.grad` in slices, without existing as a whole.

Three kinds of ops qualify, if their result is the gradient of one parameter and nothing reads it:

* a matrix product that is one of several contributions to the gradient: BLAS adds it to `.grad` in
  one call, and its storage counts no bytes;
* a large matrix product: a slice of rows or columns is made at a time;
* the gradient of a large embedding table of which few rows are touched: only those rows are made.

The storage then has the size of its largest slice. `rockmate/runtime/gradient_sink.py` runs the
forms. They are chosen here, since they decide what the planner counts.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from rockmate.graph.hooked_gradients import hooked_producers
from rockmate.graph.ir import Graph, Op, SlicedMatmul, SparseEmbeddingGradient
from rockmate.graph.pass_options import PassOptions

_aten = torch.ops.aten


# Bytes of a slice of a matrix product, and its least rows or columns: thinner products are slow. A
# GPU needs larger products to be busy: here its rate is far from that of its memory.
_CPU_SLICE, _CUDA_SLICE = (1 << 21, 512), (1 << 25, 2048)
# Gradients of fewer bytes than those of so many slices are computed as a whole.
_LEAST_SLICES = 2


def assign_sink_forms(graph: Graph, options: PassOptions) -> Graph:
    """Sets `Op.gradient_sink_form` and the size of the op's storage, in place.

    Gradients of hooked parameters get no form, nor do ops that have none in `options.like`.
    """
    whole = {producer for _, producer in hooked_producers(graph, options)}
    read = {storage for op in graph.ops for storage in op.reads}
    num_contributions = Counter(role.name for op in graph.ops for _, role in op.final_gradients)
    like = options.like.ops if options.like else graph.ops
    for op, other in zip(graph.ops, like, strict=True):
        makes_one_gradient = len(op.writes) == 1 and len(op.final_gradients) == 1
        if op in whole or not makes_one_gradient or op.writes[0] in read:
            continue
        if options.like and not other.gradient_sink_form:
            continue
        name = op.final_gradients[0][1].name
        is_large = op.writes[0].num_bytes >= _LEAST_SLICES * _slice_on(op.device)[0]
        if op.node.target is _aten.mm.default:
            if num_contributions[name] > 1:
                _accumulate_product(op)
            elif is_large:
                _slice_product(op)
        elif op.node.target is _aten.embedding_dense_backward.default and is_large:
            _keep_touched_rows(op)
    return graph


def _slice_on(device: torch.device) -> tuple[int, int]:
    return _CUDA_SLICE if device.type == "cuda" else _CPU_SLICE


def _accumulate_product(op: Op) -> None:
    is_same, is_flipped = _orientation(op)
    if is_same or is_flipped:
        op.gradient_sink_form = SlicedMatmul(
            is_flipped=not is_same,
            dim=0,
            slice_size=op.node.meta["val"].shape[0],
            is_one_of_several=True,
        )
        op.writes[0].num_bytes = 0


def _slice_product(op: Op) -> None:
    fake = op.node.meta["val"]
    rows, columns = fake.shape
    is_same, is_flipped = _orientation(op)
    longer = max(rows, columns)
    slice_bytes, least_rows = _slice_on(op.device)
    wanted = -(-op.writes[0].num_bytes // slice_bytes)
    num_slices = min(wanted, longer // least_rows)
    if num_slices >= _LEAST_SLICES and (is_same or is_flipped):
        size = -(-longer // num_slices)
        dim = 0 if rows >= columns else 1
        op.gradient_sink_form = SlicedMatmul(is_flipped=is_flipped, dim=dim, slice_size=size)
        op.writes[0].num_bytes = size * min(rows, columns) * fake.element_size()


def _keep_touched_rows(op: Op) -> None:
    _, indices, num_weights, _, scale_grad_by_freq = op.node.args
    assert isinstance(indices, fx.Node)
    fake, num_rows = op.node.meta["val"], indices.meta["val"].numel()
    touches_few = 2 * num_rows <= num_weights
    is_whole_gradient = op.final_gradients[0][0] is op.node
    if touches_few and is_whole_gradient and not scale_grad_by_freq:
        op.gradient_sink_form = SparseEmbeddingGradient(num_rows=num_rows)
        op.writes[0].num_bytes = num_rows * fake.shape[1] * fake.element_size()


def _orientation(op: Op) -> tuple[bool, bool]:
    """Whether the gradient is the op's result, and whether it is its transpose."""
    fake, gradient = op.node.meta["val"], op.final_gradients[0][0].meta["val"]
    rows, columns = fake.shape
    is_same = gradient.shape == fake.shape and gradient.stride() == fake.stride()
    layout = tuple(gradient.shape), tuple(gradient.stride())
    return is_same, layout == ((columns, rows), (1, columns))
