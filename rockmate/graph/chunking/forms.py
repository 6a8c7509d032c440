"""Forms of values seen from the rows of a region, and a call as its rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from rockmate.capture.nodes import call_name


@dataclass(frozen=True, slots=True)
class Rows:
    """Dims `start` to `stop` - 1 run over the rows; the first and the last are larger than 1."""

    start: int
    stop: int


class Whole:
    """The value is the same for every chunk."""


class Partial:
    """The value is a sum over the rows: the chunks' results add up to it."""


class ChunkRows:
    """A placeholder in a call's arguments for the number of rows of the chunk."""


WHOLE, PARTIAL, CHUNK_ROWS = Whole(), Partial(), ChunkRows()
Form = Rows | Whole | Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """How a call runs on one chunk.

    Attributes:
        forms: of its result, or of each of several results; None for a result that must not be
            read.
        slices: the operands from outside the region that are sliced by rows. Others are whole.
        target: replaces the call's target; None for its own.
        args: replace the call's arguments, with `CHUNK_ROWS` for the number of rows of the chunk;
            None for its own.
        divisor: divides the result.
    """

    forms: tuple[Form | None, ...]
    slices: Mapping[fx.Node, Rows] = field(default_factory=dict)
    target: Any = None
    args: tuple[Any, ...] | None = None
    divisor: int = 1


class InseparableError(Exception):
    """A region cannot run in chunks; has the call and the reason."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        self.call = f"{call_name(node)} ({node.name})"
        super().__init__(f"{self.call} {reason}")
        self.node = node
        self.reason = reason


def rows_within(shape: Sequence[int], start: int, stop: int) -> Rows:
    """Dims `start` to `stop` - 1, without those of size 1 at either end."""
    while stop - start > 1 and shape[start] == 1:
        start += 1
    while stop - start > 1 and shape[stop - 1] == 1:
        stop -= 1
    return Rows(start, stop)


def chunk_shape(shape: Sequence[int], rows: Rows, size: Any) -> list[Any]:
    """The shape of one chunk of a value."""
    return [*shape[: rows.start], *[1] * (rows.stop - rows.start - 1), size, *shape[rows.stop :]]


@dataclass(frozen=True)
class RegionCall:
    """One call of a region, as its rule sees it.

    Attributes:
        node: the call.
        forms: of the values so far.
        region: the calls of the region.
        num_rows: number of rows.
        joined: see `separate`.
    """

    node: fx.Node
    forms: Mapping[fx.Node, Form]
    region: Collection[fx.Node]
    num_rows: int
    joined: Collection[fx.Node]

    @property
    def args(self) -> tuple[Any, ...]:
        """The call's arguments."""
        return self.node.args

    def option(self, position: int, default: Any) -> Any:
        """An optional argument."""
        return self.args[position] if len(self.args) > position else default

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.node.meta["val"].shape)

    def refuse(self, reason: str) -> InseparableError:
        """The error for this call."""
        return InseparableError(self.node, reason)

    def form(self, operand: Any) -> Form | None:
        """The form of an operand; None for one from outside, which may be sliced or whole."""
        if not isinstance(operand, fx.Node):
            return None
        form = self.forms.get(operand)
        if form is PARTIAL:
            if self.node not in self.joined or operand in self.joined:
                raise self.refuse(
                    f"reads {operand.name}, a sum over all rows, where only a part of them is known"
                )
            return None
        if form is None and operand in self.region:
            raise self.refuse(f"reads {operand.name}, which is a result that chunks cannot give")
        return form

    def rows(self, operand: Any) -> Rows | None:
        """The dims that run over the rows; None if the operand is whole or from outside."""
        form = self.form(operand)
        return form if isinstance(form, Rows) else None

    def is_outside(self, operand: Any) -> bool:
        """Whether it comes from outside the region and may be sliced."""
        return isinstance(operand, fx.Node) and self.form(operand) is None

    def must_be_whole(self, *operands: Any) -> None:
        """Raises if an operand has rows."""
        for operand in operands:
            if self.rows(operand) is not None:
                raise self.refuse(f"combines rows of {operand.name} with each other")

    def at(self, operand: fx.Node, rows: Rows, slices: dict[fx.Node, Rows]) -> None:
        """Raises if an operand has its rows elsewhere; an operand from outside is sliced."""
        shape = shape_of(operand)
        known = self.form(operand)
        if (
            known is None
            and rows.stop <= len(shape)
            and prod(shape[rows.start : rows.stop]) == self.num_rows
        ):
            wanted = rows_within(shape, rows.start, rows.stop)
            if slices.setdefault(operand, wanted) == wanted:
                return
        if known != rows:
            raise self.refuse(f"takes the rows of {operand.name} in another place")

    def only(self, operand: Any) -> Rows:
        """The rows of an operand; raises if it has none."""
        rows = self.rows(operand)
        if rows is None:
            raise self.refuse("runs over rows that its first operand does not have")
        return rows

    def result(self, rows: Form | None, **more: Any) -> Piece:
        """The piece of a call with one result."""
        return Piece(forms=(rows,), **more)

    def getitem(self, pieces: Mapping[fx.Node, Piece]) -> Piece:
        """The piece of a `getitem`: one result of a call with several."""
        parent, index = self.args
        return Piece(forms=(pieces[parent].forms[index],))

    def outside_dims(self, rows: Rows, dims: Iterable[int], num_dims: int) -> None:
        """Raises if one of the dims runs over the rows."""
        if any(rows.start <= dim % num_dims < rows.stop for dim in dims):
            raise self.refuse("runs along the rows")


Rule = Callable[[RegionCall], Piece]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a value."""
    return tuple(node.meta["val"].shape)


def tensors_in(values: Iterable[Any]) -> list[fx.Node]:
    """The nodes among arguments, those of nested lists included."""
    found: list[fx.Node] = []
    for value in values:
        found += (
            tensors_in(value)
            if isinstance(value, tuple | list)
            else [value]
            if isinstance(value, fx.Node)
            else []
        )
    return found
