"""A part of a frame: the call of a submodule within it, which can run again by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rockmate._torch.pytree import tree_leaves
from rockmate._torch.storage import StorageWeakRef, storage_id, version_of
from rockmate.frames.call import Call
from rockmate.frames.menu import PartKey, PartProfile
from rockmate.frames.saved import Saved
from rockmate.frames.views import View


class Result(NamedTuple):
    """A result of a part, while later tensors of the frame are saved.

    Attributes:
        part: whose result.
        leaf: position among the results.
        view: of the result.
        version: number of in-place writes at the end of the part.
        reference: keeps the storage's number from being given to another one.
    """

    part: Part
    leaf: int
    view: View
    version: int
    reference: StorageWeakRef

    def has_in_its_storage(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the same storage is as the part has left it, and a plain view."""
        return (
            type(tensor) is torch.Tensor
            and version_of(tensor) == self.version
            and tensor.dtype == self.view.dtype
            and not (tensor.is_conj() or tensor.is_neg())
        )


class SavedResult(NamedTuple):
    """A saved tensor that lies in the storage of a result."""

    slot: int
    leaf: int
    result: View
    view: View


class Part:
    """What a submodule's call within a frame saves, and those of its results that are saved.

    Attributes:
        key: which call.
        profile: its times, storages and slots.
        call: None if it is only measured, cannot run again, or its inputs are given up.
        results: saved tensors that are results.
        is_dropped: whether its tensors are given up.
    """

    def __init__(
        self, key: PartKey, begin_slot: int, profile: PartProfile, call: Call | None
    ) -> None:
        self.key, self.begin_slot, self.profile, self.call = key, begin_slot, profile, call
        self.results: list[SavedResult] = []
        self.is_dropped = False

    def note(self, slot: int, keys: Sequence[int]) -> None:
        """A tensor is saved while the part runs."""
        if not self.profile.inputs.issuperset(keys):
            self.profile.slots.append(slot)

    def note_result(self, slot: int, tensor: torch.Tensor, result: Result) -> None:
        """A tensor that is a result, or a view of it, is saved after the part has run."""
        self.results.append(SavedResult(slot, result.leaf, result.view, View.of(tensor)))
        self.profile.result_slots.append(slot)

    def end(self, output: Any, seconds: float) -> dict[int, Result]:
        """Ends the first run; its results by their storages."""
        self.profile.end_s = seconds
        if self.call is not None:
            self.call.end()
            if self.call.cannot_repeat:
                self.call = None
        return {
            storage_id(tensor): Result(
                self, leaf, View.of(tensor), version_of(tensor),
                StorageWeakRef(tensor.untyped_storage()),
            )
            for leaf, tensor in enumerate(tree_leaves(output))
            if type(tensor) is torch.Tensor and storage_id(tensor) not in self.profile.inputs
        }  # fmt: skip

    def results_again(self, output: Any) -> dict[int, Saved]:
        """Of a second run: its results that fill slots.

        Raises:
            UnsupportedModelError: they lie otherwise than those of the first.
        """
        leaves, made = tree_leaves(output), dict[int, Saved]()
        for each in self.results:
            found = leaves[each.leaf].detach()
            if (found.shape, found.stride()) != (each.result.shape, each.result.stride):
                assert self.call is not None
                raise self.call.not_repeated(str(list(each.result.shape)), str(list(found.shape)))
            shift = found.storage_offset() - each.result.offset
            view = found.as_strided(each.view.shape, each.view.stride, each.view.offset + shift)
            made[each.slot] = Saved.of(view)
        return made

    @property
    def slots(self) -> set[int]:
        """Positions of all tensors that the part can make again."""
        return self.profile.all_slots

    @property
    def can_run(self) -> bool:
        """Whether the call can run again."""
        return self.call is not None and not self.call.has_changed_inputs()
