"""Each rule for rows, against the call itself.

Run on every chunk, the parts give what the call gives on the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from rockmate.graph.chunking.forms import (
    CHUNK_ROWS,
    PARTIAL,
    ChunkedCall,
    InseparableError,
    Rows,
    rows_within,
)
from rockmate.graph.chunking.linearity import check_linear, value_dependents
from rockmate.graph.chunking.separate import separate

_aten = torch.ops.aten
_SIZES = (3, 1, 4)  # rows of the chunks
_ROWS = sum(_SIZES)
Call = Callable[..., Any]


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def labels(high: int) -> Tensor:
    return torch.randint(0, high, (_ROWS,), generator=torch.Generator().manual_seed(1))


def traced(call: Call, inputs: list[Tensor]) -> fx.Graph:
    return make_fx(call, tracing_mode="fake")(*inputs).graph


def separated(
    call: Call, inputs: list[Tensor], start: int, stop: int
) -> tuple[fx.Graph, dict[fx.Node, ChunkedCall], fx.Node]:
    """The traced call with its first input by rows."""
    graph = traced(call, inputs)
    first = next(iter(graph.nodes))
    reached = value_dependents(first, graph)
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and (node in reached or first in node.all_input_nodes)
    ]
    return graph, separate(nodes, {first: rows_within(inputs[0].shape, start, stop)}, _ROWS), first


def part(value: Tensor, rows: Rows, begin: int, end: int) -> Tensor:
    """The rows from `begin` to `end` of a value, row dims taken to 1 x ... x 1 x rows."""
    before, after = value.shape[: rows.start], value.shape[rows.stop :]
    flat = value.reshape(*before, prod(value.shape[rows.start : rows.stop]), *after)
    ones = [1] * (rows.stop - rows.start - 1)
    return flat.narrow(rows.start, begin, end - begin).reshape(*before, *ones, end - begin, *after)


def of_chunk(
    chunked_calls: dict[fx.Node, ChunkedCall],
    whole: dict[fx.Node, Any],
    given: dict[fx.Node, Rows],
    begin: int,
    end: int,
) -> dict[fx.Node, Any]:
    """What each call makes on the rows from `begin` to `end`."""
    values: dict[fx.Node, Any] = {}

    def argument(value: Any, slices: Mapping[fx.Node, Rows]) -> Any:
        if value is CHUNK_ROWS:
            return end - begin
        if isinstance(value, list | tuple):
            return [argument(item, slices) for item in value]
        if not isinstance(value, fx.Node) or value in values:
            return values.get(value, value)
        rows = slices.get(value)
        return whole[value] if rows is None else part(whole[value], rows, begin, end)

    for node, chunked_call in chunked_calls.items():
        args = [
            argument(value, {**chunked_call.slices, **given})
            for value in (node.args if chunked_call.args is None else chunked_call.args)
        ]
        target: Any = chunked_call.target or node.target
        values[node] = target(*args, **node.kwargs)
    return values


def joined(chunked_call: ChunkedCall, parts: list[Tensor], node: fx.Node) -> Tensor:
    (form,) = chunked_call.forms
    if form is PARTIAL:
        return torch.stack(parts).sum(0) / chunked_call.divisor
    assert isinstance(form, Rows)
    return torch.cat(parts, form.stop - 1).reshape(node.meta["val"].shape)


def values_of(graph: fx.Graph, inputs: list[Tensor]) -> dict[fx.Node, Any]:
    """Every value of the graph, run as a whole."""
    values: dict[fx.Node, Any] = dict(
        zip([node for node in graph.nodes if node.op == "placeholder"], inputs, strict=True)
    )
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


FLAT = (_ROWS, 5)
SPLIT = (2, _ROWS // 2, 5)  # rows are dims 0 and 1 together
CALLS: dict[str, tuple[Call, list[Tensor], int]] = {
    "unary": (lambda x: torch.tanh(x) * 2.0, tensors(FLAT), 1),
    "binary with a whole": (lambda x, w: x + w, tensors(FLAT, (5,)), 1),
    "binary with another by rows": (lambda x, y: x * y, tensors(FLAT, FLAT), 1),
    "binary with a column": (lambda x, y: x / y, tensors(FLAT, (_ROWS, 1)), 1),
    "binary with fewer dims": (lambda x, y: x - y, tensors(SPLIT, (5,)), 2),
    "where": (lambda x, y: torch.where(y > 0, x, 0.0), tensors(FLAT, (_ROWS, 1)), 1),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), tensors(SPLIT), 2),
    "cast": (lambda x: x.float(), tensors(FLAT), 1),
    "flatten": (lambda x: x.view(-1, 5), tensors(SPLIT), 2),
    "unflatten": (lambda x: x.view(4, 2, 5), tensors(FLAT), 1),
    "unflatten the last": (lambda x: x.view(_ROWS, 5, 1), tensors(FLAT), 1),
    "t": (lambda x: x.t(), tensors(FLAT), 1),
    "transpose": (lambda x: x.transpose(1, 2), tensors((_ROWS, 2, 5)), 1),
    "permute": (lambda x: x.permute(2, 0, 1), tensors(SPLIT), 2),
    "expand": (lambda x: x.expand(2, _ROWS, 7), tensors((_ROWS, 1)), 1),
    "unsqueeze": (lambda x: x.unsqueeze(0).unsqueeze(-1), tensors(FLAT), 1),
    "squeeze": (lambda x: x.squeeze(1), tensors((_ROWS, 1, 5)), 1),
    "slice": (lambda x: x[:, 1:4], tensors(FLAT), 1),
    "split": (lambda x: x.split(2, -1)[1], tensors(SPLIT), 2),
    "split into sizes": (lambda x: x.split([1, 4], 1)[1], tensors(FLAT), 1),
    "select": (lambda x: x[:, 2], tensors(FLAT), 1),
    "pad": (lambda x: functional.pad(x, (1, 2)), tensors(FLAT), 1),
    "cat": (lambda x, y: torch.cat([x, y], 1), tensors(FLAT, FLAT), 1),
    "new_zeros": (lambda x: x.new_zeros(x.shape), tensors(SPLIT), 2),
    "sum over columns": (lambda x: x.sum(1), tensors(FLAT), 1),
    "sum over rows": (lambda x: x.sum(0, keepdim=True), tensors(FLAT), 1),
    "sum over both row dims": (lambda x: x.sum((0, 1)), tensors(SPLIT), 2),
    "sum of all": (lambda x: x.sum(), tensors(SPLIT), 2),
    "mean of all": (lambda x: x.mean(), tensors(FLAT), 1),
    "mean over rows": (lambda x: x.mean(0), tensors(FLAT), 1),
    "mean over columns": (lambda x: x.mean(-1, keepdim=True), tensors(SPLIT), 2),
    "amax": (lambda x: x.amax(-1), tensors(FLAT), 1),
    "max": (lambda x: x.max(1).values, tensors(FLAT), 1),
    "logsumexp": (lambda x: x.logsumexp(-1), tensors(SPLIT), 2),
    "softmax": (lambda x: x.softmax(-1), tensors(SPLIT), 2),
    "log-softmax": (lambda x: x.log_softmax(1), tensors(FLAT), 1),
    "gradient of log-softmax": (
        lambda x, y: _aten._log_softmax_backward_data(x, y, 1, torch.float64),
        tensors(FLAT, FLAT),
        1,
    ),
    "gather": (lambda x, i: x.gather(1, i.unsqueeze(1)), [*tensors(FLAT), labels(5)], 1),
    "scatter": (lambda x, i: x.scatter(1, i.unsqueeze(1), 0.5), [*tensors(FLAT), labels(5)], 1),
    "scatter_add": (
        lambda x, i, y: x.scatter_add(1, i.unsqueeze(1), y),
        [*tensors(FLAT), labels(5), *tensors((_ROWS, 1))],
        1,
    ),
    "layer norm": (lambda x, w: functional.layer_norm(x, (5,), w), tensors(SPLIT, (5,)), 2),
    "product, rows on the left": (lambda x, w: x @ w, tensors(FLAT, (5, 4)), 1),
    "product, rows on the right": (lambda x, w: w @ x.t(), tensors(FLAT, (4, 5)), 1),
    "product over rows": (lambda x, y: x.t() @ y, tensors(FLAT, (_ROWS, 4)), 1),
    "product over rows, on the right": (lambda x, y: y @ x, tensors(FLAT, (4, _ROWS)), 1),
    "product with bias": (lambda x, w, b: torch.addmm(b, x, w), tensors(FLAT, (5, 4), (4,)), 1),
    "product added to rows": (
        lambda x, w, b: torch.addmm(b, x, w),
        tensors(FLAT, (5, 4), (_ROWS, 4)),
        1,
    ),
    "batched product": (lambda x, y: torch.bmm(x, y), tensors((_ROWS, 2, 5), (_ROWS, 5, 3)), 1),
    "nll": (
        lambda x, i: functional.nll_loss(x, i, reduction="sum"),
        [*tensors(FLAT), labels(5)],
        1,
    ),
    "squared error": (
        lambda x, y: functional.mse_loss(x, y, reduction="sum"),
        tensors(SPLIT, SPLIT),
        2,
    ),
    "squared errors": (lambda x, y: _aten.mse_loss(x, y, 0), tensors(FLAT, FLAT), 1),
    "gradient of squared error": (
        lambda x, y, g: _aten.mse_loss_backward(g, x, y, 2),
        tensors(FLAT, FLAT, ()),
        1,
    ),
    "smooth l1": (
        lambda x, y: functional.smooth_l1_loss(x, y, reduction="sum", beta=0.3),
        tensors(FLAT, FLAT),
        1,
    ),
    "gradient of smooth l1": (
        lambda x, y, g: _aten.smooth_l1_loss_backward(g, x, y, 2, 0.3),
        tensors(FLAT, FLAT, ()),
        1,
    ),
    "huber": (
        lambda x, y: functional.huber_loss(x, y, reduction="sum", delta=0.3),
        tensors(FLAT, FLAT),
        1,
    ),
    "gradient of huber": (
        lambda x, y, g: _aten.huber_loss_backward(g, x, y, 0, 0.3),
        tensors(FLAT, FLAT, FLAT),
        1,
    ),
    "binary": (
        lambda x, y, w: _aten.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w, 2),
        tensors(FLAT, FLAT, (5,)),
        1,
    ),
    "gradient of binary": (
        lambda x, y, g: _aten.binary_cross_entropy_backward(g, x.sigmoid(), y, None, 2),
        tensors(FLAT, FLAT, ()),
        1,
    ),
    "binary of logits": (
        lambda x, y, w, p: _aten.binary_cross_entropy_with_logits(x, y, w, p, 2),
        tensors(SPLIT, SPLIT, (2, _ROWS // 2, 1), (5,)),
        2,
    ),
    "nll along the last": (
        lambda x, i: _aten.nll_loss2d_forward(x.t()[None, :, None], i[None, None], None, 2, 1)[0],
        [*tensors(FLAT), labels(5)],
        1,
    ),
    "nll of samples": (
        lambda x, i: _aten.nll_loss2d_forward(x, i[:, None, None].expand(-1, 2, 3), None, 0, 1)[0],
        [*tensors((_ROWS, 5, 2, 3)), labels(5)],
        1,
    ),
    "gradient of nll along the last": (
        lambda x, i, g: _aten.nll_loss2d_backward(
            g, x.t()[None, :, None].contiguous(), i[None, None], None, 2, 1, g
        ),
        [*tensors(FLAT), labels(5), *tensors(())],
        1,
    ),
    "nll, one a row": (
        lambda x, i: functional.nll_loss(x, i, reduction="none"),
        [*tensors(FLAT), labels(5)],
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_parts_give_the_whole(name: str) -> None:
    call, inputs, stop = CALLS[name]
    graph, chunked_calls, first = separated(call, inputs, 0, stop)
    whole = values_of(graph, inputs)
    given = {first: rows_within(inputs[0].shape, 0, stop)}
    edges = [0, *itertools.accumulate(_SIZES)]
    chunks = [
        of_chunk(chunked_calls, whole, given, begin, end)
        for begin, end in itertools.pairwise(edges)
    ]
    for node, chunked_call in chunked_calls.items():
        if isinstance(whole[node], Tensor):
            found = joined(chunked_call, [values[node] for values in chunks], node)
            torch.testing.assert_close(found, whole[node], rtol=1e-12, atol=1e-12)


MIXING: dict[str, tuple[Call, list[Tensor], int, str]] = {
    "softmax": (lambda x: x.softmax(0), tensors(FLAT), 1, "runs along the rows"),
    "a part of the row dims": (lambda x: x.softmax(1), tensors(SPLIT), 2, "runs along the rows"),
    "cumsum": (lambda x: x.cumsum(0), tensors(FLAT), 1, "has no rule"),
    "flip": (lambda x: x.flip(0), tensors(FLAT), 1, "has no rule"),
    "roll": (lambda x: x.roll(1, 0), tensors(FLAT), 1, "has no rule"),
    "slice": (lambda x: x[1:], tensors(FLAT), 1, "runs along the rows"),
    "split": (lambda x: x.split(4)[0], tensors(FLAT), 1, "runs along the rows"),
    "pad": (lambda x: functional.pad(x, (0, 0, 1, 0)), tensors(FLAT), 1, "runs along the rows"),
    "sum of some": (lambda x: x.sum(0), tensors(SPLIT), 2, "some of the rows' dims"),
    "rows into columns": (lambda x: x.view(4, 10), tensors(FLAT), 1, "merges the rows"),
    "rows with rows": (lambda x: x @ x.t(), tensors(FLAT), 1, "combines rows|along other dims"),
    "rows against columns": (
        lambda x: x + x.t(),
        tensors((_ROWS, _ROWS)),
        1,
        "along different dims",
    ),
    "a sum read again": (lambda x: x - x.sum(0), tensors(FLAT), 1, "a sum over all rows"),
    "one row for all": (
        lambda x, y: x + y,
        tensors(SPLIT, (_ROWS // 2, 1)),
        2,
        "a part of the rows",
    ),
    "apart": (lambda x: x.permute(0, 2, 1), tensors(SPLIT), 2, "takes the dims of the rows apart"),
    "mean of losses": (
        lambda x, i: functional.nll_loss(x, i),
        [*tensors(FLAT), labels(5)],
        1,
        "divides by a count",
    ),
    "mean of squared errors": (
        lambda x, y: functional.mse_loss(x, y),
        tensors(FLAT, FLAT),
        1,
        "divides by a count",
    ),
    "gradient of their mean": (
        lambda x, y, g: _aten.mse_loss_backward(g, x, y, 1),
        tensors(FLAT, FLAT, ()),
        1,
        "divides by a count",
    ),
    "one target for all": (
        lambda x, y: _aten.mse_loss(x, y, 2),
        tensors(SPLIT, (_ROWS // 2, 1)),
        2,
        "a part of the rows",
    ),
    "slices of scores": (
        lambda g, x, i: _aten.nll_loss2d_backward(g[None, None], x, i, None, 0, 1, x.sum()),
        [*tensors((_ROWS,), (1, 5, 1, _ROWS)), torch.zeros(1, 1, _ROWS, dtype=torch.int64)],
        1,
        "not contiguous",
    ),
    "classes along the rows": (
        lambda x, i: _aten.nll_loss2d_forward(x, i, None, 2, 1)[0],
        [*tensors((1, _ROWS, 2, 3)), torch.zeros(1, 2, 3, dtype=torch.int64)],
        2,
        "runs along the rows",
    ),
    "bias with a sum": (
        lambda x, y, b: torch.addmm(b, x.t(), y),
        tensors(FLAT, (_ROWS, 4), (4,)),
        1,
        "sums over the rows",
    ),
    "drawn": (lambda x: torch.bernoulli(x.sigmoid()), tensors(FLAT), 1, "has no rule"),
}


@pytest.mark.parametrize("name", MIXING)
def test_refused(name: str) -> None:
    call, inputs, stop, says = MIXING[name]
    with pytest.raises(InseparableError, match=says):
        separated(call, inputs, 0, stop)


LINEAR: dict[str, Call] = {
    "products and sums": lambda g, w: (g * w).sum(0) - (g @ w.t()).mean(),
    "views": lambda g, w: torch.cat([g.t(), g.t()]).unsqueeze(0).expand(2, -1, -1) / w.sum(),
    "masks": lambda g, w: torch.where(w > 0, g, 0.0).masked_fill(w < -1, 0.0),
    "gradients of losses": lambda g, w: _aten.huber_loss_backward(
        _aten.mse_loss_backward(g, w, w + 1, 0), w, w * 2, 0, 0.3
    ),
    "gradients": lambda g, w: _aten.tanh_backward(
        _aten._softmax_backward_data(g, w, 1, torch.float64), w
    ),
}
NOT_LINEAR: dict[str, Call] = {
    "clamp": lambda g, w: g.clamp(-1, 1) + w.sum(),
    "square": lambda g, w: g * g + w.sum(),
    "divisor": lambda g, w: w / g,
    "affine": lambda g, w: g + w,
    "fill": lambda g, w: g.masked_fill(w > 0, 1.0),
    "condition": lambda g, w: torch.where(g > 0, g, 0.0) + w.sum() * 0,
    "norm": lambda g, w: g / g.abs().sum() + w.sum() * 0,
}


@pytest.mark.parametrize("name", [*LINEAR, *NOT_LINEAR])
def test_linearity(name: str) -> None:
    call, inputs = {**LINEAR, **NOT_LINEAR}[name], tensors(FLAT, FLAT)
    graph = traced(call, inputs)
    gradient = next(iter(graph.nodes))
    dependent = value_dependents(gradient, graph)
    nodes = [node for node in graph.nodes if node in dependent and node is not gradient]
    if name in LINEAR:
        check_linear(nodes, dependent)
        expected, (first, second) = call(*inputs), inputs
        torch.testing.assert_close(call(3.0 * first, second), 3.0 * expected)
    else:
        with pytest.raises(InseparableError, match="not known to be linear"):
            check_linear(nodes, dependent)
