"""The link to another memory tier: what a copy of so many bytes takes, alone and beside others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Rates of copies between the device's memory and another tier.

    Attributes:
        out_gb_per_s: of a copy out, in 1e9 bytes a second.
        in_gb_per_s: of a copy back.
        latency_ms: of each copy, beside its bytes.
        duplex: share of its rate that each direction keeps while both copy.
        has_one_lane: whether copies of both directions wait for each other, in one queue.
        slowdown: factor by which ops take longer while something is copied.
    """

    out_gb_per_s: float
    in_gb_per_s: float
    latency_ms: float
    duplex: float = 1.0
    has_one_lane: bool = False
    slowdown: float = 1.0

    def out_ms(self, num_bytes: int) -> float:
        """Time of a copy out by itself."""
        return self.latency_ms + num_bytes / (self.out_gb_per_s * 1e6)

    def in_ms(self, num_bytes: int) -> float:
        """Time of a copy back by itself."""
        return self.latency_ms + num_bytes / (self.in_gb_per_s * 1e6)
