"""How gradients of outputs lie in memory: kernels round otherwise for other strides.

A reader that transposes, takes a part, or sums up, hands over a gradient with strides of its own:
those of its view, or zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from rockmate.state.tensors import layout_of

_MOST_LAYOUTS = 4
"""Of the gradient of one output, beside that of the output."""


class GradientLayouts:
    """The layouts that the gradient of each output has had, that of the output being the first.

    Attributes:
        has_changed: whether one has come since the last trial.
    """

    def __init__(self) -> None:
        """None is known."""
        self.has_changed = False
        self._known: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # of each output
        self._tried: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)

    @property
    def number(self) -> int:
        """Of trials that it takes to have each layout of each output."""
        return 1 + max(map(len, self._known.values()), default=0)

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Takes the layout of a gradient.

        Args:
            place: of its output.
            gradient: that a backward in eager had.
        """
        layout, known = layout_of(gradient), self._known[place]
        if layout not in known and len(known) < _MOST_LAYOUTS:
            known.append(layout)
            self.has_changed = True

    def has(self, place: int, gradient: torch.Tensor) -> bool:
        """Whether a trial had a gradient of this layout."""
        return layout_of(gradient) in self._tried[place]

    def tangents(
        self,
        outputs: Sequence[torch.Tensor],
        generators: dict[torch.device, torch.Generator],
        trial: int,
    ) -> list[torch.Tensor]:
        """Random gradients of outputs for a trial.

        Args:
            outputs: all of them; those without a history have no gradient.
            generators: of random numbers, by device.
            trial: its number.
        """
        found = []
        for place, each in enumerate(outputs):
            if not each.requires_grad:
                continue
            known = self._known[place][:trial]
            tangent = _empty(each, known[-1]) if known else torch.empty_like(each)
            tangent.normal_(generator=generators[each.device])
            found.append(tangent.expand(each.shape))
            self._tried[place].add(layout_of(found[-1]))
        self.has_changed = False
        return found


def _empty(like: torch.Tensor, layout: Sequence[int]) -> torch.Tensor:
    """Of a size of one in each dimension in which all elements are the same."""
    sizes = [1 if step == 0 else size for size, step in zip(like.shape, layout, strict=True)]
    return torch.empty_strided(sizes, layout, dtype=like.dtype, device=like.device)
