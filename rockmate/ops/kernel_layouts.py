"""Layouts of results as kernels gave them in this process, where fake tensors lie otherwise.

Autograd goes by layouts: it copies a gradient only if a kernel cannot read it as it lies. A trace
on wrong fake layouts lacks such a copy, and the kernel then reads other numbers.

Each distinct call runs alone before its step is planned. What its results are then is noted here
under the call's key. Where the fake results of a capture say otherwise, the next capture takes them
from here: so an op that nobody knows to be wrong is right in the second capture. What a run does
not tell is the memory behind a result (`CLONES`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from rockmate._torch.fake import hint_of

_aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The format with the channels last, by the number of dimensions."""

# Calls that clone the whole memory behind their first argument. PyTorch caches the fake results of
# such calls, and what it takes from the cache lies elsewhere.
CLONES = {
    _aten.copy.default,
    _aten.diagonal_scatter.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
}

_MOST_CALLS = 1 << 15  # known at a time; a step has some hundred


class Layout(NamedTuple):
    """Sizes, strides and dtype of a result, and whether it has memory of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_own: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a tensor; symbols are the numbers that they stand for in their trace."""
        shape, strides = (tuple(map(hint_of, each)) for each in (tensor.shape, tensor.stride()))
        return cls(shape, strides, tensor.dtype)

    def __str__(self) -> str:
        dtype, where = str(self.dtype)[6:], "" if self.is_own else " in the memory of an argument"
        return f"{dtype}{[*self.shape]} with strides {[*self.strides]}{where}"

    def reads_like(self, other: Layout) -> bool:
        """Whether the same elements lie at the same places, whatever dims of one element say."""
        if (self.shape, *self[2:]) != (other.shape, *other[2:]):
            return False
        steps = zip(self.shape, self.strides, other.strides, strict=True)
        return 0 in self.shape or all(mine == theirs for size, mine, theirs in steps if size > 1)

    @property
    def has_two_formats(self) -> bool:
        """Whether the strides of dims of one element tell the memory format."""
        if len(self.shape) not in (4, 5):
            return False
        return self.shape[1] == 1 or set(self.shape[2:]) == {1}


Layouts = tuple[Layout | None, ...]
"""Of the results of a call; None for one that is no tensor."""

_observed: dict[Hashable, Layouts] = {}  # by the call's key
_corrected: dict[Hashable, Layouts] = {}  # those that fakes contradict


def call_key(target: Any, args: Any, kwargs: Mapping[str, Any]) -> Hashable:
    """Equal for calls of one target with equal constants and equal metadata of tensors.

    Arguments have tensors, or nodes with fake ones.
    """
    return str(target), frozen(args, _constant), frozen(kwargs, _constant)


def frozen(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """Equal for equal nestings of arguments whose leaves are equal."""
    if isinstance(value, Mapping):
        return tuple((key, frozen(item, leaf)) for key, item in sorted(value.items()))
    if isinstance(value, tuple | list):
        return tuple(frozen(item, leaf) for item in value)
    return leaf(value)


def _constant(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        value = value.meta["val"]
        if not isinstance(value, torch.Tensor):
            return "several tensors"
    if isinstance(value, torch.Tensor):
        is_sparse = value.layout != torch.strided
        return str(value.layout) if is_sparse else Layout.of(value), value.device
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        value = hint_of(value)
    return type(value).__name__, value


def is_observed(key: Hashable) -> bool:
    """Whether a call of this key has run."""
    return key in _observed


def observe(key: Hashable, results: Any, args: Sequence[Any]) -> None:
    """Notes the layouts that a kernel has given."""
    given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
    if len(_observed) >= _MOST_CALLS:
        del _observed[next(iter(_observed))]
    _observed[key] = tuple(
        Layout.of(each)._replace(is_own=each.untyped_storage().data_ptr() not in given - {0})
        if isinstance(each, torch.Tensor)
        else None
        for each in as_tuple(results)
    )


def differences(key: Hashable, fakes: Any) -> list[tuple[Hashable, Layout, Layout]]:
    """The results of a call that was observed whose layouts are not those of the fake results.

    Each is the call's key, the layout that the kernel gave, and the one that the capture has.
    The next capture has those of the kernel. Where it has others all the same, that is no
    difference if the same elements lie at the same places.
    """
    known, found = _observed.get(key), list[tuple[Hashable, Layout, Layout]]()
    fakes = as_tuple(fakes)
    if known is None or len(known) != len(fakes):
        return found
    is_known = _corrected.get(key) == known
    for real, tensor in zip(known, fakes, strict=True):
        # A gradient that is not asked for is no tensor to a kernel, and may be one to its fake.
        if real is None or not isinstance(tensor, torch.Tensor):
            continue
        fake = Layout.of(tensor)
        if not real.reads_like(fake) or (real != fake and fake.has_two_formats and not is_known):
            found.append((key, real, fake))
    if found:
        _corrected[key] = known
    return found


def in_kernel_layout(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> Any:
    """The fake result of a call in the layout that the kernel gives it, as far as that is known.

    Another result is made in the fake mode that is on.
    """
    layouts = _corrected.get(call_key(target, args, kwargs)) if _corrected else None
    if layouts is None:
        return cloned(args[0], result) if target in CLONES else result
    if isinstance(result, torch.Tensor):
        return _laid_out(layouts[0], result)
    return tuple(_laid_out(real, fake) for real, fake in zip(layouts, result, strict=True))


def _laid_out(real: Layout | None, fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor) or real is None:
        return None
    if real == Layout.of(fake) or not real.is_own:
        return fake
    like: Any = {"dtype": real.dtype, "device": fake.device}
    if all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        return torch.empty_strided(real.shape, real.strides, **like)
    # Of symbols the order of the dimensions is known, if that tells the strides.
    order = sorted(range(fake.ndim), key=lambda dim: (-real.strides[dim], real.shape[dim] == 1))
    made = torch.empty_permuted(fake.shape, order, **like)
    return made if Layout.of(made) == real else fake


def as_tuple(results: Any) -> tuple[Any, ...]:
    """The results of a call, also of one that returns a tensor alone."""
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def cloned(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """A result that lies in a copy of the whole memory of an argument, as the argument does."""
    nbytes, offset = given.untyped_storage().nbytes(), given.storage_offset()
    is_alike = result.untyped_storage().nbytes() == nbytes and result.storage_offset() == offset
    if is_alike or result.stride() != given.stride():  # one that overlaps itself is made dense
        return result
    numel = nbytes // given.element_size()
    memory = torch.empty(numel, dtype=result.dtype, device=result.device)
    return memory.as_strided(result.shape, result.stride(), offset)
