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
    PARTIAL,
    ChunkedCall,
    ChunkRows,
    InseparableError,
    Rows,
    RowSpace,
    rows_within,
)
from rockmate.graph.chunking.linearity import check_linear, dependents
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
    reached = dependents(first, graph)
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_function" and (node in reached or first in node.all_input_nodes)
    ]
    return (
        graph,
        separate(nodes, {first: rows_within(inputs[0].shape, start, stop)}, RowSpace(_ROWS)),
        first,
    )


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
        if isinstance(value, ChunkRows):
            return (end - begin) * value.num_copies
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
Case = tuple[Call, list[Tensor], int]


def case(call: Call, *inputs: tuple[int, ...] | Tensor, dims: int = 0) -> Case:
    """A call, its inputs, given or drawn of a shape, and how many dims of the first are rows."""
    drawn = iter(tensors(*(each for each in inputs if isinstance(each, tuple))))
    given = [next(drawn) if isinstance(each, tuple) else each for each in inputs]
    return call, given, dims or (2 if inputs[0] == SPLIT else 1)


CALLS: dict[str, Case] = {
    "unary": case(lambda x: torch.tanh(x) * 2.0, FLAT),
    "binary with a whole": case(lambda x, w: x + w, FLAT, (5,)),
    "binary with another by rows": case(lambda x, y: x * y, FLAT, FLAT),
    "binary with a column": case(lambda x, y: x / y, FLAT, (_ROWS, 1)),
    "binary with fewer dims": case(lambda x, y: x - y, SPLIT, (5,)),
    "where": case(lambda x, y: torch.where(y > 0, x, 0.0), FLAT, (_ROWS, 1)),
    "masked_fill": case(lambda x: x.masked_fill(x > 0, 0.0), SPLIT),
    "cast": case(lambda x: x.float(), FLAT),
    "flatten": case(lambda x: x.view(-1, 5), SPLIT),
    "unflatten": case(lambda x: x.view(4, 2, 5), FLAT),
    "unflatten the last": case(lambda x: x.view(_ROWS, 5, 1), FLAT),
    "t": case(lambda x: x.t(), FLAT),
    "transpose": case(lambda x: x.transpose(1, 2), (_ROWS, 2, 5)),
    "permute": case(lambda x: x.permute(2, 0, 1), SPLIT),
    "expand": case(lambda x: x.expand(2, _ROWS, 7), (_ROWS, 1)),
    "unsqueeze": case(lambda x: x.unsqueeze(0).unsqueeze(-1), FLAT),
    "squeeze": case(lambda x: x.squeeze(1), (_ROWS, 1, 5)),
    "slice": case(lambda x: x[:, 1:4], FLAT),
    "split": case(lambda x: x.split(2, -1)[1], SPLIT),
    "split into sizes": case(lambda x: x.split([1, 4], 1)[1], FLAT),
    "select": case(lambda x: x[:, 2], FLAT),
    "pad": case(lambda x: functional.pad(x, (1, 2)), FLAT),
    "cat": case(lambda x, y: torch.cat([x, y], 1), FLAT, FLAT),
    "new_zeros": case(lambda x: x.new_zeros(x.shape), SPLIT),
    "sum over columns": case(lambda x: x.sum(1), FLAT),
    "sum over rows": case(lambda x: x.sum(0, keepdim=True), FLAT),
    "sum over both row dims": case(lambda x: x.sum((0, 1)), SPLIT),
    "sum of all": case(lambda x: x.sum(), SPLIT),
    "mean of all": case(lambda x: x.mean(), FLAT),
    "mean over rows": case(lambda x: x.mean(0), FLAT),
    "mean over columns": case(lambda x: x.mean(-1, keepdim=True), SPLIT),
    "amax": case(lambda x: x.amax(-1), FLAT),
    "max": case(lambda x: x.max(1).values, FLAT),
    "logsumexp": case(lambda x: x.logsumexp(-1), SPLIT),
    "softmax": case(lambda x: x.softmax(-1), SPLIT),
    "log-softmax": case(lambda x: x.log_softmax(1), FLAT),
    "gradient of log-softmax": case(
        lambda x, y: _aten._log_softmax_backward_data(x, y, 1, torch.float64), FLAT, FLAT
    ),
    "gather": case(lambda x, i: x.gather(1, i.unsqueeze(1)), FLAT, labels(5)),
    "scatter": case(lambda x, i: x.scatter(1, i.unsqueeze(1), 0.5), FLAT, labels(5)),
    "scatter_add": case(
        lambda x, i, y: x.scatter_add(1, i.unsqueeze(1), y), FLAT, labels(5), (_ROWS, 1)
    ),
    "layer norm": case(lambda x, w: functional.layer_norm(x, (5,), w), SPLIT, (5,)),
    "product, rows on the left": case(lambda x, w: x @ w, FLAT, (5, 4)),
    "product, rows on the right": case(lambda x, w: w @ x.t(), FLAT, (4, 5)),
    "product over rows": case(lambda x, y: x.t() @ y, FLAT, (_ROWS, 4)),
    "product over rows, on the right": case(lambda x, y: y @ x, FLAT, (4, _ROWS)),
    "product with bias": case(lambda x, w, b: torch.addmm(b, x, w), FLAT, (5, 4), (4,)),
    "product added to rows": case(lambda x, w, b: torch.addmm(b, x, w), FLAT, (5, 4), (_ROWS, 4)),
    "batched product": case(lambda x, y: torch.bmm(x, y), (_ROWS, 2, 5), (_ROWS, 5, 3)),
    "nll": case(lambda x, i: functional.nll_loss(x, i, reduction="sum"), FLAT, labels(5)),
    "squared error": case(lambda x, y: functional.mse_loss(x, y, reduction="sum"), SPLIT, SPLIT),
    "squared errors": case(lambda x, y: _aten.mse_loss(x, y, 0), FLAT, FLAT),
    "gradient of squared error": case(
        lambda x, y, g: _aten.mse_loss_backward(g, x, y, 2), FLAT, FLAT, ()
    ),
    "smooth l1": case(
        lambda x, y: functional.smooth_l1_loss(x, y, reduction="sum", beta=0.3), FLAT, FLAT
    ),
    "gradient of smooth l1": case(
        lambda x, y, g: _aten.smooth_l1_loss_backward(g, x, y, 2, 0.3), FLAT, FLAT, ()
    ),
    "huber": case(lambda x, y: functional.huber_loss(x, y, reduction="sum", delta=0.3), FLAT, FLAT),
    "gradient of huber": case(
        lambda x, y, g: _aten.huber_loss_backward(g, x, y, 0, 0.3), FLAT, FLAT, FLAT
    ),
    "binary": case(
        lambda x, y, w: _aten.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w, 2), FLAT, FLAT, (5,)
    ),
    "gradient of binary": case(
        lambda x, y, g: _aten.binary_cross_entropy_backward(g, x.sigmoid(), y, None, 2),
        FLAT,
        FLAT,
        (),
    ),
    "binary of logits": case(
        lambda x, y, w, p: _aten.binary_cross_entropy_with_logits(x, y, w, p, 2),
        SPLIT,
        SPLIT,
        (2, _ROWS // 2, 1),
        (5,),
    ),
    "nll along the last": case(
        lambda x, i: _aten.nll_loss2d_forward(x.t()[None, :, None], i[None, None], None, 2, 1)[0],
        FLAT,
        labels(5),
    ),
    "nll of samples": case(
        lambda x, i: _aten.nll_loss2d_forward(x, i[:, None, None].expand(-1, 2, 3), None, 0, 1)[0],
        (_ROWS, 5, 2, 3),
        labels(5),
    ),
    "gradient of nll along the last": case(
        lambda x, i, g: _aten.nll_loss2d_backward(
            g, x.t()[None, :, None].contiguous(), i[None, None], None, 2, 1, g
        ),
        FLAT,
        labels(5),
        (),
    ),
    "nll, one a row": case(
        lambda x, i: functional.nll_loss(x, i, reduction="none"), FLAT, labels(5)
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


MIXING: dict[str, tuple[Case, str]] = {
    "softmax": (case(lambda x: x.softmax(0), FLAT), "runs along the rows"),
    "a part of the row dims": (case(lambda x: x.softmax(1), SPLIT), "runs along the rows"),
    "cumsum": (case(lambda x: x.cumsum(0), FLAT), "has no rule"),
    "flip": (case(lambda x: x.flip(0), FLAT), "has no rule"),
    "roll": (case(lambda x: x.roll(1, 0), FLAT), "has no rule"),
    "slice": (case(lambda x: x[1:], FLAT), "runs along the rows"),
    "split": (case(lambda x: x.split(4)[0], FLAT), "runs along the rows"),
    "pad": (case(lambda x: functional.pad(x, (0, 0, 1, 0)), FLAT), "runs along the rows"),
    "sum of some": (case(lambda x: x.sum(0), SPLIT), "some of the rows' dims"),
    "rows into columns": (case(lambda x: x.view(4, 10), FLAT), "merges the rows"),
    "rows with rows": (case(lambda x: x @ x.t(), FLAT), "combines rows|along other dims"),
    "rows against columns": (case(lambda x: x + x.t(), (_ROWS, _ROWS)), "along different dims"),
    "a sum read again": (case(lambda x: x - x.sum(0), FLAT), "a sum over all rows"),
    "one row for all": (case(lambda x, y: x + y, SPLIT, (_ROWS // 2, 1)), "a part of the rows"),
    "apart": (case(lambda x: x.permute(0, 2, 1), SPLIT), "takes the dims of the rows apart"),
    "mean of losses": (
        case(lambda x, i: functional.nll_loss(x, i), FLAT, labels(5)),
        "divides by a count",
    ),
    "mean of squared errors": (
        case(lambda x, y: functional.mse_loss(x, y), FLAT, FLAT),
        "divides by a count",
    ),
    "gradient of their mean": (
        case(lambda x, y, g: _aten.mse_loss_backward(g, x, y, 1), FLAT, FLAT, ()),
        "divides by a count",
    ),
    "one target for all": (
        case(lambda x, y: _aten.mse_loss(x, y, 2), SPLIT, (_ROWS // 2, 1)),
        "a part of the rows",
    ),
    "slices of scores": (
        case(
            lambda g, x, i: _aten.nll_loss2d_backward(g[None, None], x, i, None, 0, 1, x.sum()),
            (_ROWS,),
            (1, 5, 1, _ROWS),
            torch.zeros(1, 1, _ROWS, dtype=torch.int64),
        ),
        "not contiguous",
    ),
    "classes along the rows": (
        case(
            lambda x, i: _aten.nll_loss2d_forward(x, i, None, 2, 1)[0],
            (1, _ROWS, 2, 3),
            torch.zeros(1, 2, 3, dtype=torch.int64),
            dims=2,
        ),
        "runs along the rows",
    ),
    "bias with a sum": (
        case(lambda x, y, b: torch.addmm(b, x.t(), y), FLAT, (_ROWS, 4), (4,)),
        "sums over the rows",
    ),
    "drawn": (case(lambda x: torch.bernoulli(x.sigmoid()), FLAT), "has no rule"),
}


@pytest.mark.parametrize("name", MIXING)
def test_refused(name: str) -> None:
    (call, inputs, stop), says = MIXING[name]
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
    dependent = dependents(gradient, graph)
    nodes = [node for node in graph.nodes if node in dependent and node is not gradient]
    if name in LINEAR:
        check_linear(nodes, dependent)
        expected, (first, second) = call(*inputs), inputs
        torch.testing.assert_close(call(3.0 * first, second), 3.0 * expected)
    else:
        with pytest.raises(InseparableError, match="not known to be linear"):
            check_linear(nodes, dependent)
