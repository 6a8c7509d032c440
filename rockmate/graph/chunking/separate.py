"""Separates the calls of a region along its rows, by one rule for each op, in graph order."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

import rockmate.graph.chunking.loss_rules
import rockmate.graph.chunking.view_rules  # noqa: F401, which adds rules
from rockmate._torch.dispatch import is_op, schema_of
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
from rockmate.ops.rng import is_random


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
    target = node.target
    found = RULES.get(target)
    if found is not None:
        return found
    if is_elementwise(node):
        return elementwise_rule
    raise InseparableError(node, "has no rule for rows")


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result depends only on the operands' elements at its index."""
    target = node.target
    if not is_op(target):
        return RULES.get(target) is elementwise_rule
    pointwise = (
        torch.Tag.pointwise in target.tags
        and not is_random(target)
        and len(schema_of(target).returns) == 1
    )
    return pointwise or RULES.get(target) is elementwise_rule
