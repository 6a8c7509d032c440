"""Writes a region of a joint graph out in chunks. The rewrite comes before planning.

Each call of the region (`region`) is written once for each chunk, on the chunk's rows (`separate`).
Values that enter by rows are sliced. Sums over the rows are accumulated. Values that leave by rows
are concatenated. The planner treats a chunk's values as any others: it saves or recomputes them.
There are two forms:

- `"recompute"`: the chunks of the forward give the loss, and those of the backward the gradients,
  each from its own logits, saved or recomputed. The gradient of a weight is added to `.grad` chunk
  by chunk and never exists as a whole.
- `"at_once"`: a loss is linear in its gradient. So each chunk's gradients are computed in the
  forward, right after its logits, for a gradient of one. The backward multiplies them by the true
  gradient, which is exact if that is one. No logits are recomputed. The gradients of the region's
  weights stay in memory from the forward to the backward.

Sums in half precision are accumulated in float32 and rounded once, as kernels do over all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import storage_ids
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.graph.chunking.calls import (
    FILLS,
    HALF_PRECISION,
    VIEWS,
    as_captured,
    chunk_bounds,
    insert_call,
    maker_of,
    sort_topologically,
)
from rockmate.graph.chunking.forms import CHUNK_ROWS, PARTIAL, InseparableError, Rows, chunk_shape
from rockmate.graph.chunking.linearity import check_linear, depending_on, reading_from
from rockmate.graph.chunking.region import Region
from rockmate.graph.ir import IN_FORWARD
from rockmate.graph.value_numbering import remove_dead_calls

_aten = torch.ops.aten


class Unroller:
    """Writes a region out chunk by chunk, in the graph of its capture.

    Args:
        capture: the step; its graph is changed.
        region: the calls.
        num_chunks: number of chunks.
        returned_gradients: the backward returns the gradients of parameters, as wholes.
    """

    def __init__(
        self, capture: Capture, region: Region, num_chunks: int, *, returned_gradients: bool
    ) -> None:
        self.capture = capture
        self.graph = capture.joint.graph
        self.region = region
        self.calls = {*region.forward, *region.backward}
        self.bounds = chunk_bounds(region.num_rows, num_chunks)
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.total: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, Rows, int], fx.Node] = {}
        self.instead: dict[fx.Node, fx.Node] = {}
        self.emitted = {} if returned_gradients else self._emitted_products()
        self.more_outputs: list[tuple[fx.Node, Role]] = []

    def run(self, form: str) -> Capture:
        """The capture with the region in chunks.

        Args:
            form: "recompute" or "at_once".

        Raises:
            InseparableError: a call is not linear, as "at_once" needs.
        """
        if form == "at_once":
            self._run_at_once()
        else:
            for calls in (self.region.forward, self.region.backward):
                if calls:
                    with self.graph.inserting_before(calls[-1].next):
                        self._write_out(calls)
                        self._join(calls)
        self._replace()
        sort_topologically(self.graph)
        remove_dead_calls(self.graph)
        self.graph.lint()
        self.capture.joint.recompile()
        return replace(
            self.capture,
            output_roles=(*self.capture.output_roles, *(role for _, role in self.more_outputs)),
        )

    # --- both forms ---

    def _write_out(self, calls: Sequence[fx.Node]) -> None:
        for chunk in range(len(self.bounds)):
            for node in calls:
                self._write(node, chunk)

    def _write(self, node: fx.Node, chunk: int) -> None:
        piece = self.region.pieces[node]
        args = self._of_chunk(node, node.args if piece.args is None else piece.args, chunk)
        kwargs = self._of_chunk(node, dict(node.kwargs), chunk)
        target = piece.target or node.target
        is_sum = piece.forms == (PARTIAL,)
        if is_sum and node not in self.emitted:
            self._accumulate(node, target, args, kwargs)
        else:
            self.parts.setdefault(node, []).append(self._new(target, args, kwargs, like=node))

    def _new(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        like: fx.Node,
    ) -> fx.Node:
        return insert_call(self.graph, target, args, kwargs, like=like)

    def _accumulate(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        before = self.total.get(node)
        is_half = node.meta["val"].dtype in HALF_PRECISION
        if is_half:
            target, args, kwargs = self._in_float32(node, target, args, kwargs)
        if before is not None and target is _aten.mm.default:
            self.total[node] = self._new(_aten.addmm.default, (before, *args), like=node)
            return
        part = self._new(target, args, kwargs, like=node)
        if before is not None:
            self.total[node] = self._new(_aten.add.Tensor, (before, part), like=node)
        elif is_half and part.meta["val"].dtype in HALF_PRECISION:
            self.total[node] = self._new(
                _aten._to_copy.default, (part,), {"dtype": torch.float32}, like=node
            )
        else:
            self.total[node] = part

    def _in_float32(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
        """A call in half precision with its sum in float32.

        Kernels accumulate in float32. To round each chunk's sum would add to the error.
        """
        if target is _aten.mm.default and node.meta["val"].device.type == "cuda":
            return _aten.mm.dtype, (*args, torch.float32), kwargs
        if target is _aten.mm.default:
            return (
                target,
                tuple(
                    self._new(_aten._to_copy.default, (arg,), {"dtype": torch.float32}, like=node)
                    for arg in args
                ),
                kwargs,
            )
        if target in (_aten.sum.dim_IntList, _aten.sum.default):
            return target, args, {**kwargs, "dtype": torch.float32}
        return target, args, kwargs

    def _of_chunk(self, node: fx.Node, value: Any, chunk: int) -> Any:
        """An argument of one chunk."""
        if value is CHUNK_ROWS:
            start, stop = self.bounds[chunk]
            return stop - start
        if isinstance(value, dict):
            return {name: self._of_chunk(node, item, chunk) for name, item in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._of_chunk(node, item, chunk) for item in value)
        if not isinstance(value, fx.Node):
            return value
        if value in self.parts:
            return self.parts[value][chunk]
        if value in self.total:
            return self.total[value]
        rows = self.region.given.get(value) or self.region.pieces[node].slices.get(value)
        value = self.instead.get(value, value)
        return value if rows is None else self._slice(value, rows, chunk)

    def _slice(self, value: fx.Node, rows: Rows, chunk: int) -> fx.Node:
        key = value, rows, chunk
        if key not in self.slices:
            self.slices[key] = self._sliced(value, rows, *self.bounds[chunk])
        return self.slices[key]

    def _sliced(self, value: fx.Node, rows: Rows, start: int, stop: int) -> fx.Node:
        """A chunk of a value from outside: a view, or a smaller constant."""
        shape = tuple(value.meta["val"].shape)
        part = chunk_shape(shape, rows, stop - start)
        if value.target in FILLS:
            return self._new(value.target, (part, *value.args[1:]), value.kwargs, like=value)
        if rows.stop - rows.start == 1:
            return self._new(_aten.slice.Tensor, (value, rows.start, start, stop), like=value)
        flat = self._new(
            _aten.reshape.default,
            (value, [*shape[: rows.start], self.region.num_rows, *shape[rows.stop :]]),
            like=value,
        )
        cut = self._new(_aten.slice.Tensor, (flat, rows.start, start, stop), like=value)
        return self._new(_aten.view.default, (cut, part), like=value)

    def _join(self, calls: Iterable[fx.Node]) -> None:
        """Joins the chunks of values that are read outside the region or by its other half."""
        for node in calls:
            if node in self.emitted:
                continue
            if node in self.total:
                total = self.total[node]
                divisor, dtype = self.region.pieces[node].divisor, node.meta["val"].dtype
                if divisor != 1:
                    total = self._new(_aten.div.Scalar, (total, divisor), like=node)
                if total.meta["val"].dtype != dtype:
                    total = self._new(_aten._to_copy.default, (total,), {"dtype": dtype}, like=node)
                self.total[node] = total
            elif any(user not in self.calls for user in node.users):
                rows = self.region.pieces[node].forms[0]
                assert isinstance(rows, Rows), f"{node} leaves the region"
                whole = self._new(_aten.cat.default, (self.parts[node], rows.stop - 1), like=node)
                if rows.stop - rows.start > 1:
                    whole = self._new(
                        _aten.view.default, (whole, list(node.meta["val"].shape)), like=node
                    )
                self.total[node] = whole

    def _replace(self) -> None:
        for node, (views, role) in self.emitted.items():
            self._emit_parts(node, views, role)
        for node in [
            node for node in self.graph.nodes if node in self.total and node in self.calls
        ]:
            outside = [user for user in node.users if user not in self.calls]
            if outside:
                self._replace_reads(node, self.total[node], outside)
        for node in reversed([node for node in self.graph.nodes if node in self.calls]):
            self.graph.erase_node(node)

    def _replace_reads(self, node: fx.Node, whole: fx.Node, readers: Sequence[fx.Node]) -> None:
        """Replaces `node` by `whole` for readers outside the region; their views get new bases."""
        memory = set(storage_ids(node))
        for reader in readers:
            reader.replace_input_with(node, whole)
        pending = [reader for reader in readers if reader.op == "call_function"]
        while pending:
            reader = pending.pop()
            if not memory.isdisjoint(storage_ids(reader)):
                args, kwargs = fx.map_arg(
                    (reader.args, reader.kwargs), lambda argument: argument.meta["val"]
                )
                with as_captured(reader):
                    reader.meta["val"] = reader.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
                pending += [user for user in reader.users if user.op == "call_function"]

    # --- gradients that are emitted chunk by chunk ---

    def _emitted_products(self) -> dict[fx.Node, tuple[list[fx.Node], Role]]:
        """Products that are only a parameter's gradient -> the views between, and the role."""
        found = {}
        roles = {
            node: role
            for node, role in self.capture.outputs
            if role.kind is RoleKind.PARAMETER_GRADIENT
        }
        returned = [node for node, _ in self.capture.outputs]
        for node in self.region.backward:
            if node.target is not _aten.mm.default or self.region.pieces[node].forms != (PARTIAL,):
                continue
            views, last = list[fx.Node](), node
            while len(last.users) == 1 and (user := next(iter(last.users))).target in VIEWS:
                views.append(user)
                last = user
            is_returned = last in roles and returned.count(last) == 1 and len(last.users) == 1
            if is_returned and node.meta["val"].dtype not in HALF_PRECISION:
                found[node] = (views, roles[last])
        return found

    def _emit_parts(self, node: fx.Node, views: Sequence[fx.Node], role: Role) -> None:
        """Makes each chunk's product a partial gradient of the parameter."""
        output = self.graph.output_node()
        gradients = []
        for part in self.parts[node]:
            value = part
            with self.graph.inserting_before(part.next):
                for view in views:
                    value = self._new(view.target, (value, *view.args[1:]), view.kwargs, like=view)
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
        tangents = [node for node, role in self.capture.inputs if role.kind is RoleKind.TANGENT]
        assert len(tangents) == 1, "a loss block has one loss"
        tangent = tangents[0]
        self.emitted = {}
        dependent, reading = depending_on(tangent, self.graph), reading_from(tangent, self.graph)
        check_linear(
            [node for node in self.graph.nodes if node in dependent and node in self.calls],
            dependent,
        )
        with self.graph.inserting_before(self.region.forward[-1].next):
            for node in self.region.backward:
                for operand in node.all_input_nodes:
                    if operand in reading and operand not in self.calls:
                        self._for_gradient_of_one(operand, dependent, reading)
            calls = [node for node in self.graph.nodes if node in self.calls]
            self._write_out(calls)
            self._join(calls)
        with self.graph.inserting_before(self.region.backward[-1].next):
            for node in self.region.backward:
                total = self.total.get(node)
                if total is not None:
                    maker_of(total).meta[IN_FORWARD] = True
                    if node in dependent:
                        self.total[node] = self._new(_aten.mul.Tensor, (total, tangent), like=node)

    def _for_gradient_of_one(
        self, node: fx.Node, dependent: set[fx.Node], reading: set[fx.Node]
    ) -> fx.Node:
        """A copy of `node` for a gradient of one of the loss."""
        if node not in reading:
            return node
        if node not in self.instead:
            if node in self.calls:
                raise InseparableError(node, "gives a gradient to a value that it depends on")
            if node.op == "placeholder":
                fake = node.meta["val"]
                made = self._new(
                    _aten.full.default,
                    (list(fake.shape), 1.0),
                    {"dtype": fake.dtype, "device": fake.device},
                    like=node,
                )
            else:
                for operand in node.all_input_nodes:
                    self._for_gradient_of_one(operand, dependent, reading)
                check_linear([node] if node in dependent else [], dependent)
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda operand: self.instead.get(operand, operand)
                )
                made = self._new(node.target, args, kwargs, like=node)
            self.instead[node] = made
        return self.instead[node]
