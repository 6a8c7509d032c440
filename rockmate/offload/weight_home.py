"""Homes of weights: where they are while a step does not read them.

A weight at home is still a tensor of the model, on its device: `state_dict`, `eval` calls and
`generate` find it whole, and a script may write to it.

- On the CPU it lies in a mapping of the file that steps read it from. What others read stands in
  the page cache, which the system takes back when it needs memory. Steps read the file past that
  cache (`disk_tier`). Files have no name: a process that is killed leaves none, and none can vanish
  or change under a step.
- On a GPU it lies in pinned memory of the host, which kernels reach by way of the link: others than
  planned steps read it at the link's rate.

A trained weight is updated where it lies, and `trained_home` has what belongs to it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn

from rockmate._torch.subclasses import is_wrapper
from rockmate.budget import size_text
from rockmate.capture.tensor_parts import inner_tensors
from rockmate.errors import InvalidArgumentError, OffloadError
from rockmate.offload.tier import Pending, Slab
from rockmate.offload.tiers import tier_of
from rockmate.offload.trained_home import Ground, keep_at
from rockmate.schedule.move import SLOT_ALIGNMENT
from rockmate.schedule.offload_request import OffloadRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Bytes of a home that a weight has to itself, and the tensor whose memory they are."""

    slab: Slab
    offset: int
    mapped: torch.Tensor

    def has(self, weight: torch.Tensor) -> bool:
        """Whether the weight lies here."""
        return weight.data_ptr() == self.mapped.data_ptr()

    def write(self, weight: torch.Tensor) -> None:
        """Copies a weight here, and puts it here."""
        source = weight.detach().reshape(-1).view(torch.uint8)
        if weight.device == self.mapped.device:
            self.slab.copy_out(self.offset, source).wait()
        else:
            self.slab.view(self.offset, weight.nbytes, weight.device).copy_(source)
        weight.data = self.mapped

    def fetch(self) -> tuple[torch.Tensor, Pending]:
        """Memory for the weight, to which a copy has begun."""
        device = self.mapped.device
        target = torch.empty(self.mapped.nbytes, dtype=torch.uint8, device=device)
        pending = self.slab.copy_in(self.offset, target)
        value = torch.empty(0, dtype=self.mapped.dtype, device=device)
        value.set_(target.untyped_storage(), 0, self.mapped.shape, self.mapped.stride())
        return value, pending


class WeightHomes:
    """The homes of one model's weights."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        # By the identity of the parameter, of which tied names have one.
        self._places: dict[int, _Place] = {}
        self._held: tuple[str, ...] | None = None
        self._grounds: dict[torch.device, Ground] = {}

    def hold(
        self,
        named: Mapping[str, torch.Tensor],
        request: OffloadRequest | None,
        device: torch.device | None = None,
    ) -> None:
        """Sends these weights home, and brings all others back to memory.

        One that a script has put elsewhere goes home again, with what it holds by then. They are
        of their own devices thereafter, or of `device`. Gradients and states of all trained ones
        are at home if the request says so.

        Raises:
            OffloadError: the home has no room, or a copy has failed; or trained weights are to be
                at home in a process group.
        """
        self._hold_trained(request, device)
        names, weights = tuple(named), {id(weight): weight for weight in named.values()}
        away = [w for w in weights.values() if not self._is_at_home(w)]
        if self._held == names and not away:
            return
        if self._held is not None and away and self._held == names:
            logger.info("%d weights were changed for others, which go home", len(away))
        missing = [weight for weight in away if not self._fits(weight)]
        if missing:
            assert request is not None
            self._make_places(missing, request, device)
        for weight in away:
            self._places[id(weight)].write(weight)
        for weight in named_weights(self._root(), with_trained=True).values():
            if id(weight) in self._places and id(weight) not in weights:
                place = self._places.pop(id(weight))
                if place.has(weight):
                    weight.data = place.mapped.clone()
        self._held = names

    def _hold_trained(self, request: OffloadRequest | None, device: torch.device | None) -> None:
        """Has what belongs to trained weights at home, or no longer."""
        if request is None or not request.with_trained:
            for weight in self._root().parameters() if self._grounds else ():
                keep_at(None, weight)
            return
        if distributed.is_available() and distributed.is_initialized():
            msg = "weights='all' is for one process, not for a process group. Use weights='auto'."
            raise OffloadError(msg)
        tier = tier_of(self._root(), replace(request, host_bytes=None))
        for weight in self._root().parameters():
            if weight.requires_grad and can_go_home(weight):
                own = device or weight.device
                if own not in self._grounds:
                    self._grounds[own] = Ground(tier, own)
                keep_at(self._grounds[own], weight)

    def fetch(self, weight: torch.Tensor) -> tuple[torch.Tensor, Pending | None]:
        """A weight in memory, once the copy that is returned with it has been waited for."""
        if self._is_at_home(weight):
            return self._places[id(weight)].fetch()
        return weight.detach().clone(), None

    def _is_at_home(self, weight: torch.Tensor) -> bool:
        place = self._places.get(id(weight))
        return place is not None and place.has(weight)

    def _fits(self, weight: torch.Tensor) -> bool:
        """Whether it has a place, for a tensor like this one."""
        place = self._places.get(id(weight))
        return place is not None and _like(place.mapped) == _like(weight)

    def _make_places(
        self, weights: Iterable[torch.Tensor], request: OffloadRequest, device: torch.device | None
    ) -> None:
        tier = tier_of(self._root(), replace(request, host_bytes=None))
        offsets, end = list[int](), 0
        for weight in weights:
            request.check_device(device or weight.device)
            offsets.append(end)
            end += -(-weight.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slab = tier.borrow(end)
        for weight, offset in zip(weights, offsets, strict=True):
            view = slab.view(offset, weight.nbytes, device or weight.device)
            self._places[id(weight)] = _Place(
                slab, offset, view.view(weight.dtype).view(weight.shape)
            )
        logger.info("%s of weights are at home in %s", size_text(end), request.text)

    def _root(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model


def _like(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device


_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, WeightHomes] = weakref.WeakKeyDictionary()


def homes_of(model: nn.Module) -> WeightHomes:
    """The homes of a model's weights, for all of its plans."""
    return _OF_MODEL.setdefault(model, WeightHomes(model))


