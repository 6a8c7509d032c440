"""TODO: graph.gradient_slices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import fx

from rockmate.graph.ir import Graph, Op, SlicedMatmul, SparseEmbeddingGradient

_SPLIT_ABOVE_BYTES = 1 << 22
_SLICE_BYTES = 1 << 21
_ROWS_PER_SLICE = 512  # fewer make the products slow


def choose_sink_forms(graph: Graph, *, like: Graph | None = None, but: Collection[Op] = ()) -> None:
    """Marks, in place, the ops whose result can be added to `.grad` piece by piece; their storage then has a piece's size.

    Args:
        graph: ops and storages.
        like: the graph of the same step at sizes that are nowhere smaller; only ops that are marked there are marked.
        but: ops that are not to be marked.
    """
    read = {storage for op in graph.ops for storage in op.reads}
    contributions = Counter(role.name for op in graph.ops for _, role in op.final_gradients)
    for op in (
        graph.ops
        if like is None
        else [op for op, other in zip(graph.ops, like.ops, strict=True) if other.gradient_sink_form]
    ):
        is_own = (
            op not in but
            and len(op.writes) == 1
            and len(op.final_gradients) == 1
            and op.writes[0] not in read
        )
        is_product = op.node.target is torch.ops.aten.mm.default
        if is_own and is_product and contributions[op.final_gradients[0][1].name] > 1:
            _add_whole_product(op)
            continue
        if not is_own or op.writes[0].num_bytes < _SPLIT_ABOVE_BYTES:
            continue
        if is_product:
            _split_product(op)
        elif op.node.target is torch.ops.aten.embedding_dense_backward.default:
            _split_embedding(op)


def _orientation(op: Op) -> tuple[bool, bool]:
    """Whether the gradient is the op's result as it is, and whether it is its transpose."""
    fake, delivered = op.node.meta["val"], op.final_gradients[0][0].meta["val"]
    rows, columns = fake.shape
    is_same = delivered.shape == fake.shape and delivered.stride() == fake.stride()
    return is_same, tuple(delivered.shape) == (columns, rows) and tuple(delivered.stride()) == (
        1,
        columns,
    )


def _add_whole_product(op: Op) -> None:
    is_same, is_flipped = _orientation(op)
    if is_same or is_flipped:
        rows = op.node.meta["val"].shape[0]
        op.gradient_sink_form = SlicedMatmul(
            is_flipped=is_flipped and not is_same, dim=0, slice_size=rows, is_one_of_several=True
        )
        op.writes[0].num_bytes = 0


def _split_product(op: Op) -> None:
    fake = op.node.meta["val"]
    rows, columns = fake.shape
    is_same, is_flipped = _orientation(op)
    longer = max(rows, columns)
    num_slices = min(-(-op.writes[0].num_bytes // _SLICE_BYTES), longer // _ROWS_PER_SLICE)
    if num_slices >= 2 and (is_same or is_flipped):
        size = -(-longer // num_slices)
        op.gradient_sink_form = SlicedMatmul(
            is_flipped=is_flipped, dim=0 if rows >= columns else 1, slice_size=size
        )
        op.writes[0].num_bytes = size * min(rows, columns) * fake.element_size()


def _split_embedding(op: Op) -> None:
    _, indices, num_weights, _, scale_grad_by_freq = op.node.args
    assert isinstance(indices, fx.Node)
    fake, num_rows = op.node.meta["val"], indices.meta["val"].numel()
    if (
        not scale_grad_by_freq
        and 2 * num_rows <= num_weights
        and op.final_gradients[0][0] is op.node
    ):
        op.gradient_sink_form = SparseEmbeddingGradient(num_rows=num_rows)
        op.writes[0].num_bytes = num_rows * fake.shape[1] * fake.element_size()
