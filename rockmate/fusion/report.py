"""What fusing a step has brought: groups, their times and bytes, and compile time."""

from __future__ import annotations

from dataclasses import dataclass


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
    def num_places(self) -> int:
        """The number of fused ops in the step."""
        return sum(group.num_places for group in self.groups if not group.refusal)

    @property
    def num_kernels(self) -> int:
        """The number of distinct fused groups."""
        return sum(not group.refusal for group in self.groups)

    @property
    def saved_ms(self) -> float:
        """The time that the kernels save in a step in which each runs once per place."""
        return sum(
            group.num_places * (group.separate_ms - group.fused_ms)
            for group in self.groups
            if not group.refusal
        )

    def summary(self) -> str:
        """One line for a person."""
        refused = [group for group in self.groups if group.refusal]
        text = (
            f"fused kernels: {self.num_places} groups of ops run as {self.num_kernels} kernels, "
            f"{self.saved_ms:.1f} ms less per step, compiled in {self.compile_s:.1f} s"
        )
        if refused:
            text += f"; {sum(group.num_places for group in refused)} groups stay unfused"
        return text

    def __str__(self) -> str:
        lines = [self.summary()]
        for group in self.groups:
            how = group.refusal or (
                f"{group.fused_ms:.3f} ms for {group.separate_ms:.3f}, {group.num_in_place} in place"
            )
            lines.append(f"  {group.num_places:4d} x {group.name}: {how}")
            lines.append(f"         {', '.join(group.calls)}")
        return "\n".join(lines)