def send_home(
    model: nn.Module,
    offload: str,
    device: torch.device | str = "cpu",
    *,
    with_trained: bool = False,
) -> None:
    """Sends the frozen weights of a model home, and all else of it to a device.

    So a model whose weights do not fit a GPU comes to it from the host: load it there, and call
    this in place of `model.to(device)`. Plans with `weights="auto"` then decide which weights stay
    on the device.

    Args:
        model: the model, with adapters and `requires_grad` as for training.
        offload: the home, as for `Planner`: "host" for a GPU, "disk:FOLDER" for the CPU.
        device: that computes.
        with_trained: sends trained weights home, too, for plans with `weights="all"`.

    Raises:
        InvalidArgumentError: `offload` has another form.
        OffloadError: it is no home for that device, or has no room; or weights are on the meta
            device.
    """
    request, target = OffloadRequest.parse(offload), torch.empty(0, device=device).device
    if request is None:
        raise InvalidArgumentError('offload is None; choose "host" or "disk:FOLDER"')
    request = replace(request, with_trained=with_trained)
    request.check_device(target)
    named = named_weights(model, with_trained=with_trained)
    weights = {name: each for name, each in named.items() if isinstance(each, nn.Parameter)}
    if missing := [name for name, weight in weights.items() if weight.is_meta]:
        msg = f"{missing[0]} is on the meta device. Load it: load_state_dict(..., assign=True)."
        raise OffloadError(msg)
    homes_of(model).hold(weights, request, target)
    model.to(target)


def has_homes(model: nn.Module) -> bool:
    """Whether weights of a model have been sent home."""
    return model in _OF_MODEL


def can_go_home(weight: torch.Tensor) -> bool:
    """Whether a weight may: a dense tensor of no own class, alone in its memory."""
    return (
        type(weight.data) is torch.Tensor
        and weight.numel() > 0
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and (weight.is_meta or weight.untyped_storage().nbytes() == weight.nbytes)
    )


def named_weights(model: nn.Module, *, with_trained: bool = False) -> Mapping[str, torch.Tensor]:
    """Path -> parameter that can go home, or tensor inside of one that wraps tensors.

    Tied ones stand under each of their names.
    """
    found: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        is_plain, is_shard = not is_wrapper(weight), hasattr(weight, "to_local")
        if not is_shard and (not weight.requires_grad or (with_trained and is_plain)):
            parts = {(): weight} if is_plain else inner_tensors(weight)
            found |= {".".join((name, *path)): each for path, each in parts.items()}
    return {path: each for path, each in found.items() if can_go_home(each)}
