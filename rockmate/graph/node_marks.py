"""Marks on the nodes of a captured graph: which of the user's marks each value and op has.

A pass over the captured graph, before any other changes its calls. Patterns, the policy's decisions
and the calls of `rockmate.name`, `save` and `recompute` are matched with nodes, and the calls
removed. Later passes carry `meta["marks"]` along like the rest of a node's `meta`;
`rockmate.graph.marking` reads it when the graph of storages is there.
"""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from rockmate._torch.dispatch import is_op
from rockmate.capture.checkpoint_regions import DECISION, REGIONS
from rockmate.capture.diagnose import needs_values
from rockmate.capture.nodes import call_name, calls_in, is_tangent, items_of, storage_ids
from rockmate.capture.provenance import MADE_BY_FORWARD
from rockmate.capture.roles import Capture, copied_capture
from rockmate.errors import MarkError
from rockmate.graph.mark_request import WORD_OF_LETTER, Mark, MarkRequest
from rockmate.graph.pass_options import PassOptions
from rockmate.ops.value_mark import marking_line, value_mark

logger = logging.getLogger(__name__)

# Key in a node's `meta`: the marks of what it makes.
MARKS = "marks"
_HINTS = (CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)
# Number of similar names that are suggested for an unknown one.
_NUM_SUGGESTED = 4


def marks_of(node: fx.Node) -> tuple[Mark, ...]:
    """The marks of a node."""
    return node.meta.get(MARKS, ())


def is_saved(node: fx.Node) -> bool:
    """Whether a mark saves what a node makes: its op runs once, in the forward."""
    return any(mark.word == "save" for mark in marks_of(node))


def without_source(capture: Capture, source: str) -> Capture:
    """A copy of a capture without the marks of one source."""
    capture = copied_capture(capture)
    for node in capture.joint.graph.nodes:
        node.meta = dict(node.meta)
        if MARKS in node.meta:
            node.meta[MARKS] = tuple(mark for mark in marks_of(node) if mark.source != source)
    return capture


def decided_request(capture: Capture, request: MarkRequest) -> MarkRequest:
    """The request with its policy asked about each op of the forward, in order.

    The arguments that the policy sees are fake tensors: shapes and dtypes without values.

    Raises:
        MarkError: the policy returned something else than a decision, or read a value.
    """
    policy = request.policy
    if policy is None:
        return request
    context = SelectiveCheckpointContext(is_recompute=False)
    decisions = []
    for node in _decided_nodes(capture.joint.graph):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        try:
            decisions.append(policy(context, node.target, *args, **kwargs))
        except Exception as error:
            if not needs_values(error):
                raise
            msg = (
                f"the policy reads a value of a tensor to decide about {call_name(node)}"
                f"{_place(node)}. A policy is asked before anything runs: it sees shapes, dtypes "
                "and numbers, and no values. Decide by the op, its shapes or a count of its calls."
            )
            raise MarkError(msg) from error
    if any(decision in _HINTS for decision in decisions):
        logger.info(
            "the policy's PREFER_SAVE and PREFER_RECOMPUTE are hints, and are read as no mark: the "
            "planner chooses"
        )
    return request.decided(decisions)


def note_marks(capture: Capture, options: PassOptions) -> Capture:
    """Writes the user's marks to the nodes that they match, and removes `value_mark` calls.

    Raises:
        MarkError: a pattern matches nothing or several kinds of things, a named value is an input
            or a parameter, or the policy was asked about other ops.
    """
    graph, request = capture.joint.graph, options.marks
    named = _named_values(graph)
    for pattern, word in request.patterns:
        _note_pattern(graph, pattern, word, named)
    for name, word, root in named:
        if word:
            _note(root, Mark(word, name, is_named=True))
    if request.decisions:
        _note_decisions(graph, request)
    if request.honours_checkpoints:
        _note_checkpoints(graph)
    return capture


def joined_marks(one: fx.Node, other: fx.Node) -> None:
    """Gives `one` the marks of `other` too, which it takes the place of."""
    for mark in marks_of(other):
        _note(one, mark)


def are_at_odds(one: fx.Node, other: fx.Node) -> bool:
    """Whether the marks of two nodes contradict each other."""
    words = {mark.word for node in (one, other) for mark in marks_of(node)}
    return len(words) > 1


def _note(node: fx.Node, mark: Mark) -> None:
    """Adds a mark to a node and to the items of its result; of a saved item also to its op."""
    for each in (node, *items_of(node).values()):
        if mark not in marks_of(each):
            each.meta[MARKS] = (*marks_of(each), mark)
    if mark.word == "save" and node.target is operator.getitem:
        maker = node.all_input_nodes[0]
        maker.meta[MARKS] = (*marks_of(maker), mark)


# --- named values -----------------------------------------------------------------------------


