"""The tiers of each model, one for each request, for all of its plans."""

from __future__ import annotations

import weakref

from torch import nn

from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.offload.request import OffloadRequest
from rockmate.offload.tier import Tier

_OF_MODEL: weakref.WeakKeyDictionary[nn.Module, dict[OffloadRequest, Tier]]
_OF_MODEL = weakref.WeakKeyDictionary()


def tier_of(model: nn.Module, request: OffloadRequest) -> Tier:
    """The tier that a model's steps move values to."""
    tiers = _OF_MODEL.setdefault(model, {})
    if request not in tiers:
        tiers[request] = _new_tier(request)
    return tiers[request]


def forget_tiers(model: nn.Module) -> None:
    """Has a model's next step make its tiers anew; those of pending steps end with them."""
    _OF_MODEL.pop(model, None)


def _new_tier(request: OffloadRequest) -> Tier:
    if request.kind == "disk":
        return DiskTier(request.folder, request.host_bytes)
    return PinnedTier(request.host_bytes)
