"""Compiles groups and decides which kernels are taken.

A kernel is taken if it computes what the ops of its group compute, lays out its results as
captured, and takes no more time than the ops one by one. Each distinct group is compiled once in a
process; Inductor keeps the code on disk for the next one. Compilers work on several groups at a
time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from rockmate._torch.fake import mode_of
from rockmate._torch.inductor import (
    CompilationError,
    Deadline,
    PendingKernel,
    compile_graph,
    decomposed,
    missing_compiler,
)
from rockmate._util import progress_bar
from rockmate.capture.nodes import reached
from rockmate.errors import MissingCompilerError
from rockmate.fusion.checks import RANGES, difference, is_in_place, sample_values, time_ms
from rockmate.fusion.subgraph import Subgraph
from rockmate.ops.fused import FusedOp, InPlaceKernel, Kernel
from rockmate.ops.kernel_layouts import as_tuple

logger = logging.getLogger(__name__)

# The least of several times still differs by so much from run to run.
_NOISE = 1.02
# Smaller results are not worth a second kernel.
_LEAST_IN_PLACE_BYTES = 1 << 12


@dataclass(slots=True, kw_only=True)
class CompiledGroup:
    """What is known of a distinct group once it has been compiled.

    Attributes:
        op: runs it.
        fused_ms: time of its kernel.
        separate_ms: time of its ops one by one.
        refusal: why its ops stay as they are; empty if the kernel is taken.
        is_right: whether the kernel computes what the ops do, however long it takes.
        tried_in_place: positions for which an in-place form was asked for.
    """

    op: FusedOp
    fused_ms: float = 0.0
    separate_ms: float = 0.0
    refusal: str = ""
    is_right: bool = False
    tried_in_place: set[int] = field(default_factory=set)


# By the group's key and the number of threads, for which Inductor writes its loops.
_COMPILED: dict[tuple[str, int], CompiledGroup] = {}


def check_compiler(device_type: str) -> None:
    """Raises `MissingCompilerError` where kernels cannot be compiled."""
    missing = missing_compiler(device_type)
    if missing:
        msg = (
            f'kernels="fused" needs {missing} for {device_type}. Install it, or take '
            'kernels="eager", or kernels="auto", which fuses where it can.'
        )
        raise MissingCompilerError(msg)


def uncompiled(subgraph: Subgraph, position: int | None) -> CompiledGroup:
    """A group that is planned for another machine, where it is assumed to run in place."""
    op = _op_of(subgraph)
    if position is not None:
        op.in_place = {position: _in_place(subgraph, position, _not_here)}
    return CompiledGroup(op=op, is_right=True)


def _in_place(subgraph: Subgraph, position: int, kernel: Kernel) -> InPlaceKernel:
    shape = tuple(subgraph.results[0].root.meta["val"].shape)
    return InPlaceKernel(position=position, shape=shape, kernel=kernel)


def _not_here(_: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    raise AssertionError("a kernel that is planned for another machine is run here")


def compiled_groups(
    wanted: Iterable[tuple[Subgraph, int | None]], *, deadline: Deadline, progress: bool = False
) -> dict[str, CompiledGroup]:
    """Compiles distinct groups, each with one in-place form if it has any; by key.

    Each is given with the position of the input whose memory its first result may take. Groups that
    are not ready at the deadline are refused, for as long as the process lives.
    """
    num_threads = torch.get_num_threads()
    distinct: dict[str, tuple[Subgraph, int | None]] = {}
    for subgraph, position in wanted:
        if distinct.get(subgraph.key, (subgraph, None))[1] is None:
            distinct[subgraph.key] = subgraph, position
    found: dict[str, CompiledGroup] = {}
    jobs: list[_Job] = []
    for key, (subgraph, position) in distinct.items():
        group = _COMPILED.setdefault((key, num_threads), CompiledGroup(op=_op_of(subgraph)))
        new = None if position in group.tried_in_place else position
        if new is not None or not (group.is_right or group.refusal):
            jobs.append(_Job(subgraph, group, new, deadline))
        found[key] = group
    stages = [*(job.start for job in jobs), *(job.finish for job in jobs)]
    for run in progress_bar(
        stages, desc="compiling kernels", unit="kernel", disable=not progress, leave=False
    ):
        run()
    return found


def _op_of(subgraph: Subgraph) -> FusedOp:
    return FusedOp(subgraph.key, subgraph.kind, subgraph.calls)


class _Job:
    """The compilation of one group and of its in-place form, if it has a new one."""

    def __init__(
        self, subgraph: Subgraph, group: CompiledGroup, position: int | None, deadline: Deadline
    ) -> None:
        self._deadline = deadline
        self._subgraph = subgraph
        self._group = group
        self._position = position
        self._kernel: PendingKernel | None = None
        self._form: PendingKernel | None = None

    def start(self) -> None:
        """Lowers the group; compilers begin to work on its code."""
        group, layouts = self._group, self._subgraph.layouts
        if group.refusal and not group.is_right:
            return
        try:
            traced, mode = decomposed(self._subgraph.module, layouts)
            if group.op.kernel is None:
                self._kernel = compile_graph(copy.deepcopy(traced), mode, layouts, self._deadline)
        except CompilationError as error:
            group.refusal = f"it cannot be compiled: {error}"
            return
        position = self._position
        if position is None:
            return
        group.tried_in_place.add(position)
        if self._subgraph.results[0].num_bytes < _LEAST_IN_PLACE_BYTES:
            return
        try:
            self._form = compile_graph(writing(traced, position), mode, layouts, self._deadline)
        except CompilationError as error:
            logger.debug("%s has no form in place of %d: %s", group.op, position, error)

    def finish(self) -> None:
        """Waits for the compilers, checks the kernel, and takes its in-place form."""
        group = self._group
        if self._kernel is not None:
            try:
                group.op.kernel = self._kernel.result()
            except CompilationError as error:
                group.refusal = f"it cannot be compiled: {error}"
            else:
                _check(self._subgraph, group)
            if group.refusal:
                calls = ", ".join(group.op.calls)
                logger.info("%s (%s) is not fused: %s", group.op, calls, group.refusal)
        if group.is_right and self._position is not None and self._form is not None:
            self._take_form(self._position, self._form)

    def _take_form(self, position: int, pending: PendingKernel) -> None:
        op = self._group.op
        try:
            form = _in_place(self._subgraph, position, pending.result())
        except CompilationError:
            return
        if is_in_place(form, op, sample_values(self._subgraph)):
            op.in_place = {**op.in_place, position: form}


def _check(subgraph: Subgraph, group: CompiledGroup) -> None:
    """Runs a kernel and its ops on the same values; sets times, or why it is not taken."""
    with torch.no_grad():
        for bounds in RANGES:
            values = sample_values(subgraph, bounds)
            results, expected = as_tuple(group.op(*values)), tuple(subgraph.module(*values))
            group.refusal = difference(subgraph, results, expected)
            if group.refusal:
                return
            del results, expected
        values = sample_values(subgraph)
        device = values[0].device
        group.is_right = True
        group.fused_ms = time_ms(lambda: group.op(*values), device)
        group.separate_ms = time_ms(lambda: subgraph.module(*values), device)
    if group.fused_ms > _NOISE * group.separate_ms:
        group.refusal = (
            f"its kernel takes {group.fused_ms:.3f} ms, its ops one by one {group.separate_ms:.3f}"
        )


_aten = torch.ops.aten


def writing(traced: fx.GraphModule, position: int) -> fx.GraphModule:
    """A group in Inductor's ops that copies its first result into an input, and returns the others.

    What is computed from the result, such as the sum of a bias's gradient, reads it in the memory
    of the input, so that it need not exist beside it. That is not possible for a call which reads
    the input, too; then the copy is the last call.

    Raises:
        CompilationError: there is no such view.
    """
    module = copy.deepcopy(traced)
    graph = module.graph
    target = [node for node in graph.nodes if node.op == "placeholder"][position]
    output = graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    first, *rest = results
    assert isinstance(first, fx.Node)
    later = reached([first], lambda node: node.users) - {first, output}
    is_read_later = any(reader in later for reader in target.users)
    output.args = (tuple(rest),)
    with graph.inserting_before(output):
        shaped = _shaped(graph, first, like=target)
        written = graph.call_function(_aten.copy_.default, (target, shaped))
        written.meta["val"] = target.meta["val"]
        read = written if is_read_later else _shaped(graph, written, like=first)
    if not is_read_later:
        for node in [each for each in graph.nodes if each in later]:
            output.prepend(node)
            node.replace_input_with(first, read)
        output.replace_input_with(first, read)
    module.recompile()
    return module


def _shaped(graph: fx.Graph, node: fx.Node, *, like: fx.Node) -> fx.Node:
    """A view of a node in the shape of another.

    Raises:
        CompilationError: Inductor lays the node out otherwise than captured, where it has a view.
    """
    value, shape = node.meta["val"], list(like.meta["val"].shape)
    if list(value.shape) == shape:
        return node
    if not value.is_contiguous():
        raise CompilationError(f"{node} has strides {value.stride()}")
    view = graph.call_function(_aten.view.default, (node, shape))
    with mode_of(value):
        view.meta["val"] = value.view(shape)
    return view
