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

A pass is a function of a graph and `PassOptions` that returns a graph; it may change its argument.
To add one: write it in a file of its noun, and name it here, where its input is complete. All keep
every returned value, bitwise, unless the line above them says what else they keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import TypeVar

from torch import fx

from rockmate.capture.roles import Capture
from rockmate.graph import convolutions, rewrite
from rockmate.graph.gradient_slices import assign_sink_forms
from rockmate.graph.hooked_gradients import defer_hooked_gradients, sum_hooked_gradients
from rockmate.graph.ir import Graph
from rockmate.graph.marking import apply_marks
from rockmate.graph.node_marks import note_marks
from rockmate.graph.pass_options import PassOptions
from rockmate.graph.value_numbering import merge_equal_values, remove_dead_calls
from rockmate.graph.weight_gradients_first import weight_gradients_first
from rockmate.graph.written_slices import read_what_was_written

_IR = TypeVar("_IR", Capture, Graph)


Pass = Callable[[_IR, PassOptions], _IR]


def run_passes(passes: Iterable[Pass[_IR]], graph: _IR, options: PassOptions | None = None) -> _IR:
    """Runs passes in their order on a graph, which may be changed in place."""
    options = options or PassOptions()
    for each in passes:
        graph = each(graph, options)
    return graph


def _rewrite(function: Callable[[fx.Graph], None]) -> Pass[Capture]:
    """A pass that changes the joint graph in place, whatever the options."""

    @wraps(function)
    def run(capture: Capture, _: PassOptions) -> Capture:
        function(capture.joint.graph)
        return capture

    return run


REWRITES: tuple[Pass[Capture], ...] = (
    # All calls but those that mark values, which nothing reads.
    note_marks,
    _rewrite(rewrite.fill_zero_tensors),
    _rewrite(rewrite.drop_value_checks),
    # Masks and outputs, and the order of draws.
    _rewrite(rewrite.split_dropouts),
    # Gradients of eager, bitwise.
    _rewrite(rewrite.split_dropout_backwards),
    _rewrite(rewrite.drop_running_statistics),
    _rewrite(rewrite.fuse_cross_entropy_backwards),
    _rewrite(convolutions.split_convolution_backwards),
    _rewrite(read_what_was_written),
    # Which returned values share memory, too.
    _rewrite(merge_equal_values),
    # Every draw, too.
    _rewrite(remove_dead_calls),
    _rewrite(rewrite.copy_out_of_workspaces),
    _rewrite(rewrite.copy_slices_read_late),
    convolutions.slice_convolutions,
    rewrite.copy_inputs_of_the_forward,
)

JOINT_PASSES: tuple[Pass[Capture], ...] = (
    # The sum of each parameter's gradients, in autograd's order of addition.
    sum_hooked_gradients,
)

GRAPH_PASSES: tuple[Pass[Graph], ...] = (
    # Ops, their order, storages; only what a schedule may do with them is limited.
    apply_marks,
    # Ops and storages; only the order of ops changes.
    defer_hooked_gradients,
    # Ops and storages, the forward's order, the order of contributions to a gradient.
    weight_gradients_first,
    # Ops and their order; sizes only of storages that nothing reads.
    assign_sink_forms,
)
