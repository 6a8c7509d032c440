"""Forms of values with respect to the rows of a region, and the view of a call that rules read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from rockmate._torch.pytree import tree_leaves
from rockmate.capture.nodes import call_name


@dataclass(frozen=True, slots=True)
class Rows:
    """Dims `start` to `stop` - 1 run over the rows. The first and the last are larger than 1."""

    start: int
    stop: int


class Partial:
    """The value is a sum over the rows. It is the sum of the chunks' results."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Stands in a call's arguments for the number of rows of the chunk, times `num_copies`."""

    num_copies: int = 1


PARTIAL = Partial()
Form = Rows | Partial


@dataclass(frozen=True, slots=True)
class RowSpace:
    """The rows of a region, as dims of values run over them.

    Where tokens are the rows of values of batch x tokens, dims of a value run over tokens, or over
    batch x tokens: copies of each row. The region may have only the tokens that a slice takes.

    Attributes:
        num_rows: number of rows of the region.
        num_copies: number of copies in values that have copies.
        size: number of rows of values that also have rows outside the region. 0: there are none.
        start: the first row of the region among `size` rows.
    """

    num_rows: int
    num_copies: int = 1
    size: int = 0
    start: int = 0

    def copies(self, count: int) -> int:
        """Returns how often dims of `count` elements have each row. 0 if they run over no rows."""
        numbers = (1, self.num_copies)
        return next((n for n in numbers if count in (n * self.num_rows, n * self.size)), 0)

    def has_more(self, count: int) -> bool:
        """Whether dims of `count` elements also have rows outside the region."""
        return bool(self.size) and count == self.copies(count) * self.size

    def is_cut(self, size: int, start: Any, stop: Any, step: int) -> bool:
        """Whether a slice of `size` rows takes those of the region."""
        taken = range(size)[slice(start, stop, step)]
        return size == self.size and taken == range(self.start, self.start + self.num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedCall:
    """How a call runs on one chunk.

    Attributes:
        forms: form of each result. None means that no call of the region may read the result.
        slices: operands from outside the region that are sliced -> their rows. Other operands from
            outside are whole.
        target: replaces the call's target. None keeps it.
        args: replace the call's arguments, with `ChunkRows` for the number of rows of the chunk.
            None keeps them.
        divisor: the sum of the chunks' results is divided by it.
    """

    forms: tuple[Form | None, ...]
    slices: Mapping[fx.Node, Rows] = field(default_factory=dict)
    target: Any = None
    args: tuple[Any, ...] | None = None
    divisor: int = 1


class InseparableError(Exception):
    """A region cannot run in chunks. The error has the call and the reason."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.call = f"{call_name(node)} ({node.name})"
        super().__init__(f"{self.call} {reason}")
        self.node = node
        self.reason = reason


def rows_within(shape: Sequence[int], start: int, stop: int) -> Rows:
    """Returns dims `start` to `stop` - 1, without dims of size 1 at either end."""
    while stop - start > 1 and shape[start] == 1:
        start += 1
    while stop - start > 1 and shape[stop - 1] == 1:
        stop -= 1
    return Rows(start, stop)


def chunk_shape(shape: Sequence[int], rows: Rows, size: Any) -> list[Any]:
    """Returns the shape of a chunk of `size` rows of a value."""
    return [*shape[: rows.start], *[1] * (rows.stop - rows.start - 1), size, *shape[rows.stop :]]


