"""What fusing a step has brought: groups, their times and bytes, and compile time."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.budget import size_text

COMPILE_LIMIT_S = 300.0
"""Default of the seconds that compiling the kernels of a step may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One distinct group of a step.

    Attributes:
        name: of its op in the plan.
        calls: names of the ops that it runs, in order.
        num_places: how often it stands in the step.
        fused_ms: time of its kernel, in milliseconds.
        separate_ms: time of its ops one by one.
        saved_bytes: bytes of the values inside, which are no longer in memory, in one place.
        num_in_place: number of its in-place forms.
        refusal: why its ops stay as they are; empty if it is fused.
    """

    name: str
    calls: tuple[str, ...]
    num_places: int
    fused_ms: float
    separate_ms: float
    saved_bytes: int
    num_in_place: int
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionReport:
    """The groups of a step.

    Attributes:
        groups: the distinct groups, those that save the most time first.
        compile_s: seconds that fusing took in this process, most of them in compilers.
    """

    groups: tuple[GroupReport, ...]
    compile_s: float

    @property
    def fused(self) -> list[GroupReport]:
        """The groups that run as one kernel."""
        return [group for group in self.groups if not group.refusal]

    @property
    def num_places(self) -> int:
        """The number of fused ops in the step."""
        return sum(group.num_places for group in self.fused)

    @property
    def num_kernels(self) -> int:
        """The number of distinct fused groups."""
        return len(self.fused)

    @property
    def saved_ms(self) -> float:
        """The time that the kernels save in a step in which each runs once per place."""
        return sum(each.num_places * (each.separate_ms - each.fused_ms) for each in self.fused)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all values inside of groups, which the step no longer makes."""
        return sum(group.num_places * group.saved_bytes for group in self.fused)

    def summary(self) -> str:
        """One line for a person."""
        refused = [group for group in self.groups if group.refusal]
        text = (
            f"{self.num_places} groups of ops run as {self.num_kernels} kernels, "
            f"{self.saved_ms:.1f} ms less a step; {size_text(self.saved_bytes)} of values inside "
            f"are never in memory; compiled in {self.compile_s:.1f} s"
        )
        if refused:
            text += f"; {sum(group.num_places for group in refused)} groups stay unfused"
        return text

    def __str__(self) -> str:
        lines = [self.summary()]
        for group in self.groups:
            how = group.refusal or (
                f"{group.fused_ms:.3f} ms for {group.separate_ms:.3f}, "
                f"{group.num_in_place} in place"
            )
            lines.append(f"  {group.num_places:4d} x {group.name}: {how}")
            lines.append(f"         {', '.join(group.calls)}")
        return "\n".join(lines)