def _named_values(graph: fx.Graph) -> list[tuple[str, str, fx.Node]]:
    """The name, the word and the node of each value that the forward names; removes the calls.

    The node is the first whose tensor lies in the value's memory: one of several results of a call
    is an item of it.
    """
    roots: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            for storage in storage_ids(node):
                roots.setdefault(storage, node)
    found = []
    for node in calls_in(graph, value_mark):
        value, name, word = node.args
        assert isinstance(value, fx.Node)
        name = marking_line(node.meta.get("stack_trace", "")) if name is None else name
        root = roots[storage_ids(value)[0]]
        if root.op != "call_function":
            msg = (
                f"the value {name!r}{_place(node)} is an input or a parameter "
                "of the model, or a view of one: it is in memory anyway, and nothing recomputes "
                "it. Name a value that the forward computes."
            )
            raise MarkError(msg)
        found.append((str(name), str(word), root))
        graph.erase_node(node)
    return found


def _place(node: fx.Node) -> str:
    """The submodule that made a node, with a leading blank; empty at the top."""
    module = node.meta.get("module", "")
    return f" in {module}" if module else ""


# --- patterns ---------------------------------------------------------------------------------


def _note_pattern(
    graph: fx.Graph, pattern: str, word: str, named: Iterable[tuple[str, str, fx.Node]]
) -> None:
    """Marks what one pattern matches."""
    nodes = list(_forward_nodes(graph))
    kinds: dict[str, list[tuple[fx.Node, Mark]]] = {
        "a submodule": [
            (node, Mark(word, pattern, scope))
            for node in nodes
            if (scope := _scope(pattern, node.meta.get("module", "")))
        ],
        "an op": [(node, Mark(word, pattern)) for node in nodes if _is_of_op(pattern, node)],
        "a name": [
            (root, Mark(word, pattern, is_named=True))
            for name, _, root in named
            if fnmatchcase(name, pattern)
        ],
    }
    matching = [kind for kind, found in kinds.items() if found]
    if len(matching) > 1:
        msg = (
            f"the mark {pattern!r} matches {' and '.join(matching)}. Give the value another name, "
            "or write the op with its overload, as aten.mm.default."
        )
        raise MarkError(msg)
    if not matching:
        raise MarkError(_unknown_text(pattern, nodes, [name for name, *_ in named]))
    for node, mark in kinds[matching[0]]:
        _note(node, mark)


def _scope(pattern: str, path: str) -> str:
    """The submodule that a pattern matches, if it is the one at `path` or contains it; else ""."""
    wanted, parts = pattern.split("."), path.split(".")
    if len(wanted) > len(parts) or not path:
        return ""
    pairs = zip(parts, wanted, strict=False)
    return ".".join(parts[: len(wanted)]) if all(fnmatchcase(*pair) for pair in pairs) else ""


def _is_of_op(pattern: str, node: fx.Node) -> bool:
    name = call_name(node)
    return is_op(node.target) and any(
        fnmatchcase(each, pattern) for each in (name, name.rpartition(".")[0])
    )


def _unknown_text(pattern: str, nodes: Iterable[fx.Node], names: Iterable[str]) -> str:
    known: dict[str, None] = dict.fromkeys(names)
    for node in nodes:
        parts = node.meta.get("module", "").split(".")
        known.update(dict.fromkeys(".".join(parts[: end + 1]) for end in range(len(parts))))
        if is_op(node.target):
            known[call_name(node).rpartition(".")[0]] = None
    close = difflib.get_close_matches(pattern, [each for each in known if each], _NUM_SUGGESTED)
    text = (
        f"the mark {pattern!r} matches no submodule that runs, no op of the forward and no name "
        "of a value"
    )
    return f"{text}. Similar: {', '.join(close)}." if close else f"{text}."


# --- policies and checkpoints -----------------------------------------------------------------


def _note_decisions(graph: fx.Graph, request: MarkRequest) -> None:
    nodes = list(_decided_nodes(graph))
    if len(nodes) != len(request.decisions):
        msg = (
            f"the policy decided about {len(request.decisions)} ops of the forward, and this "
            f"capture has {len(nodes)}. Plan again with the policy itself."
        )
        raise MarkError(msg)
    for node, letter in zip(nodes, request.decisions, strict=True):
        if letter in WORD_OF_LETTER:
            _note(node, Mark(WORD_OF_LETTER[letter], "policy"))


def _note_checkpoints(graph: fx.Graph) -> None:
    """Marks what checkpointed calls in the model's code recompute, and what their policies save."""
    source = "checkpoint"
    for node in _forward_nodes(graph):
        regions = node.meta.get(REGIONS, ())
        word = node.meta.get(DECISION, "recompute") if regions else ""
        if word == "save":
            _note(node, Mark(word, source))
        elif word:
            for region in regions:
                _note(node, Mark(word, source, region))


def _forward_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls that the model's forward made."""
    return (
        node
        for node in calls_in(graph)
        if node.meta.get(MADE_BY_FORWARD) and node.target is not operator.getitem
    )


def _decided_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The calls that a policy is asked about: ops of the forward before the first of the backward.

    Detached aliases are passed over, as PyTorch's own selective checkpoints do.
    """
    passed_over = (value_mark, torch.ops.aten.detach.default)
    for node in calls_in(graph):
        if any(map(is_tangent, node.all_input_nodes)):
            return
        is_made = node.meta.get(MADE_BY_FORWARD) and is_op(node.target)
        if is_made and node.target not in passed_over:
            yield node
