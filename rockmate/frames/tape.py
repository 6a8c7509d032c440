"""The ops of a frame's forward: from them single saved tensors can be made again.

The tape follows storages through their *states*: what an op makes is a state, and what an op writes
in place is another one. An argument is noted by its state and its view, so the tape holds no
memory, except tensors from outside of the frame, which are there anyway.

Each noted op takes tens of microseconds, and each that is seen ten or more. A *recipe* says which
ops of a forward that was measured make certain states again. With it, only those are noted, and all
that are seen are compared with the recipe's. What is written unseen has another count of writes
than its state had: it is another state then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from rockmate._torch.autocast import autocast_off
from rockmate._torch.dispatch import ops_observed
from rockmate._torch.ops import OpOverload, schema_of
from rockmate._torch.pytree import tree_leaves
from rockmate._torch.storage import StorageWeakRef, storage_id, version_of
from rockmate.errors import UnsupportedModelError
from rockmate.frames.op_states import OpStates, StatesOfOp
from rockmate.frames.regions import PartKey
from rockmate.frames.saved import Saved
from rockmate.frames.views import View
from rockmate.state.tensors import PLAIN

_aten = torch.ops.aten
_SAME_STORAGE = _aten.detach.default
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default)
_RUNNING_STATISTICS = (3, 4)
"""Where both take the statistics that they update in training. The schema does not say so."""
_UNKNOWN = -1
"""State of a tensor that cannot be made again, nor is held."""


@dataclass(slots=True)
class _TapedOp:
    """An op that has run.

    Attributes:
        op: the op.
        args, kwargs: with a `_Read` for each tensor.
        reads: all of these.
        states: that it reads and makes.
        results: those that are states, by their positions.
    """

    op: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    reads: Sequence[_Read]
    states: StatesOfOp
    results: Sequence[_Result]


class _Read(NamedTuple):
    state: int
    view: View
    version: int


class Recipe(NamedTuple):
    """Some ops of a forward.

    Attributes:
        ops: all of the forward, or of the regions.
        noted: positions of those that are noted.
        regions: calls within the frame that are observed; empty if all of the forward is.
    """

    ops: Sequence[OpOverload]
    noted: frozenset[int]
    regions: frozenset[PartKey] = frozenset()


class _Result(NamedTuple):
    leaf: int
    state: int
    view: View


class _Outside(NamedTuple):
    """A tensor from outside of the frame, as it was."""

    tensor: torch.Tensor
    version: int
    storage: int


class Tape:
    """The ops of one frame.

    Attributes:
        seconds: of each op.
        num_bytes: of the storage of each state.
        noting_s: seconds that it has taken to note them.
        clock: seconds.
    """

    def __init__(
        self,
        path: str,
        outside: Iterable[int],
        clock: Callable[[], float],
        recipe: Recipe | None = None,
    ) -> None:
        """Begins with no op.

        Args:
            path: of the frame, for errors.
            outside: storages of its inputs and parameters. Buffers may change before the backward.
            clock: seconds.
            recipe: what is to be noted; None for all.
        """
        self._recipe, self._num_seen, self._is_as_known = recipe, 0, True
        self._path, self._outside_storages, self.clock = path, frozenset(outside), clock
        self.seconds: list[float] = []
        self.noting_s = 0.0
        self._ops: list[_TapedOp] = []
        self._outside: dict[int, _Outside] = {}
        self.num_bytes: list[int] = []
        self._dtypes: list[torch.dtype] = []  # of each state
        self._versions: list[int] = []  # of each state
        self._views: dict[int, View] = {}  # of the result that is a state
        self._state_of: dict[int, int] = {}  # storage -> its present state
        # While these are there, no other storage gets the number of one that has gone.
        self._references: list[StorageWeakRef] = []

    def observing(self) -> AbstractContextManager[Any]:
        """Has ops within noted."""
        return ops_observed(self._run)

    @property
    def regions(self) -> frozenset[PartKey]:
        """Calls within the frame that are observed; empty if all of it is."""
        return frozenset() if self._recipe is None else self._recipe.regions

    @property
    def states_of_ops(self) -> list[StatesOfOp]:
        """What each op reads and makes."""
        return [each.states for each in self._ops]

    @property
    def num_ops(self) -> int:
        """How many have been noted."""
        return len(self._ops)

    @property
    def outside_states(self) -> frozenset[int]:
        """States of tensors from outside."""
        return frozenset(self._outside)

    @property
    def ops(self) -> tuple[OpOverload, ...]:
        """Those that were noted."""
        return tuple(each.op for each in self._ops)

    def state_of(self, tensor: torch.Tensor) -> int:
        """The present state of a tensor's storage; -1 if the tensor is not a plain view of it."""
        if not _is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return _UNKNOWN
        key = storage_id(tensor)
        state = self._state_of.get(key)
        if state is not None and self._versions[state] != version_of(tensor):
            self._outside.pop(state, None)
            state = None
        if state is None:
            state = self._state_of[key] = self._new_state(tensor)
            if key in self._outside_storages:
                self._outside[state] = _Outside(tensor, version_of(tensor), key)
        return state if self._dtypes[state] == tensor.dtype else _UNKNOWN

    # --- noting -----------------------------------------------------------------------------------

    def _run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is _SAME_STORAGE:  # saving a tensor calls it, too
            return op(*args, **kwargs)
        recipe = self._recipe
        if recipe is None:
            return self._timed(op, args, kwargs)
        position = self._num_seen
        self._num_seen = position + 1
        if position >= len(recipe.ops) or recipe.ops[position] is not op:
            self._is_as_known = False
        if position in recipe.noted:
            return self._note(op, args, kwargs, op)
        return op(*args, **kwargs)

    def _timed(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Notes an op, and the seconds of it and of noting it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self.clock()
            output = op(*args, **kwargs)
            self.seconds.append(self.clock() - begin)
            return output

        entered = self.clock()
        output = self._note(op, args, kwargs, timed)
        self.noting_s += self.clock() - entered - self.seconds[-1]
        return output

    def _note(
        self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        inputs: dict[int, int] = {}  # storage -> state
        reads: list[_Read] = []
        noted_args = [self._noted(each, inputs, reads) for each in _without_statistics(op, args)]
        noted_kwargs = {name: self._noted(each, inputs, reads) for name, each in kwargs.items()}
        output = run(*args, **kwargs)
        can_repeat = _UNKNOWN not in inputs.values() and _can_repeat(op, args, kwargs)
        results = self._results(output, inputs)
        rewritten = [self._rewritten(each, inputs) for each in _written(op, args, kwargs)]
        outputs = tuple([each.state for each in results])
        read = frozenset(inputs.values())
        states = StatesOfOp(read, outputs, tuple(rewritten), can_repeat)
        self._ops.append(_TapedOp(op, noted_args, noted_kwargs, reads, states, results))
        return output

    def _noted(self, value: Any, inputs: dict[int, int], reads: list[_Read]) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._noted(each, inputs, reads) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not _is_plain(value):
            inputs[_UNKNOWN] = _UNKNOWN
            return None
        state = inputs[storage_id(value)] = self.state_of(value)
        read = _Read(state, View.of(value), version_of(value))
        reads.append(read)
        return read

    def _new_state(self, tensor: torch.Tensor, num_writes: int = 0) -> int:
        self._dtypes.append(tensor.dtype)
        self._versions.append(version_of(tensor) + num_writes)
        storage = tensor.untyped_storage()
        self.num_bytes.append(storage.nbytes())
        self._references.append(StorageWeakRef(storage))
        return len(self._dtypes) - 1

    def _results(self, output: Any, inputs: Mapping[int, int]) -> list[_Result]:
        """The results that are no views of inputs: new states."""
        results: list[_Result] = []
        for leaf, tensor in enumerate(_leaves(output)):
            if not (isinstance(tensor, torch.Tensor) and _is_plain(tensor)):
                continue
            key = storage_id(tensor)
            if key not in inputs:
                state = self._state_of[key] = self._new_state(tensor)
                view = self._views[state] = View.of(tensor)
                results.append(_Result(leaf, state, view))
        return results

    def _rewritten(self, tensor: torch.Tensor, inputs: Mapping[int, int]) -> tuple[int, int]:
        """States before and after a write in place."""
        key = storage_id(tensor)
        before = inputs[key]
        after = self._state_of[key] = self._new_state(tensor, 1)  # it is counted later
        if before in self._views:
            self._views[after] = self._views[before]
        self._outside.pop(before, None)  # it is not what it was
        return before, after

    # --- making again -----------------------------------------------------------------------------

    def ops_for(self, wanted: Iterable[int], held: Set[int]) -> list[int] | None:
        """Positions of the ops that make states again; None if they cannot. The forward has run.

        Args:
            wanted: states to make.
            held: states that are in memory; those from outside are, too.
        """
        return self._op_states.ops_for(wanted, held | self._outside.keys())

    @cached_property
    def _op_states(self) -> OpStates:
        return OpStates(self.states_of_ops)

    def can_make(self, wanted: Set[int], held: Mapping[int, Saved]) -> bool:
        """Whether states can be made again from those that are held."""
        if self._recipe is not None and self._num_seen != len(self._recipe.ops):
            return False
        order = self.ops_for(wanted, held.keys())
        return self._is_as_known and order is not None and self._reads_them(order, held)

    def _reads_them(self, order: Sequence[int], held: Mapping[int, Saved]) -> bool:
        """Whether what is held is what ops have read: it may have been written in between."""
        reads = (each for at in order for each in self._ops[at].reads)
        return all(each.version == held[each.state].version for each in reads if each.state in held)

    def make(self, wanted: Set[int], held: Mapping[int, Saved]) -> dict[int, torch.Tensor]:
        """States that are made again, each as a tensor that has its memory.

        Args:
            wanted: which.
            held: states that are in memory.

        Raises:
            UnsupportedModelError: a tensor from outside was changed in place since.
        """
        order = self.ops_for(wanted, held.keys())
        assert order is not None
        made: dict[int, torch.Tensor] = {}
        with torch.no_grad(), autocast_off():
            for at, live in zip(order, self._op_states.live_states(order, wanted), strict=True):
                needed = live | self._ops[at].states.inputs
                made = {state: tensor for state, tensor in made.items() if state in needed}
                self._repeat(self._ops[at], made, held)
        return {state: made[state] for state in wanted}

    def _repeat(
        self, taped: _TapedOp, made: dict[int, torch.Tensor], held: Mapping[int, Saved]
    ) -> None:
        args = self._read(taped.args, made, held)
        kwargs = {name: self._read(each, made, held) for name, each in taped.kwargs.items()}
        leaves = _leaves(taped.op(*args, **kwargs))
        for leaf, state, view in taped.results:
            made[state] = self._checked(leaves[leaf], view, taped.op)
        for before, after in taped.states.rewritten:
            made[after] = made.pop(before)

    def _checked(self, result: Any, view: View, op: OpOverload) -> torch.Tensor:
        """A result, if it lies as it did: without gradients some kernels leave results out."""
        if isinstance(result, torch.Tensor) and View.of(result)[:3] == view[:3]:
            return result
        msg = (
            f"an op of {self._path}, {op.name()}, made another result when it ran again. Leave the "
            f"submodule whole: keep={[self._path]!r}."
        )
        raise UnsupportedModelError(msg)

    # No closure that calls itself: it would hold the tensors until the next garbage collection.
    def _read(self, value: Any, made: Mapping[int, torch.Tensor], held: Mapping[int, Saved]) -> Any:
        """An argument, with tensors in the place of their states."""
        if isinstance(value, list):
            return [self._read(each, made, held) for each in value]
        if not isinstance(value, _Read):
            return value
        if value.state in made:
            return self.viewed(made[value.state], value.state, value.view)
        if value.state in held:
            return value.view.within(held[value.state].tensor)
        return value.view.within(self._unchanged(value.state))

    def viewed(self, tensor: torch.Tensor, state: int, view: View) -> torch.Tensor:
        """A view of a state that was made again, as the first run had it."""
        shift = tensor.storage_offset() - self._views[state].offset
        return tensor.as_strided(view.shape, view.stride, view.offset + shift)

    def _unchanged(self, state: int) -> torch.Tensor:
        outside = self._outside[state]
        present = version_of(outside.tensor), storage_id(outside.tensor)
        if present != (outside.version, outside.storage):
            msg = (
                f"a parameter or input of {self._path} was changed in place after its "
                f"call, before the backward: {list(outside.tensor.shape)}. Change it after the "
                f"backward, or leave the submodule whole: keep={[self._path]!r}."
            )
            raise UnsupportedModelError(msg)
        return outside.tensor


def _can_repeat(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a second run of an op gives the same."""
    position = _dropout_argument(op)
    if position is None:
        return _is_repeatable(op) and not _is_random(op)
    share = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return _is_repeatable(op) and share == 0.0


@cache
def _is_repeatable(op: OpOverload) -> bool:
    name = op.name()
    is_garbage = "empty" in name
    updates = "batch_norm" in name and op not in _BATCH_NORMS
    return op.namespace == "aten" and not (is_garbage or updates)


@cache
def _is_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


@cache
def _dropout_argument(op: OpOverload) -> int | None:
    """Where an attention op takes its share of dropout: without, it is random by its tag alone."""
    names = [argument.name for argument in schema_of(op).arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@cache
def _written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _without_statistics(op: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments for a second run, which updates no statistics."""
    if op in _BATCH_NORMS and args[5]:
        first, last = _RUNNING_STATISTICS
        return [*args[:first], None, None, *args[last + 1 :]]
    return args


def _written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes in place, one of each storage."""
    written = _written_arguments(op)
    if not written:
        return []
    values = [
        args[position] if position < len(args) else kwargs.get(name) for position, name in written
    ]
    found = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
    return list({storage_id(each): each for each in found if _is_plain(each)}.values())


def _leaves(output: Any) -> Sequence[Any]:
    """The results of an op."""
    return (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in PLAIN and tensor.layout == torch.strided
    return is_plain and not tensor.is_inference()  # its writes are not counted
