"""The passes from a captured joint graph to the graph that is planned, as lists.

    capture -> REWRITES -> (chunking) -> JOINT_PASSES -> build_graph -> GRAPH_PASSES -> planning

| list | over | runs |
|---|---|---|
| `REWRITES` | the joint graph of a capture | once for each capture |
| `JOINT_PASSES` | the joint graph of a step: the capture, or a copy of it in chunks | once a step |
| `GRAPH_PASSES` | ops and storages | once a step |

Every pass leaves its graph valid: `verify` passes after each. The tests check that on several
models; a planned step is verified once, at the end. Chunking (`chunking/`) is no pass: the planner
chooses its arguments, and it may refuse.

To add a pass: write it as a function of a graph in a file of its noun, and add a `Pass` here, where
its input is complete. `keeps` names the property that makes the pass safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import fx

from rockmate.capture.roles import Capture
from rockmate.graph import convolutions, rewrite
from rockmate.graph.gradient_slices import assign_sink_forms
from rockmate.graph.hooked_gradients import (
    defer_hooked_gradients,
    hooked_producers,
    sum_hooked_gradients,
)
from rockmate.graph.ir import Graph
from rockmate.graph.mark_request import NO_MARKS, MarkRequest
from rockmate.graph.marking import apply_marks
from rockmate.graph.node_marks import note_marks
from rockmate.graph.rewrite import copy_inputs_of_the_forward
from rockmate.graph.step_options import StepOptions
from rockmate.graph.value_numbering import merge_equal_values, remove_dead_calls
from rockmate.graph.weight_gradients_first import weight_gradients_first
from rockmate.graph.written_slices import read_what_was_written

_IR = TypeVar("_IR", Capture, Graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """What passes must know beside the graph.

    Attributes:
        hooked: names of the parameters with a tensor hook.
        owner_of: for each parameter's name, the first name of the same tensor.
        like: the planned graph of the same step at sizes that are nowhere smaller, if there is one.
        marks: what the user marks.
        reads_channels_last: whether convolutions do that read contiguous values in eager.
        keeps_inputs: whether inputs stay as they are until the backward.
        runs_here: whether the step runs on this machine, at these sizes.
    """

    hooked: tuple[str, ...] = ()
    owner_of: Mapping[str, str] = field(default_factory=dict)
    like: Graph | None = None
    marks: MarkRequest = NO_MARKS
    reads_channels_last: bool = False
    keeps_inputs: bool = False
    runs_here: bool = False

    @classmethod
    def of(
        cls, options: StepOptions, owner_of: Mapping[str, str], *, like: Graph | None = None
    ) -> PassOptions:
        """Those of a step that is captured with options."""
        return cls(
            hooked=options.hooked or (),
            owner_of=owner_of,
            like=like,
            marks=options.marks,
            reads_channels_last=options.memory_format == "channels_last",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass(Generic[_IR]):
    """One pass.

    Attributes:
        name: a verb and its object.
        keeps: what is equal before and after, beside the validity of the graph.
        run: gives the graph after the pass; it may change its argument in place.
    """

    name: str
    keeps: str
    run: Callable[[_IR, PassOptions], _IR]


def run_passes(passes: Iterable[Pass[_IR]], graph: _IR, options: PassOptions | None = None) -> _IR:
    """Runs passes one after the other.

    Args:
        passes: in order.
        graph: the first one's argument; it may be changed in place.
        options: for all of them.
    """
    options = options or PassOptions()
    for each in passes:
        graph = each.run(graph, options)
    return graph


def _rewrite(name: str, keeps: str, function: Callable[[fx.Graph], None]) -> Pass[Capture]:
    def run(capture: Capture, _options: PassOptions) -> Capture:
        function(capture.joint.graph)
        return capture

    return Pass(name=name, keeps=keeps, run=run)


def _slice_convolutions(capture: Capture, options: PassOptions) -> Capture:
    convolutions.slice_convolutions(capture.joint.graph, run=options.runs_here)
    return capture


def _copy_inputs_again(capture: Capture, options: PassOptions) -> Capture:
    if options.reads_channels_last:
        rewrite.copy_inputs_again(capture.joint.graph)
    return capture


def _sum_hooked_gradients(capture: Capture, options: PassOptions) -> Capture:
    return sum_hooked_gradients(capture, options.hooked, options.owner_of)


def _defer_hooked_gradients(graph: Graph, options: PassOptions) -> Graph:
    return defer_hooked_gradients(graph, options.hooked, options.owner_of)


def _weight_gradients_first(graph: Graph, options: PassOptions) -> Graph:
    pinned = hooked_producers(graph, options.hooked, options.owner_of)
    return weight_gradients_first(graph, but=pinned)


def _assign_sink_forms(graph: Graph, options: PassOptions) -> Graph:
    whole = hooked_producers(graph, options.hooked, options.owner_of)
    assign_sink_forms(graph, like=options.like, but=whole)
    return graph


_SAME_BITS = "every returned value, bitwise"

REWRITES: tuple[Pass[Capture], ...] = (
    Pass(
        name="note marks",
        keeps="every call but those that mark values, which nothing reads",
        run=lambda capture, options: note_marks(capture, options.marks),
    ),
    _rewrite("fill zero tensors", _SAME_BITS, rewrite.fill_zero_tensors),
    _rewrite("drop value checks", _SAME_BITS, rewrite.drop_value_checks),
    _rewrite(
        "split dropouts",
        "masks and outputs, bitwise, and the order of draws",
        rewrite.split_dropouts,
    ),
    _rewrite(
        "split dropout backwards",
        "gradients of eager, bitwise",
        rewrite.split_dropout_backwards,
    ),
    _rewrite("drop running statistics", _SAME_BITS, rewrite.drop_running_statistics),
    _rewrite("fuse cross entropy backwards", _SAME_BITS, rewrite.fuse_cross_entropy_backwards),
    _rewrite("split convolution backwards", _SAME_BITS, convolutions.split_convolution_backwards),
    _rewrite("read what was written", _SAME_BITS, read_what_was_written),
    _rewrite(
        "merge equal values",
        "every returned value, bitwise, and which returned values share memory",
        merge_equal_values,
    ),
    _rewrite("remove dead calls", "every returned value and every draw", remove_dead_calls),
    _rewrite("copy out of workspaces", _SAME_BITS, rewrite.copy_out_of_workspaces),
    _rewrite("copy slices read late", _SAME_BITS, rewrite.copy_slices_read_late),
    Pass(name="slice convolutions", keeps=_SAME_BITS, run=_slice_convolutions),
    Pass(
        name="copy inputs of convolutions again",
        keeps=_SAME_BITS,
        run=_copy_inputs_again,
    ),
    Pass(
        name="copy inputs of the forward",
        keeps=_SAME_BITS,
        run=lambda capture, options: (
            capture if options.keeps_inputs else copy_inputs_of_the_forward(capture)
        ),
    ),
)

JOINT_PASSES: tuple[Pass[Capture], ...] = (
    Pass(
        name="sum hooked gradients",
        keeps="the sum of each parameter's gradients, in autograd's order of addition",
        run=_sum_hooked_gradients,
    ),
)

GRAPH_PASSES: tuple[Pass[Graph], ...] = (
    Pass(
        name="apply marks",
        keeps="ops, their order, storages; only what a schedule may do with them is limited",
        run=lambda graph, _: apply_marks(graph),
    ),
    Pass(
        name="defer hooked gradients",
        keeps="ops and storages; only the order of ops changes",
        run=_defer_hooked_gradients,
    ),
    Pass(
        name="weight gradients first",
        keeps="ops and storages, the forward's order, the order of contributions to a gradient",
        run=_weight_gradients_first,
    ),
    Pass(
        name="assign sink forms",
        keeps="ops and their order; sizes only of storages that nothing reads",
        run=_assign_sink_forms,
    ),
)
