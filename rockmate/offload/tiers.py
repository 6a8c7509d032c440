"""The tiers that a model's steps move values to, one for each request."""

from __future__ import annotations

import weakref

from torch import nn

from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.pinned_tier import PinnedTier
from rockmate.schedule.offload_request import OffloadRequest

OF_MODEL: weakref.WeakKeyDictionary[nn.Module, dict[OffloadRequest, DiskTier | PinnedTier]]
OF_MODEL = weakref.WeakKeyDictionary()


def tier_of(model: nn.Module, request: OffloadRequest) -> DiskTier | PinnedTier:
    """The tier that a model's steps move values to."""
    tiers = OF_MODEL.setdefault(model, {})
    if request not in tiers:
        folder, host_bytes = request.folder, request.host_bytes
        is_disk = request.kind == "disk"
        tiers[request] = DiskTier(folder, host_bytes) if is_disk else PinnedTier(host_bytes)
    return tiers[request]