@dataclass(frozen=True)
class RegionCall:
    """One call of a region, with the forms that its rule reads.

    Attributes:
        node: the call.
        forms: forms of the values before the call.
        region: the calls of the region.
        space: the rows.
        sum_readers: see `separate`.
    """

    node: fx.Node
    forms: Mapping[fx.Node, Form]
    region: Collection[fx.Node]
    space: RowSpace
    sum_readers: Collection[fx.Node]

    @property
    def args(self) -> tuple[Any, ...]:
        """The call's arguments."""
        return self.node.args

    def option(self, position: int, default: Any) -> Any:
        """Returns an optional argument, or its default."""
        return self.args[position] if len(self.args) > position else default

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the call's result."""
        return tuple(self.node.meta["val"].shape)

    def refuse(self, reason: str) -> InseparableError:
        """Returns the error that refuses this call."""
        return InseparableError(self.node, reason)

    def form(self, operand: Any) -> Form | None:
        """Returns the form of an operand. None means from outside: it may be sliced or whole."""
        if not isinstance(operand, fx.Node):
            return None
        form = self.forms.get(operand)
        if form is PARTIAL:
            if self.node not in self.sum_readers or operand in self.sum_readers:
                raise self.refuse(
                    f"reads {operand.name}, a sum over all rows, before all chunks have been added"
                )
            return None
        if form is None and operand in self.region:
            raise self.refuse(f"reads {operand.name}, and chunks cannot compute that result")
        return form

    def rows(self, operand: Any) -> Rows | None:
        """Returns the dims of an operand over the rows. None means whole or from outside."""
        form = self.form(operand)
        return form if isinstance(form, Rows) else None

    def require_whole(self, *operands: Any) -> None:
        """Raises `InseparableError` if one of the operands has rows."""
        for operand in operands:
            if self.rows(operand) is not None:
                raise self.refuse(f"combines rows of {operand.name} with each other")

    def require_rows(self, operand: fx.Node, rows: Rows, slices: dict[fx.Node, Rows]) -> None:
        """Raises `InseparableError` if an operand has no such rows. Slices one from outside."""
        shape = shape_of(operand)
        known = self.form(operand)
        if (
            known is None
            and rows.stop <= len(shape)
            and self.space.copies(prod(shape[rows.start : rows.stop]))
        ):
            wanted = rows_within(shape, rows.start, rows.stop)
            if slices.setdefault(operand, wanted) == wanted:
                return
        if known != rows:
            raise self.refuse(f"reads the rows of {operand.name} along other dims")

    def chunk_shape(self, shape: Sequence[int], rows: Rows) -> list[Any]:
        """Returns the shape of a chunk of a value, with `ChunkRows` for its rows."""
        copies = self.space.copies(prod(shape[rows.start : rows.stop]))
        return chunk_shape(shape, rows, ChunkRows(copies))

    def rows_of_all(self, operands: Iterable[fx.Node]) -> tuple[Rows, dict[fx.Node, Rows]]:
        """Returns the rows that all operands have, and those of operands that are sliced."""
        operands, slices = list(operands), dict[fx.Node, Rows]()
        rows = next(filter(None, map(self.rows, operands)), None)
        if rows is None:
            raise self.refuse("reads no operand by rows")
        for operand in operands:
            self.require_rows(operand, rows, slices)
        return rows, slices

    def known_rows(self, operand: Any) -> Rows:
        """Returns the rows of an operand. Raises `InseparableError` if it has none."""
        rows = self.rows(operand)
        if rows is None:
            raise self.refuse("needs rows in its first operand, which has none")
        return rows

    def result(self, rows: Form | None, **more: Any) -> ChunkedCall:
        """Returns how a call with one result runs on one chunk."""
        return ChunkedCall(forms=(rows,), **more)

    def require_other_dims(self, rows: Rows, dims: Iterable[int], num_dims: int) -> None:
        """Raises `InseparableError` if one of the dims runs over the rows."""
        if any(rows.start <= dim % num_dims < rows.stop for dim in dims):
            raise self.refuse("runs along the rows")


Rule = Callable[[RegionCall], ChunkedCall]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Returns the shape of a value."""
    return tuple(node.meta["val"].shape)


def tensors_in(values: Iterable[Any]) -> list[fx.Node]:
    """Returns the nodes among arguments and in their nested lists."""
    return [value for value in tree_leaves(list(values)) if isinstance(value, fx.Node)]
