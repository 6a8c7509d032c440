"""What frames promise and did, in lines and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rockmate.budget import size_text
from rockmate.frames.memory import Memory
from rockmate.frames.step_log import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRow:
    """One frame of the last call.

    Attributes:
        name: path of the submodule, and the number of its call if it is not the first.
        saved_bytes: that autograd saves in it, in the measured step or in one of its path.
        seconds: recompute time.
        dropped: what the last call dropped of it, in words.
    """

    name: str
    saved_bytes: int
    seconds: float
    dropped: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FramesReport:
    """The last call of a module in frames.

    Attributes:
        budget_bytes: most live bytes of the step.
        minimum_bytes: peak of a step that holds nothing, the smallest that works.
        baseline_bytes: peak of a step that drops nothing.
        peak_bytes: largest sum of what frames held and what was measured beside it, in this call.
        counts: what happened to frames.
        decided_s: recompute time of what was decided ahead; None if nothing was.
        bound_s: no decision within the budget takes less, by the measured times; None if unknown.
        rows: frames, in the order of their forwards.
    """

    budget_bytes: int
    minimum_bytes: int
    baseline_bytes: int
    peak_bytes: int
    counts: Counts
    decided_s: float | None
    bound_s: float | None
    rows: Sequence[FrameRow]

    def line(self) -> str:
        """All in one line."""
        counts = self.counts
        return (
            f"frames: budget {size_text(self.budget_bytes)}, smallest peak "
            f"{size_text(self.minimum_bytes)}, {size_text(self.baseline_bytes)} if nothing is "
            f"dropped; of {counts.num_frames} frames {counts.num_dropped} dropped something, which "
            f"ran twice in {counts.recomputed_s:.3f} s"
        )

    def summary(self) -> str:
        """A line for each thing worth knowing."""
        counts, baseline = self.counts, size_text(self.baseline_bytes)
        share = f"{self.peak_bytes / max(1, self.baseline_bytes):.1%}"
        lines = {
            "activation budget": size_text(self.budget_bytes),
            "predicted peak": (
                f"{size_text(self.peak_bytes)}  ({share} of {baseline} if nothing is dropped)"
            ),
            "smallest peak": size_text(self.minimum_bytes),
            "frames": (
                f"{counts.num_frames}; {counts.num_dropped} dropped something, "
                f"{counts.num_planned} ran as planned, {counts.num_kept} as in eager without hooks"
            ),
            "recomputed": (
                f"{counts.num_recomputed} forwards, in {1e3 * counts.recomputed_s:.1f} ms"
            ),
        }
        if self.decided_s is not None:
            lines["decided ahead"] = f"{1e3 * self.decided_s:.1f} ms by the measured times"
        if self.bound_s is not None:
            lines["lower bound"] = f"{1e3 * self.bound_s:.1f} ms, by the same times and options"
        return "\n".join(f"{title:<19} {text}" for title, text in lines.items())

    def table(self) -> str:
        """A row for each frame."""
        rows = [("frame", "saves", "forward", "drops")]
        rows += [
            (each.name, size_text(each.saved_bytes), f"{1e3 * each.seconds:.2f} ms", each.dropped)
            for each in self.rows
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{name:<{widths[0]}}  {saves:>{widths[1]}}  {time:>{widths[2]}}  {what}"
            for name, saves, time, what in rows
        )


def report_of(memory: Memory) -> FramesReport | None:
    """What the last call did; None until the first step is measured."""
    needs = memory.needs
    if needs is None or memory.budget_bytes is None:
        return None
    present, decision = memory.calls.present, memory.room.decision
    rows = [
        FrameRow(
            name=str(key) if key.number else key.path,
            saved_bytes=needs.of(key).saved_bytes,
            seconds=needs.of(key).seconds,
            dropped=memory.log.dropped.get(key, "nothing"),
        )
        for key in present
    ]
    decided_s = sum(decision[key].seconds for key in present if key in decision)
    has_bound = decision and memory.room.scale == 1
    return FramesReport(
        budget_bytes=memory.budget_bytes,
        minimum_bytes=needs.minimum_bytes,
        baseline_bytes=needs.baseline_bytes,
        peak_bytes=memory.log.peak_bytes,
        counts=replace(memory.log.counts),
        decided_s=decided_s if decision else None,
        bound_s=memory.calls.bound_s(needs, memory.budget_bytes) if has_bound else None,
        rows=rows,
    )
