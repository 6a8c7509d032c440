"""The calls that steps consist of: what they save, touch outside, and what is decided for them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean

from torch import nn

from rockmate._torch.members import tensor_tables
from rockmate._torch.settings import Settings
from rockmate.frames.knapsack import Decision, KnownFrame, bound_s, decide
from rockmate.frames.needs import FrameKey, StepNeeds

_REMEMBERED_STEPS = 16
_SHARES = 16
"""Shares of steps are rounded to one of so many, so that not each step is decided for anew."""
_MOST_DECISIONS, _DECIDED_EVERY = 64, 16
"""Where so many decisions were taken, another one is taken in one of so many steps."""
_SIZES_PER_UNIT = 16
"""Steps smaller than the recorded one are decided for as if they were of the next larger of so many
sizes."""


def state_of(modules: Sequence[nn.Module]) -> tuple[Hashable, ...]:
    """What decides, beside inputs, which tensors calls save.

    Which modules are in training mode, which parameters are trained, in how many bytes each, and
    settings of PyTorch.
    """
    parameters = [p for each in modules for p in tensor_tables(each)[0].values()]
    modes = tuple([each.training for each in modules])
    trained = tuple([p is not None and (p.requires_grad, p.element_size()) for p in parameters])
    return modes, trained, Settings.now()


class CallHistory:
    """Calls of the last steps.

    Where steps have other calls, all that the last ones had are taken for one step, and those that
    not all of them had count by the share of these steps in which one of them comes.

    Attributes:
        present: calls of the present step so far.
        kinds: classes of submodules whose calls were frames, by their paths.
    """

    def __init__(self) -> None:
        self.present, self.kinds = list[FrameKey](), dict[str, type]()
        self._steps: deque[frozenset[FrameKey]] = deque(maxlen=_REMEMBERED_STEPS)
        self._state: object = None
        # Bytes that calls of a path save, by the sizes of their inputs; None if they vary.
        self._saved: dict[tuple[FrameKey, Hashable], int | None] = {}
        self._decisions: dict[Hashable, Decision] = {}
        self._last: Decision = {}
        self._num_steps = self._num_decisions = 0

    def begin_step(self, state: object) -> None:
        """Takes the calls of the step before; forgets what they save if the state is another."""
        if self.present:
            self._steps.append(frozenset(self.present))
        self.present = []
        self._num_steps += 1
        if state != self._state:
            self._state = state
            self._saved.clear()

    def alike(self, path: str) -> str:
        """The option that leaves the submodule of a path whole, and others of its class."""
        return f"keep={[each for each, kind in self.kinds.items() if kind is self.kinds[path]]!r}"

    def shares(self) -> dict[FrameKey, float]:
        """For the calls of the last steps, the share of these in which they count as coming."""
        counts = Counter(chain.from_iterable(self._steps))
        num_steps = len(self._steps)
        varying = [number for number in counts.values() if number < num_steps]
        share = mean(varying or [0]) / max(1, num_steps)
        share = max(1, round(_SHARES * share)) / _SHARES
        return {key: share if number < num_steps else 1.0 for key, number in counts.items()}

    def bound_s(self, needs: StepNeeds, budget_bytes: int) -> float | None:
        """Lower bound on the recompute time of this step, in seconds."""
        return bound_s(_frames(needs, dict.fromkeys(self.present, 1.0)), budget_bytes)

    def note_saved(self, key: FrameKey, sizes: Hashable, num_bytes: int) -> None:
        """What a call has saved."""
        known = self._saved.setdefault((key, sizes), num_bytes)
        if known != num_bytes:
            self._saved[key, sizes] = None

    def saved_bytes(self, key: FrameKey, sizes: Hashable) -> int | None:
        """What a call saves, if it always was the same; None if it varies or is not known."""
        return self._saved.get((key, sizes))

    def decision(self, needs: StepNeeds, budget_bytes: int, scale: float) -> Decision:
        """What is decided for the known calls.

        Steps that all have other calls or sizes would be decided for anew each time, which takes
        longer than some steps. There the last decision stays for a while, and what does not fit is
        dropped when it comes to that.

        Args:
            needs: of a recorded step.
            budget_bytes: for this step.
            scale: its size relative to the recorded one.
        """
        size = max(1, math.ceil(scale * _SIZES_PER_UNIT))
        shares = self.shares()
        known = (needs.minimum_bytes, needs.schedules_number, frozenset(shares.items()))
        question = (budget_bytes, size, self._state, *known)
        is_free = self._num_decisions < _MOST_DECISIONS
        if question in self._decisions:
            return self._decisions[question]
        if is_free or self._num_steps % _DECIDED_EVERY == 0:
            self._num_decisions += 1
            found = decide(_frames(needs, shares), budget_bytes * _SIZES_PER_UNIT // size)
            self._last = self._decisions[question] = found or {}
            while len(self._decisions) > _MOST_DECISIONS:
                del self._decisions[next(iter(self._decisions))]
        return self._last

    def forget(self) -> None:
        """Other calls will be frames."""
        self.present, self._last = [], {}
        self._steps.clear()
        self._decisions.clear()


@dataclass(slots=True)
class Outside:
    """What calls of one model were seen to read and write outside of their own tensors.

    Attributes:
        changing_buffers: by path and modes of modules, the buffers that forwards change: position
            of the module, and name.
        draws_foreign: whether the model draws random numbers of Python's or NumPy's, as far as is
            known (None before its first forward): to look takes a tenth of a millisecond.
        has_collectives: whether a forward of the model has run one.
        has_compiled_modules: whether the model has some.
        writing: paths of frames that were seen to write outside of their modules.
        num_items: that forwards have taken of iterators, in measured steps.
        taking: paths of frames that take some.
    """

    changing_buffers: dict[Hashable, set[tuple[int, str]]] = field(default_factory=dict)
    draws_foreign: bool | None = None
    has_collectives: bool = False
    has_compiled_modules: bool = False
    writing: set[str] = field(default_factory=set)
    num_items: int = 0
    taking: set[str] = field(default_factory=set)


def _frames(needs: StepNeeds, shares: Mapping[FrameKey, float]) -> list[KnownFrame]:
    return [
        KnownFrame(key, of.after_bytes, of.options, shares[key])
        for key, of in needs.by_key.items()
        if key in shares
    ]
