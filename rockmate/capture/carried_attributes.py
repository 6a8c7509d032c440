"""Attributes that a forward reads and changes: what later calls run, or why there is no plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import is_container, snapshot, traced_in
from rockmate.capture.deferred_values import Deferred
from rockmate.capture.diagnose import advice_to_leave
from rockmate.capture.forward_attributes import ForwardAttributes
from rockmate.capture.huggingface import is_switched_off
from rockmate.capture.input_functions import InputFunction
from rockmate.capture.traced_forward import LeftBehind, TracedForward
from rockmate.capture.write_log import can_watch
from rockmate.errors import UnsupportedModelError
from rockmate.state.objects import ABSENT

_Trace = Callable[..., tuple[fx.GraphModule, TracedForward]]


def attributes_left(
    model: nn.Module, joint: fx.GraphModule, forward: TracedForward, trace: _Trace
) -> tuple[ForwardAttributes, fx.GraphModule, TracedForward]:
    """What a forward has to do with attributes, and the trace that shows it.

    Containers that it changes may be ones that it only writes to: a further trace tells.

    Args:
        model: the model.
        joint: its joint graph.
        forward: the forward that the graph was traced from.
        trace: traces the model from the present values of attributes.

    Raises:
        UnsupportedModelError: calls leave one another a value that changes from call to call.
    """
    places = [*(place for place, _ in forward.left.carried), *forward.left.outside.places]
    places = [place for place in places if can_watch(place.value())]
    while places:
        logged = partial(trace, places)
        joint_of_logged, logging = logged()
        if not logging.log.read:
            joint, forward, trace = joint_of_logged, logging, logged
            break
        places = [place for place in places if place not in logging.log.read]
    attributes = _forward_attributes(model, joint, forward, trace)
    if forward.reader.note_escapes(also_delivered=True):
        raise UnsupportedModelError("a number that the forward reads goes where no plan brings it")
    return attributes, joint, forward


def _forward_attributes(
    model: nn.Module, joint: fx.GraphModule, forward: TracedForward, trace: _Trace
) -> ForwardAttributes:
    """What the traced forward has to do with attributes.

    A forward that changes an attribute which it reads may do so in its first call alone, as one
    that notes a warning or chooses a kernel. So it is traced once more as the next call would run
    it. If that changes an attribute again, there is no plan: `UnsupportedModelError`.
    """
    _refuse_carried_tensors(model, joint, forward)
    of_tensors, written = {*forward.left.carried_outputs.values()}, {*forward.log.places}
    settled = [pair for pair in forward.left.carried if pair[0] not in of_tensors]
    is_same = _is_same_later(model, joint, forward, settled, trace) if settled else True
    later = {place: (snapshot(value),) for place, value in settled if is_same}
    read = (
        (place, (snapshot(place.value()), *later.get(place, ())))
        for place in forward.left.accesses.reads
        if place not in of_tensors | written and not is_switched_off(place.owner, place.name)
    )
    assert forward.left.values is not None
    return ForwardAttributes(
        read=tuple(read),
        assigned=tuple(forward.left.assigned),
        tables=tuple(place for place, _ in forward.left.carried if place in of_tensors),
        writes=tuple(forward.left.writes),
        values=forward.left.values,
        fixed=(*forward.left.fixed, *settled),
        takes_gradient=forward.takes_gradient,
    )


def _is_same_later(
    model: nn.Module,
    joint: fx.GraphModule,
    forward: TracedForward,
    settled: Sequence[tuple[Place, Any]],
    trace: _Trace,
) -> bool:
    """Whether the second call has the graph of the first one and leaves the same attributes.

    What is `settled` are attributes that the first call reads and changes, with the values that it
    leaves. If the second call changes one again, this raises `UnsupportedModelError`.
    """
    before = [(place, vars(place.owner).get(place.name, ABSENT)) for place, _ in settled]
    try:
        for place, value in settled:
            place.put(value)
        later_joint, later = trace()
    except Exception:
        if not forward.left.assigned:
            raise
        return False  # it reads a tensor that the first call leaves, which is known after that call
    finally:
        for place, value in before:
            place.put(value)
    changed = dict(later.left.carried)
    if changed:
        first = (pair for pair in settled if pair[0] in changed)
        raise _carried_error(model, *next(first, later.left.carried[0]))
    return _are_equal(joint, later_joint) and _leave_the_same(forward.left, later.left)


def _refuse_carried_tensors(
    model: nn.Module, joint: fx.GraphModule, forward: TracedForward
) -> None:
    """Raises for a tensor that one call leaves to the next, unless all calls make the same one.

    A table that the forward makes from constants, in its first call, is such a tensor.
    """
    returned = joint.graph.output_node()
    values = dict(forward.left.carried)
    for node, descriptor in zip(returned.args[0], returned.meta["desc"], strict=True):  # pyright: ignore
        if type(descriptor).__name__ != "PlainAOTOutput":
            continue
        place = forward.left.carried_outputs.get(descriptor.idx)
        if place is not None and not _is_constant(node):
            raise _carried_error(model, place, values[place])


def _is_constant(node: fx.Node) -> bool:
    """Whether a value is the same in all calls, or nothing to the next one.

    What an input function makes (positions, after an image) is read with a key/value cache alone.
    """
    pending, seen = [node], set()
    while pending:
        each = pending.pop()
        if each.op == "placeholder":
            return False
        tags = getattr(each.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            return False
        seen.add(each)
        if isinstance(each.target, InputFunction):
            continue
        pending += [operand for operand in each.all_input_nodes if operand not in seen]
    return True


def _carried_error(model: nn.Module, place: Place, after: Any) -> UnsupportedModelError:
    paths = {id(module): path for path, module in model.named_modules()}
    path = paths.get(id(place.owner), "")
    advice = (
        f"Assign a container in each forward before it is used (`self.{place.name} = "
        f"{'{}' if isinstance(after, dict) else '[]'}`)"
        if is_container(after)
        else "Keep the value in a buffer that the forward changes in place "
        f'(`self.register_buffer("{place.name}", torch.tensor(0.0))`, '
        f"`self.{place.name}.add_(1)`)"
    )
    return UnsupportedModelError(
        f"the model's forward reads {f'{path}.{place.name}' if path else place} and leaves it with "
        f"another value ({_short(place.value())} -> {_short(after)}), on which the next call "
        f"depends. A plan cannot repeat that. {advice}, or{advice_to_leave(model, path)}."
    )


def _short(value: Any) -> str:
    if isinstance(value, Deferred):
        return "a number that it computes"
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return f"a {type(value).__name__} with tensors" if traced_in(value) else f"{value!r:.60}"


def _leave_the_same(left: LeftBehind, other: LeftBehind) -> bool:
    """Whether two calls assign the same to the same attributes, tensors aside."""
    places, other_places = (
        [*each.assigned, *((place, snapshot(value)) for place, value in each.fixed)]
        for each in (left, other)
    )
    return places == other_places and left.values == other.values


def _are_equal(graph: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether two graphs compute the same."""
    lines, other_lines = (
        [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in each]
        for each in (graph.graph.nodes, other.graph.nodes)
    )
    return lines == other_lines and all(
        torch.equal(getattr(graph, name), getattr(other, name))
        for op, _, name, *_ in lines
        if op == "get_attr" and isinstance(getattr(graph, name), torch.Tensor)
    )
