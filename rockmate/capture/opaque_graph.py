"""The autograd graph of one run of an opaque module.

What it saves, and how it is differentiated.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rockmate._torch.storage import StorageWeakRef, storage_id
from rockmate.capture.opaque_inputs import ReleasableInputs
from rockmate.errors import BackwardError
from rockmate.ops.undefined_gradient import undefined_gradient


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """That of a tensor; one whose elements share memory, or leave gaps, is laid out anew."""
        like = torch.empty_like(tensor, device="meta")
        return cls(tuple(tensor.shape), like.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor of this layout, its values not set."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor if it has this layout, and its memory to itself; else a copy that has."""
        has_gaps = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        fits = tensor.stride() == self.stride and not has_gaps
        return tensor if fits else self.empty().copy_(tensor)


@dataclass(slots=True)
class SavedRun:
    """One run of a submodule.

    Its inputs as leaves of the autograd graph, its outputs, and what the graph borrows.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]
    loan: ReleasableInputs

    def values(self, inputs: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """The outputs as the plan has them.

        Outside the graph, each in memory of its own, laid out as on the sample.
        """
        given = {*storage_keys(inputs)}
        values = []
        for tensor, layout in zip(self.outputs, layouts, strict=True):
            shares = storage_id(tensor) in given
            values.append(layout.laid_out(tensor.detach().clone() if shares else tensor.detach()))
            given.add(storage_id(tensor))
        return values


@dataclass(slots=True, eq=False)
class RunGraph:
    """The autograd graph of one run."""

    leaves: list[Tensor]
    # Of the outputs, whose memory would be held with the tensors themselves.
    ends: list[GradientEdge | None]
    loan: ReleasableInputs

    @classmethod
    def of(cls, run: SavedRun) -> RunGraph:
        """The graph of a run, from its outputs to the inputs that require a gradient."""
        wanted = [leaf for leaf in run.leaves if leaf.requires_grad]
        for leaf in wanted:
            leaf.register_post_accumulate_grad_hook(_refuse)
        return cls(
            wanted,
            [get_gradient_edge(output) if output.requires_grad else None for output in run.outputs],
            run.loan,
        )

    def differentiate(
        self,
        gradients: Sequence[Tensor | None],
        borrowed: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> list[Tensor]:
        """Gradients of the inputs that require one, given those of the outputs."""
        pairs = zip(self.ends, gradients, strict=True)
        both = [(end, each) for end, each in pairs if not (end is None or each is None)]
        ends, given = [end for end, _ in both], [gradient for _, gradient in both]
        with self.loan.given(borrowed):
            found = torch.autograd.grad(ends, self.leaves, given, allow_unused=True)
        values, seen = [], {*storage_keys(each for each in gradients if each is not None)}
        for gradient, layout in zip(found, layouts, strict=True):
            # Each is memory of its own: the plan counts it so.
            made = layout.empty().zero_() if gradient is None else gradient
            value = layout.laid_out(made.clone() if storage_id(made) in seen else made)
            values.append(value if gradient is not None else undefined_gradient(value))
            seen.add(storage_id(made))
        return values


def _refuse(_: Tensor) -> None:
    """Raises where a backward other than that of the run has come to one of its inputs."""
    msg = (
        "a value within an untraced submodule reaches the loss by a hook or an attribute, so that "
        "what is before the submodule would miss its gradient. Return the value from the "
        'submodule, or keep the budget without a plan: mode="frames".'
    )
    raise BackwardError(msg)


# --- memory of a run ------------------------------------------------------------------------------


class HeldMemory:
    """The storages of some tensors, which are not kept alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.keys = storage_keys(tensors)
        storages = {storage_id(tensor): tensor.untyped_storage() for tensor in tensors}
        self.num_bytes = {key: each.nbytes() for key, each in storages.items()}
        self._references = {key: StorageWeakRef(each) for key, each in storages.items()}

    def held(self) -> set[int]:
        """Those that something still holds."""
        if not all(reference.expired() for reference in self._references.values()):
            gc.collect()  # it may be a cycle of what the run has left behind
        return {key for key, reference in self._references.items() if not reference.expired()}


@dataclass(slots=True)
class SavedStorages:
    """What an autograd graph saves: the storages with their bytes, and how many tensors."""

    num_bytes: dict[int, int] = field(default_factory=dict)
    count: int = 0

    @property
    def keys(self) -> set[int]:
        """What tells the storages apart."""
        return set(self.num_bytes)

    def note(self, tensor: Tensor) -> None:
        """Adds a tensor that is saved."""
        self.count += 1
        self.num_bytes[storage_id(tensor)] = tensor.untyped_storage().nbytes()


def storage_keys(tensors: Iterable[Tensor]) -> list[int]:
    """What tells the tensors' storages apart while they are alive."""
    return [storage_id(tensor) for tensor in tensors]
