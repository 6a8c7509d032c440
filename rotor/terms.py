"""The numbers of the recurrence as arrays, from a chain: bytes as they are, times in ticks.

Symbols: see ``solve.py``. A tick is a power of two of a millisecond, so small that every sum of
    times
is a whole number of ticks below 2**53. Sums are then exact in any order, and plans of equal time
tie.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from rotor.chain import Chain, Option, Stage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Terms:
    """The numbers of the recurrence.

    Attributes:
        num_stages: Number of stages of the chain.
        tick_ms: Milliseconds of one tick.
        input: ``x_s``, by stage.
        left_behind: ``G_t``, by stage.
        at_rest: ``d_t + G_t``, by stage.
        spans: By first stage: (last stage, options), short spans first.
        cost: Ticks of option i of the spans that begin at stage s, at [s, i]; infinite beyond the
            last.
        last: Last stage of that option's span.
        saved: Bytes that the option saves.
        forward_peak: Its forward's peak.
        backward_peak: Its backward's peak, ``G_e`` included.
        rerun: Ticks of running stages s to j-1 forward-only, at [s, j - 1].
        rerun_peak: Peak of that beside ``x_s``.
    """

    def __init__(self, chain: Chain) -> None:
        """Lay the numbers out."""
        stages = chain.stages
        self.num_stages = len(stages)
        self.input: Ints = np.array([stage.input_bytes for stage in stages], np.int64)
        gradients = [stage.parameter_gradient_bytes for stage in stages]
        self.left_behind: list[int] = [sum(gradients[t + 1 :]) for t in range(self.num_stages)]
        self.at_rest: Ints = np.array(
            [
                stage.output_gradient_bytes + left
                for stage, left in zip(stages, self.left_behind, strict=True)
            ],
            np.int64,
        )
        self.spans: list[list[tuple[int, tuple[Option, ...]]]] = [[] for _ in stages]
        for (first, last), options in sorted(chain.spans.items()):
            self.spans[first].append((last, options))
        self.tick_ms = self._tick_ms(stages)
        self._set_options()
        self._set_reruns(stages)

    def ticks(self, time_ms: float) -> float:
        """Return a time as a whole number of ticks."""
        return float(round(time_ms / self.tick_ms))

    def cost_of(self, option: Option) -> float:
        """Return the time of an option's forward and backward in ticks."""
        return self.ticks(option.forward_ms + option.backward_ms)

    def _tick_ms(self, stages: tuple[Stage, ...]) -> float:
        """Return the tick: a bound on every plan's time takes at most 2**52 of them."""
        slowest = [
            max(o.forward_ms + o.backward_ms for _, options in at for o in options)
            for at in self.spans
        ]
        # No plan runs a stage forward more than num_stages times.
        bound_ms = sum(slowest) + self.num_stages * sum(stage.forward_ms for stage in stages)
        return math.ldexp(1.0, max(math.frexp(bound_ms)[1] - 52, -1022))

    def _set_options(self) -> None:
        """Lay out the options of all spans from stage ``s`` in row ``s``, short spans first."""
        rows = [[(e, option) for e, options in at for option in options] for at in self.spans]
        shape = (self.num_stages, max(map(len, rows)))
        self.cost: Floats = np.full(shape, np.inf)
        self.last: Ints = np.repeat(np.arange(shape[0])[:, None], shape[1], axis=1)
        self.saved: Ints = np.zeros(shape, np.int64)
        self.forward_peak: Ints = np.zeros(shape, np.int64)
        self.backward_peak: Ints = np.zeros(shape, np.int64)
        for s, row in enumerate(rows):
            for i, (e, option) in enumerate(row):
                self.cost[s, i], self.last[s, i] = self.cost_of(option), e
                self.saved[s, i] = option.saved_bytes
                self.forward_peak[s, i] = option.forward_peak_bytes
                self.backward_peak[s, i] = option.backward_peak_bytes + self.left_behind[e]

    def _set_reruns(self, stages: tuple[Stage, ...]) -> None:
        """Sum up the forward-only runs of every range of stages."""
        shape = (self.num_stages, self.num_stages)
        forward = [self.ticks(stage.forward_ms) for stage in stages]
        self.rerun: Floats = np.zeros(shape, np.float64)
        self.rerun_peak: Ints = np.zeros(shape, np.int64)
        for s in range(self.num_stages):
            peaks = [
                stages[k].forward_peak_bytes + (int(self.input[k]) if k > s else 0)
                for k in range(s, self.num_stages)
            ]
            self.rerun[s, s:] = list(accumulate(forward[s:]))
            self.rerun_peak[s, s:] = list(accumulate(peaks, max))
