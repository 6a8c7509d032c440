"""Unrolls a region of a joint graph into chunks, before planning.

Each call of the region is written once for each chunk, on the chunk's rows. Values are sliced if
they enter by rows, and concatenated if they leave by rows. Sums over the rows are accumulated. The
planner treats a chunk's values as any others: it saves or recomputes them. `region` finds the calls
and `separate` derives the call on one chunk. There are two forms:

- `"recompute"`: the chunks of the forward compute the loss, those of the backward the gradients.
  Each chunk of the backward reads its own logits, saved or recomputed. The gradient of a weight is
  added to `.grad` chunk by chunk and is never whole in memory.
- `"at_once"`: the gradients of each chunk are computed in the forward, directly after its logits,
  for an incoming gradient of one. The backward is linear in that gradient, so it scales them by
  the true one. The scaling is exact if the true one is one. No logits are recomputed. The gradients
  of the region's weights are live from the forward to the backward.

Sums in half precision are accumulated in float32 and rounded once, as a kernel over all rows does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import storage_ids
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.graph.chunking.calls import (
    HALF_PRECISION,
    NEW_FILLS,
    VIEWS,
    chunk_bounds,
    is_fill,
    producer_of,
    sort_topologically,
)
from rockmate.graph.chunking.forms import (
    PARTIAL,
    ChunkRows,
    InseparableError,
    Rows,
    chunk_shape,
    shape_of,
)
from rockmate.graph.chunking.linearity import check_linear, dependents
from rockmate.graph.chunking.region import Region
from rockmate.graph.fake_values import insert_call, refresh_views
from rockmate.graph.ir import IN_FORWARD
from rockmate.graph.value_numbering import remove_dead_calls

_aten = torch.ops.aten


class Unroller:
    """Unrolls a region into chunks, in the graph of its capture.

    Args:
        capture: the step. Its graph is changed.
        region: the calls.
        num_chunks: number of chunks.
        returned_gradients: whether the backward returns the gradients of parameters. They are then
            not emitted chunk by chunk.

    Attributes:
        chunk_values: call -> its value in each chunk.
        wholes: call -> its sum over the chunks, or the concatenation of its chunks.
        unit_copies: value that depends on the gradient of the loss -> its copy for a gradient of
            one.
        emitted: product -> the views after it and its role, for gradients of parameters that are
            emitted chunk by chunk.
    """

    def __init__(
        self, capture: Capture, region: Region, num_chunks: int, *, returned_gradients: bool
    ) -> None:
        self.capture = capture
        self.graph = capture.joint.graph
        self.region = region
        self.calls = {*region.forward, *region.backward}
        self.bounds = chunk_bounds(region.num_rows, num_chunks)
        self.chunk_values: dict[fx.Node, list[fx.Node]] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, Rows, int], fx.Node] = {}
        self.unit_copies: dict[fx.Node, fx.Node] = {}
        self.emitted = {} if returned_gradients else self._emitted_products()
        self.more_outputs: list[tuple[fx.Node, Role]] = []

    def run(self, form: str) -> Capture:
        """Returns the capture with the region in chunks.

        Args:
            form: "recompute" or "at_once".

        Raises:
            InseparableError: the form is "at_once", and a call cannot run for a gradient of one.
        """
        if form == "at_once" and self.region.backward:
            self._run_at_once()
        else:
            for calls in (self.region.forward, self.region.backward):
                if calls:
                    with self.graph.inserting_before(calls[-1].next):
                        self._write_chunks(calls)
                        self._join(calls)
        self._replace_region()
        sort_topologically(self.graph)
        remove_dead_calls(self.graph)
        self.graph.lint()
        self.capture.joint.recompile()
        return replace(
            self.capture,
            output_roles=(*self.capture.output_roles, *(role for _, role in self.more_outputs)),
        )

    # --- both forms ---

    def _write_chunks(self, calls: Sequence[fx.Node]) -> None:
        """Writes the calls once for each chunk."""
        for chunk in range(len(self.bounds)):
            for node in calls:
                self._write_call(node, chunk)

    def _write_call(self, node: fx.Node, chunk: int) -> None:
        chunked_call = self.region.chunked_calls[node]
        args = node.args if chunked_call.args is None else chunked_call.args
        args = self._chunk_argument(node, args, chunk)
        kwargs = self._chunk_argument(node, dict(node.kwargs), chunk)
        target = chunked_call.target or node.target
        is_sum = chunked_call.forms == (PARTIAL,)
        if is_sum and node not in self.emitted:
            self._accumulate(node, target, args, kwargs)
        else:
            value = self._insert(target, args, kwargs, like=node)
            self.chunk_values.setdefault(node, []).append(value)

    def _insert(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node,
    ) -> fx.Node:
        return insert_call(self.graph, target, args, kwargs, like=like)

    def _cast(self, value: fx.Node, dtype: torch.dtype, *, like: fx.Node) -> fx.Node:
        return self._insert(_aten._to_copy.default, (value,), {"dtype": dtype}, like=like)

    def _accumulate(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        before = self.wholes.get(node)
        is_half = node.meta["val"].dtype in HALF_PRECISION
        if is_half:
            target, args, kwargs = self._in_float32(node, target, args, kwargs)
        if before is not None and target is _aten.mm.default:
            self.wholes[node] = self._insert(_aten.addmm.default, (before, *args), like=node)
            return
        part = self._insert(target, args, kwargs, like=node)
        if before is not None:
            self.wholes[node] = self._insert(_aten.add.Tensor, (before, part), like=node)
        elif is_half and part.meta["val"].dtype in HALF_PRECISION:
            self.wholes[node] = self._cast(part, torch.float32, like=node)
        else:
            self.wholes[node] = part

    def _in_float32(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """Returns a call in half precision with its sum in float32.

        Kernels accumulate in float32. Rounding the sum of each chunk would increase the error.
        """
        if target is _aten.mm.default and node.meta["val"].device.type == "cuda":
            return _aten.mm.dtype, (*args, torch.float32), kwargs
        if target is _aten.mm.default:
            wide = tuple(self._cast(arg, torch.float32, like=node) for arg in args)
            return target, wide, kwargs
        if target in (_aten.sum.dim_IntList, _aten.sum.default):
            return target, args, {**kwargs, "dtype": torch.float32}
        return target, args, kwargs

    def _chunk_argument(self, node: fx.Node, value: Any, chunk: int) -> Any:
        """Returns an argument of a call, for one chunk."""
        if isinstance(value, ChunkRows):
            start, stop = self.bounds[chunk]
            return (stop - start) * value.num_copies
        if isinstance(value, dict):
            return {name: self._chunk_argument(node, item, chunk) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._chunk_argument(node, item, chunk) for item in value)
        if not isinstance(value, fx.Node):
            return value
        if value in self.chunk_values:
            return self.chunk_values[value][chunk]
        if value in self.wholes:
            return self.wholes[value]
        slices = self.region.chunked_calls[node].slices
        rows = self.region.input_rows.get(value) or slices.get(value)
        value = self.unit_copies.get(value, value)
        return value if rows is None else self._slice(value, rows, chunk)

    def _slice(self, value: fx.Node, rows: Rows, chunk: int) -> fx.Node:
        key = value, rows, chunk
        if key not in self.slices:
            self.slices[key] = self._insert_slice(value, rows, *self.bounds[chunk])
        return self.slices[key]

    def _insert_slice(self, value: fx.Node, rows: Rows, start: int, stop: int) -> fx.Node:
        """Inserts a chunk of a value from outside: a view, or a smaller constant."""
        shape, space = shape_of(value), self.region.space
        count = prod(shape[rows.start : rows.stop])
        copies, offset = space.copies(count), space.start if space.has_more(count) else 0
        part = chunk_shape(shape, rows, copies * (stop - start))
        cut = offset + start, offset + stop
        if is_fill(value):
            of_shape = int(value.target in NEW_FILLS)
            args = *value.args[:of_shape], part, *value.args[of_shape + 1 :]
            return self._insert(value.target, args, value.kwargs, like=value)
        if rows.stop - rows.start == copies == 1:
            return self._insert(_aten.slice.Tensor, (value, rows.start, *cut), like=value)
        flat = self._with_copies(value, rows, count // copies)
        dim = rows.start + (copies > 1)
        taken = self._insert(_aten.slice.Tensor, (flat, dim, *cut), like=value)
        return self._insert(_aten.reshape.default, (taken, part), like=value)

    def _with_copies(self, value: fx.Node, rows: Rows, num_rows: int) -> fx.Node:
        """Inserts a view of a value that has its rows in one dim, after one of copies if any."""
        shape = shape_of(value)
        copies = prod(shape[rows.start : rows.stop]) // num_rows
        dims = [copies, num_rows] if copies > 1 else [num_rows]
        flat = [*shape[: rows.start], *dims, *shape[rows.stop :]]
        return self._insert(_aten.reshape.default, (value, flat), like=value)

    def _join(self, calls: Iterable[fx.Node]) -> None:
        """Completes sums, and concatenates the chunks of values that leave the region."""
        for node in calls:
            if node in self.emitted:
                continue
            if node in self.wholes:
                total = self.wholes[node]
                divisor, dtype = self.region.chunked_calls[node].divisor, node.meta["val"].dtype
                if divisor != 1:
                    total = self._insert(_aten.div.Scalar, (total, divisor), like=node)
                if total.meta["val"].dtype != dtype:
                    total = self._cast(total, dtype, like=node)
                self.wholes[node] = total
            elif any(user not in self.calls for user in node.users):
                rows = self.region.chunked_calls[node].forms[0]
                assert isinstance(rows, Rows), f"{node} is read outside the region and has no rows"
                self.wholes[node] = self._concatenation(node, rows)

    def _concatenation(self, node: fx.Node, rows: Rows) -> fx.Node:
        """Inserts the concatenation of a value's chunks, with zeros in rows outside the region."""
        shape, space = shape_of(node), self.region.space
        count = prod(shape[rows.start : rows.stop])
        copies, dim, parts = space.copies(count), rows.stop - 1, self.chunk_values[node]
        if copies > 1:
            dim = rows.start + 1
            parts = [
                self._with_copies(part, rows, stop - start)
                for part, (start, stop) in zip(parts, self.bounds, strict=True)
            ]
        whole = self._insert(_aten.cat.default, (parts, dim), like=node)
        if space.has_more(count):
            sizes = list(shape_of(whole))
            sizes[dim] = space.size
            cut = dim, space.start, space.start + space.num_rows, 1
            whole = self._insert(_aten.slice_backward.default, (whole, sizes, *cut), like=node)
        if shape_of(whole) != shape:
            whole = self._insert(_aten.view.default, (whole, list(shape)), like=node)
        return whole

    def _replace_region(self) -> None:
        """Connects readers outside the region to the chunks, and erases the region's calls."""
        for node, (views, role) in self.emitted.items():
            self._emit_partial_gradients(node, views, role)
        for node in [
            node for node in self.graph.nodes if node in self.wholes and node in self.calls
        ]:
            whole = self.wholes[node]
            for user in [user for user in node.users if user not in self.calls]:
                user.replace_input_with(node, whole)
            refresh_views(whole, storage_ids(node))
        for node in reversed([node for node in self.graph.nodes if node in self.calls]):
            self.graph.erase_node(node)

    # --- gradients that are emitted chunk by chunk ---

    def _emitted_products(self) -> dict[fx.Node, tuple[list[fx.Node], Role]]:
        """Maps products used only as a parameter's gradient to the views after them and role."""
        found = {}
        roles = {
            node: role
            for node, role in self.capture.outputs
            if role.kind is RoleKind.PARAMETER_GRADIENT
        }
        returned = [node for node, _ in self.capture.outputs]
        for node in self.region.backward:
            is_partial = self.region.chunked_calls[node].forms == (PARTIAL,)
            if node.target is not _aten.mm.default or not is_partial:
                continue
            views, last = list[fx.Node](), node
            while len(last.users) == 1 and (user := next(iter(last.users))).target in VIEWS:
                views.append(user)
                last = user
            is_returned = last in roles and returned.count(last) == 1 and len(last.users) == 1
            if is_returned and node.meta["val"].dtype not in HALF_PRECISION:
                found[node] = (views, roles[last])
        return found

    def _emit_partial_gradients(self, node: fx.Node, views: Sequence[fx.Node], role: Role) -> None:
        """Returns each chunk's product from the graph as a partial gradient of the parameter."""
        output = self.graph.output_node()
        gradients = []
        for part in self.chunk_values[node]:
            value = part
            with self.graph.inserting_before(part.next):
                for view in views:
                    args = value, *view.args[1:]
                    value = self._insert(view.target, args, view.kwargs, like=view)
            gradients.append(value)
        last = views[-1] if views else node
        returned: Any = output.args[0]
        output.args = (
            tuple(gradients[0] if value is last else value for value in returned)
            + tuple(gradients[1:]),
        )
        self.more_outputs += [(value, role) for value in gradients[1:]]
        for view in reversed(views):
            self.graph.erase_node(view)

    # --- gradients in the forward ---

    def _run_at_once(self) -> None:
        """Writes all calls of the chunks in the forward, and the scaling in the backward."""
        tangents = [node for node, role in self.capture.inputs if role.kind is RoleKind.TANGENT]
        assert len(tangents) == 1, "a step with a loss block has one loss"
        tangent = tangents[0]
        self.emitted = {}
        dependent = dependents(tangent, self.graph)
        reading = dependents(tangent, self.graph, of_shape=True)
        check_linear(
            [node for node in self.graph.nodes if node in dependent and node in self.calls],
            dependent,
        )
        with self.graph.inserting_before(self.region.forward[-1].next):
            for node in self.region.backward:
                for operand in node.all_input_nodes:
                    if operand in reading and operand not in self.calls:
                        self._copy_for_unit_gradient(operand, dependent, reading)
            calls = [node for node in self.graph.nodes if node in self.calls]
            self._write_chunks(calls)
            self._join(calls)
        with self.graph.inserting_before(self.region.backward[-1].next):
            for node in self.region.backward:
                total = self.wholes.get(node)
                if total is not None:
                    producer_of(total).meta[IN_FORWARD] = True
                    if node in dependent:
                        self.wholes[node] = self._insert(
                            _aten.mul.Tensor, (total, tangent), like=node
                        )

    def _copy_for_unit_gradient(
        self, node: fx.Node, dependent: set[fx.Node], reading: set[fx.Node]
    ) -> fx.Node:
        """Inserts a copy of `node` and its operands, for a gradient of one of the loss."""
        if node not in reading:
            return node
        if node not in self.unit_copies:
            if node in self.calls:
                raise InseparableError(
                    node, "is in the region and is read there through a call outside the region"
                )
            if node.op == "placeholder":
                fake = node.meta["val"]
                copy = self._insert(
                    _aten.full.default,
                    (list(fake.shape), 1.0),
                    {"dtype": fake.dtype, "device": fake.device},
                    like=node,
                )
            else:
                for operand in node.all_input_nodes:
                    self._copy_for_unit_gradient(operand, dependent, reading)
                check_linear([node] if node in dependent else [], dependent)
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda operand: self.unit_copies.get(operand, operand)
                )
                copy = self._insert(node.target, args, kwargs, like=node)
            self.unit_copies[node] = copy
        return self.unit_copies[node]
