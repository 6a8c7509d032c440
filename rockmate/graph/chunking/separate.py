"""Separates the calls of a region along its rows, by one rule for each op, in graph order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

from torch import fx

import rockmate.graph.chunking.loss_rules
import rockmate.graph.chunking.view_rules  # noqa: F401, which adds rules
from rockmate.capture.nodes import is_pointwise
from rockmate.graph.chunking.forms import (
    ChunkedCall,
    Form,
    InseparableError,
    RegionCall,
    Rows,
    RowSpace,
    Rule,
)
from rockmate.graph.chunking.rules import RULES, elementwise_rule


def separate(
    nodes: Sequence[fx.Node],
    input_rows: Mapping[fx.Node, Rows],
    space: RowSpace,
    *,
    sum_readers: Collection[fx.Node] = (),
) -> dict[fx.Node, ChunkedCall]:
    """Derives how each call of a region runs on one chunk.

    Args:
        nodes: the calls of the region, in graph order.
        input_rows: values from outside -> their rows.
        space: the rows.
        sum_readers: calls of the region that may read sums of other calls over all rows. These are
            the calls of the backward if they run after all chunks of the forward.

    Raises:
        InseparableError: a call has no rule, or mixes rows.
    """
    forms: dict[fx.Node, Form] = dict(input_rows)
    chunked_calls: dict[fx.Node, ChunkedCall] = {}
    region = set(nodes)
    for node in nodes:
        add_chunked_call(node, chunked_calls, forms, region, space, sum_readers)
    return chunked_calls


def add_chunked_call(
    node: fx.Node,
    chunked_calls: dict[fx.Node, ChunkedCall],
    forms: dict[fx.Node, Form],
    region: Collection[fx.Node],
    space: RowSpace,
    sum_readers: Collection[fx.Node],
) -> None:
    """Adds to `chunked_calls` and `forms` what the rule of one call gives."""
    call = RegionCall(node, forms, region, space, sum_readers)
    chunked_call = chunked_calls[node] = (
        call.result(chunked_calls[node.all_input_nodes[0]].forms[call.args[1]])
        if node.target is operator.getitem
        else rule_of(node)(call)
    )
    if len(chunked_call.forms) == 1 and chunked_call.forms[0] is not None:
        forms[node] = chunked_call.forms[0]


def rule_of(node: fx.Node) -> Rule:
    """Returns the rule of a call.

    Raises:
        InseparableError: the call has no rule.
    """
    found = RULES.get(node.target, elementwise_rule if is_pointwise(node) else None)
    if found is None:
        raise InseparableError(node, "has no rule for rows")
    return found


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on the operands' elements at its index."""
    return RULES.get(node.target) is elementwise_rule or is_pointwise(node)
