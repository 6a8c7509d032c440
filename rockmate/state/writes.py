"""What ops write in place to tensors that were there before, so that it can be undone.

A tensor is copied right before the first op that writes to it. So nothing has to be known of a
forward, and nothing is copied that stays as it is: buffers, parameters, inputs, tensors in any
object.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from rockmate._torch.dispatch import is_op, ops_observed, schema_of
from rockmate._torch.storage import StorageWeakRef, storage_id
from rockmate.state.tensors import parts_of, tensors_in, with_changed


class OutOfBudget(BaseException):
    """Stops a run that is about to take more than it may; no model is to catch it."""


class Writes:
    """The tensors that ops have changed in place, with copies of what they held.

    It counts the bytes of new tensors, too, and stops a run that holds too many.

    Attributes:
        changed: storage -> a tensor that has it.
        most_bytes: that new tensors and copies may hold together; None for any number.
    """

    def __init__(self, most_bytes: int | None = None, largest_bytes: int = 0) -> None:
        """Nothing is changed yet.

        Args:
            most_bytes: see the class.
            largest_bytes: what one op makes of others at most, as far as that is known. Where so
                much more would be too much, the results are computed on meta tensors before.
        """
        self._largest_bytes = largest_bytes
        self.changed: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self.most_bytes = most_bytes
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self._new_bytes, self._is_over = 0, False
        self._evict: Callable[[], bool] = lambda: False

    @property
    def num_bytes(self) -> int:
        """Of the copies."""
        return sum(copy.nbytes() for copy in self._copies.values())

    @contextmanager
    def noted(
        self, evict: Callable[[], bool] = lambda: False, more_bytes: int = 0
    ) -> Iterator[None]:
        """Notes what runs within.

        Args:
            evict: where too much is held, frees some of it; whether there was something.
            more_bytes: that may be held beyond `most_bytes`, if that is a number.

        Raises:
            OutOfBudget: it holds too much.
        """
        before = self.most_bytes, self._evict
        self._evict, self._is_over = evict, False
        self.most_bytes = None if self.most_bytes is None else self.most_bytes + more_bytes
        try:
            with ops_observed(self._run):
                yield
        except RuntimeError as error:
            if self._is_over:  # TorchScript's interpreter raises an error of its own instead
                raise OutOfBudget from error
            raise
        finally:
            self.most_bytes, self._evict = before

    def restore(self) -> None:
        """Puts the contents back."""
        for key, tensor in self.changed.items():
            memory, before = tensor.untyped_storage(), self._copies[key]
            if memory.nbytes() != before.nbytes():
                memory.resize_(before.nbytes())
            memory.copy_(before)

    def release(self) -> None:
        """Drops what is known of new tensors."""
        self._new.clear()

    def forget_others(self, storages: Container[int]) -> None:
        """Keeps those to these storages, without what they held."""
        self.changed = {key: each for key, each in self.changed.items() if key in storages}
        self._copies.clear()

    def copied(self) -> Writes:
        """Writes to the same tensors, with copies of what they hold now."""
        found = Writes()
        found._save(list(self.changed.values()))
        return found

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = _written(op) if is_op(op) else None
        if places is None:  # a higher-order op, which says nothing
            self._save(tensors_in((args, kwargs)))
        elif places:
            values = [args[at] for at, _ in places if at < len(args)]
            values += [kwargs[name] for _, name in places if name in kwargs]
            self._save(tensors_in(values))
        makes_new = places is not None and _makes_new(op)
        if makes_new and self.most_bytes is not None:  # what reads no tensor may be of any size
            is_first = not tensors_in((args, kwargs))
            if is_first or self._exceeds(self._largest_bytes):
                self._require(_result_bytes(op, args, kwargs, otherwise=self._largest_bytes))
        result = op(*args, **kwargs)
        if makes_new:
            self._note_new(result)
        return result

    def _save(self, tensors: list[torch.Tensor]) -> None:
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            key = storage_id(part)
            if key in self.changed or key in self._new:
                continue
            self._add(part.untyped_storage().nbytes())
            self._copies[key] = part.untyped_storage().clone()
            self.changed[key] = part.detach()

    def _note_new(self, result: Any) -> None:
        tensors = tensors_in(result)
        for part in (part for tensor in tensors for part in parts_of(tensor)):
            memory = part.untyped_storage()
            key, num_bytes = storage_id(memory), memory.nbytes()
            _, known_bytes = self._new.get(key, (None, 0))
            self._add(num_bytes - known_bytes)
            self._new[key] = StorageWeakRef(memory), num_bytes

    def _add(self, num_bytes: int) -> None:
        self._require(num_bytes)
        self._new_bytes += num_bytes

    def _require(self, num_bytes: int) -> None:
        if self._exceeds(num_bytes):
            self._is_over = True
            raise OutOfBudget

    def _exceeds(self, num_bytes: int) -> bool:
        """Whether so much more would be too much."""
        if self.most_bytes is None or self._new_bytes + num_bytes <= self.most_bytes:
            return False
        while True:
            self._new = {key: each for key, each in self._new.items() if not each[0].expired()}
            self._new_bytes = self.num_bytes + sum(num_bytes for _, num_bytes in self._new.values())
            if self._new_bytes + num_bytes <= self.most_bytes:
                return False
            if not self._evict():
                return True


def _result_bytes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, otherwise: int) -> int:
    """Bytes of what an op makes; `otherwise` if it does not run on meta tensors."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.device):  # where the op makes a tensor, or draws numbers
            return torch.device("meta")
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    given = with_changed(meta, (args, kwargs))
    try:
        made = tensors_in(op(*given[0], **given[1]))
        return sum(each.untyped_storage().nbytes() for each in made)
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return otherwise


@cache
def _written(op: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op writes to.

    Ops of normalizations do not say that they write running statistics.
    """
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(schema_of(op).arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name.startswith("running_")
    )


@cache
def _makes_new(op: Any) -> bool:
    is_lifted = schema_of(op).name == "aten::lift_fresh"  # `torch.tensor` has made it
    return is_lifted or any(each.alias_info is None for each in schema_of(op).returns)
