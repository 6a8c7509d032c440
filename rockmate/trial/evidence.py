"""What the first steps of a plan take, held against what it promises.

Allocations of the second forward and backward are recorded; on a GPU, of the first whose peak is
above all before. New gradients do not count, nor does what the script allocates between the two, as
in budgets. The steps after it are timed. Then one line of the log says what was found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch

from rockmate._torch.allocator import Recording
from rockmate._torch.engine import is_profiling, profiler_label
from rockmate._torch.fake import is_fake
from rockmate.budget import size_text
from rockmate.offload.tier import Pending
from rockmate.runtime.autograd import Runner, may_be_needed_early
from rockmate.runtime.program import PlannedCall
from rockmate.schedule.simulate import simulate

logger = logging.getLogger(__name__)

_NUM_STEPS, _NUM_WARM, _TOLERANCE = 5, 2, 1.01
_SLOW = 1.2  # times of copies over the described ones that are told


class Evidence:
    """Of one plan. Where a step cannot be recorded, the next one is in its place.

    Attributes:
        peak_bytes: of a recorded step; 0 before.
        tangent_bytes: of the gradients that the last backward was given.
    """

    def __init__(self, planned: PlannedCall, *, is_first: bool = False) -> None:
        """Nothing has run; of the first plan of a module, the line is a warning, which is shown."""
        self._is_first = is_first
        self._planned, self._device = planned, planned.plan.graph.ops[0].device
        self._is_over = self._can_record = self._is_known = False
        self._seconds: list[float] = []  # of each step, from the first
        self._forward_s, self._forward_peak_bytes, self._saved_bytes = 0.0, 0, 0
        self.tangent_bytes = self.peak_bytes = self._untold_bytes = 0
        self._copies: list[tuple[int, Pending]] = []  # of the steps that are timed

    def begin(self, runner: Runner, inputs: Sequence[torch.Tensor]) -> None:
        """Before a forward, which `runner` runs with these inputs."""
        if any(map(is_fake, inputs)) or (
            self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):
            self._is_over = True
        runner.around = profiler_label if self._is_over else self._around
        is_timed = len(self._seconds) >= _NUM_WARM and not self._is_over
        runner.arguments.copies = self._copies if is_timed else None
        # Hooks of parameters allocate for themselves, and free gradients.
        self._can_record = (
            (len(self._seconds) > 0 or self._device.type == "cuda")
            and not self.peak_bytes
            and not (self._is_over or runner.held)
            and self._planned.program.num_in_flight == 1
            and not may_be_needed_early(runner.owners.now().values())
        )

    def take_excess(self) -> int:
        """Bytes that a step has taken beyond the promise, 0 within 1 % of it; only once."""
        peak_bytes, self._untold_bytes = self._untold_bytes, 0
        promised_bytes = self._planned.plan.predicted_peak_bytes
        return peak_bytes - promised_bytes if peak_bytes > _TOLERANCE * promised_bytes else 0

    @contextmanager
    def _around(self, name: str) -> Iterator[None]:
        is_forward, is_watched = name == "rockmate::forward", is_profiling()
        is_recorded = self._can_record and not (is_watched or Recording.is_under_way())
        self._can_record = is_forward and is_recorded
        with profiler_label(name):
            recording = Recording(self._device, leaves_out=True) if is_recorded else None
            begin_s = self._now_s()
            try:
                yield
                seconds = self._now_s() - begin_s
            finally:
                end = recording.mark() if recording else 0
                stretches = recording.stop() if recording else []
        peak_bytes = max((each.peak_bytes for each in stretches[:end]), default=0)
        if is_forward:
            self._forward_s, self._forward_peak_bytes = seconds, peak_bytes
            self._saved_bytes = stretches[end].begin_bytes if stretches else 0
            self._is_known = recording is not None and recording.is_known
            return
        self._seconds.append(self._forward_s + seconds)
        if recording and stretches and (self._is_known or recording.is_known):
            peak_bytes += self._saved_bytes + self.tangent_bytes
            self.peak_bytes = self._untold_bytes = max(self._forward_peak_bytes, peak_bytes)
        if len(self._seconds) == _NUM_STEPS:
            self._is_over = True
            self._tell()

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _tell(self) -> None:
        plan = self._planned.plan
        step_ms, baseline_ms = median(self._seconds[_NUM_WARM:]) * 1e3, plan.baseline_ms
        link_text = self._link_text()
        logger.log(
            logging.WARNING if link_text or self._is_first else logging.INFO,
            "the first steps of the plan: peak %s, predicted %s; forward and backward %.1f ms, "
            "predicted %.1f ms, which is %.2fx, predicted %.2fx, of %.1f ms, the predicted time "
            "without recomputation%s",
            size_text(self.peak_bytes) if self.peak_bytes else "not measured",
            size_text(plan.predicted_peak_bytes), step_ms, plan.predicted_ms,
            step_ms / baseline_ms, plan.predicted_ratio, baseline_ms, link_text,
        )  # fmt: skip

    def _link_text(self) -> str:
        """How much slower than described copies were, and its cost; empty if they were not."""
        plan, copies, self._copies = self._planned.plan, self._copies, []
        link = plan.costs.link
        if link is None or not copies:
            return ""
        described_ms = sum(link.in_ms(num_bytes) for num_bytes, _ in copies)
        ratio = sum(copy.took_ms() for _, copy in copies) / described_ms
        if ratio * link.duplex < _SLOW:
            return ""
        back, out = link.in_gb_per_s / ratio, link.out_gb_per_s / ratio
        slower = replace(link, in_gb_per_s=back, out_gb_per_s=out)
        slow_ms = simulate(plan.graph, plan.schedule, replace(plan.costs, link=slower)).time_ms
        return (
            f". The link is slower than described: copies take {ratio:.1f}x of their time, for "
            f"which {slow_ms:.1f} ms are predicted, {slow_ms - plan.predicted_ms:.1f} ms more"
        )
