"""Runs a call as in eager and as planned, and compares the bits of all that it gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.autocast import autocast_as, autocast_dtypes, cached_cast
from rockmate.capture.structure import Structure, flatten
from rockmate.frames.call import Call
from rockmate.frames.interiors.gradients import contributions_noted
from rockmate.state.digest import bits_of
from rockmate.state.random_state import RandomState
from rockmate.state.tensors import layout_of, storages_of, tensors_in

Layouts = Sequence[Sequence[tuple[int, ...]]]
"""For each output, how its gradients may lie in memory."""
_MOST_LAYOUTS = 4


class GradientLayouts:
    """How the gradients of outputs of one submodule have lain in memory, in backwards of eager.

    Kernels round otherwise for other strides. A reader that transposes, takes a part, or sums up,
    hands over a gradient with strides of its own: those of its view, or zeros.

    Attributes:
        differ: whether one lay otherwise than its output.
        autocast: that of the last backward, with which eager computes gradients, too.
    """

    def __init__(self) -> None:
        """None is known."""
        self.differ, self.autocast = False, dict[str, torch.dtype]()
        self._known: defaultdict[Hashable, list[tuple[int, ...]]] = defaultdict(list)
        self._tried: set[Hashable] = set()

    def add(self, place: int, own: tuple[int, ...], gradient: torch.Tensor) -> bool:
        """Takes one; whether a trial that there was had none of its layout, or other autocast."""
        layout, key, before = layout_of(gradient), (place, gradient.shape), self.autocast
        known, self.autocast = self._known[key], autocast_dtypes()
        self.differ |= layout != own
        is_known = layout in known or len(known) == _MOST_LAYOUTS
        if not is_known:
            known.append(layout)
        return key in self._tried and not (is_known and self.autocast == before)

    def are_known(self, output: Any) -> bool:
        """Whether a backward of an output of these shapes has come."""
        return any((at, each.shape) in self._known for at, each in enumerate(tensors_in(output)))

    def for_trial(self, output: Any) -> Layouts:
        """Those that a trial of a call has to have."""
        tensors = tensors_in(output)
        keys = [(place, each.shape) for place, each in enumerate(tensors)]
        self._tried.update(keys)
        pairs = zip(keys, tensors, strict=True)
        return [list(self._known.get(key) or [layout_of(each)]) for key, each in pairs]


class Trial(NamedTuple):
    """What one run of a call has given.

    Attributes:
        structure: of the output.
        outputs: for each of its tensors layout, whether it has a gradient, which argument or output
            is the same tensor or has the same memory, and bits.
        contributions: for each argument and parameter with a gradient, the bits of what its readers
            hand over, in the order in which they do, and the strides of that of an argument.
        buffers: bits of each.
        random_state: after it.
        seconds: of forward and backward.
    """

    structure: Structure
    outputs: tuple[Any, ...]
    contributions: tuple[Any, ...]
    buffers: tuple[int, ...]
    random_state: RandomState
    seconds: float

    def difference(self, other: Trial) -> str:
        """What differs, in one word; empty if nothing does."""
        if self.random_state.differences(other.random_state):
            return "random state"
        names = ("structure", "outputs", "contributions", "buffers")
        return next((name for name in names if getattr(self, name) != getattr(other, name)), "")


def trained(
    call: Call,
    module: nn.Module,
    forward: Callable[..., Any],
    clock: Callable[[], float],
    layouts: Sequence[tuple[int, ...]],
    autocast: Mapping[str, torch.dtype],
    cast_names: Sequence[str] = (),
) -> Trial:
    """Runs a forward, and its backward under some autocast, in the state that a call began in.

    The state then goes back. Gradients of outputs are random numbers in some `layouts`, the same at
    each time. Those of the casts of parameters of `cast_names` are compared, too.
    """
    given: list[torch.Tensor] = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        given.extend(tensors_in((args, kwargs)))
        return forward(*args, **kwargs)

    parameters = dict.fromkeys(each for each in module.parameters() if each.requires_grad)
    with call.again(noting) as (run, _):
        begin_s = clock()
        tensors, structure = flatten(run(), what="the output")
        casts = [cached_cast(module.get_parameter(name)) for name in cast_names]
        trained_ones = dict.fromkeys(each for each in given if each.requires_grad)
        leaves = [*trained_ones, *parameters, *casts]
        pairs = zip(tensors, layouts, strict=True)
        tangents = [(each, _tangent(each, own)) for each, own in pairs if each.requires_grad]
        outputs, gradients = [each for each, _ in tangents], [each for _, each in tangents]
        with contributions_noted(outputs, leaves) as found, autocast_as(autocast):
            _ = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
        seconds = clock() - begin_s
        contributions = tuple([
            tuple([(bits_of(each), _strides(leaf, each)) for each in arrived])
            for leaf, arrived in zip(leaves, found, strict=True)
        ])  # fmt: skip
        bits = tuple([
            (each.shape, each.stride(), each.dtype, each.requires_grad, same, bits_of(each))
            for each, same in zip(tensors, _identities(given, tensors), strict=True)
        ])  # fmt: skip
        random_state = RandomState([each.device for each in tensors])
        buffers = tuple([bits_of(each) for each in module.buffers()])
        return Trial(structure, bits, contributions, buffers, random_state, seconds)


def _tangent(like: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """A random gradient; of one element in each dimension in which all are the same."""
    sizes = [1 if step == 0 else size for size, step in zip(like.shape, layout, strict=True)]
    found = torch.empty_strided(sizes, layout, dtype=like.dtype, device=like.device)
    found.normal_(generator=torch.Generator(like.device).manual_seed(0))
    return found.expand(like.shape)


def _strides(leaf: torch.Tensor, gradient: torch.Tensor) -> tuple[int, ...]:
    """Of an argument's gradient, since what made the argument rounds by them."""
    return () if isinstance(leaf, nn.Parameter) else layout_of(gradient)


def _identities(
    given: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[tuple[int, int]]:
    """For each output, where the same tensor comes first, and where the same memory does.

    The caller may ask, or change one of them in place.
    """
    known = [*given, *outputs]
    ids, storages = list(map(id, known)), list(map(storages_of, known))
    places = range(len(given), len(known))
    return [(ids.index(ids[place]), storages.index(storages[place])) for place in places]
