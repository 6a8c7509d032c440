"""Settings of PyTorch that decide what ops a forward runs, and that a script may change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.backends import cuda

from rockmate._torch.autocast import autocast_as, autocast_dtypes

_C: Any = torch._C
_SWITCHES: Sequence[tuple[str, Callable[[], Any], Callable[[Any], object]]] = (
    ("autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    (
        "torch.get_deterministic_debug_mode()",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    ("attention by flash kernels", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (
        "attention by memory-efficient kernels",
        cuda.mem_efficient_sdp_enabled,
        cuda.enable_mem_efficient_sdp,
    ),
    ("attention by plain ops", cuda.math_sdp_enabled, cuda.enable_math_sdp),
    ("attention by cuDNN", cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (
        "the order of attention's kernels",
        lambda: tuple(_C._get_sdp_priority_order()),
        lambda order: _C._set_sdp_priority_order([*order]),
    ),
    ("torch.backends.cudnn.enabled", _C._get_cudnn_enabled, _C._set_cudnn_enabled),
    ("torch.backends.mkldnn.enabled", _C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
)
"""What a difference calls each, and how it is read and set.

The public ways to the last ones refuse to set where a script has frozen its flags; there is none
to the order, which `sdpa_kernel(..., set_priority=True)` sets.
"""
_READ = tuple(read for _, read, _ in _SWITCHES)


class Settings(NamedTuple):
    """The settings at one time.

    Attributes:
        autocast: kind of device and dtype, for each kind on which autocast is on.
        switches: values of the others.
    """

    autocast: tuple[tuple[str, torch.dtype], ...]
    switches: tuple[Any, ...]

    @classmethod
    def now(cls) -> Settings:
        """The present settings."""
        return cls(tuple(autocast_dtypes().items()), tuple([read() for read in _READ]))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Has these settings for the duration."""
        with autocast_as(dict(self.autocast)):
            before = Settings.now().switches
            _put(before, self.switches)
            try:
                yield
            finally:
                _put(self.switches, before)

    def difference(self, now: Settings) -> str:
        """What is another setting now, in words; empty if none is."""
        names = ("autocast", *(name for name, *_ in _SWITCHES))
        pairs = zip((self.autocast, *self.switches), (now.autocast, *now.switches), strict=True)
        texts = (
            f"{name} was {one or 'off'} and is {other or 'off'}"
            for name, (one, other) in zip(names, pairs, strict=True)
            if one != other
        )
        return next(texts, "")


def _put(before: Sequence[Any], after: Sequence[Any]) -> None:
    for (_, _, put), old, new in zip(_SWITCHES, before, after, strict=True):
        if old != new:
            put(new)
