"""Steps of frames that are held against eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rockmate._torch.allocator import net_allocated
from rockmate._torch.autocast import autocast_uncached
from rockmate.frames.memory import Memory
from rockmate.state.call_state import CallState
from rockmate.state.random_state import random_state_kept
from rockmate.trial.conditions import Conditions
from rockmate.trial.run import run_beside_eager
from rockmate.trial.steps import TrialOption, TrialSteps

logger = logging.getLogger(__name__)


_Given = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments and keywords of a call."""


class FrameTrials:
    """Which steps of frames are trials, and what each keeps.

    A step that is measured is none, as its budget is not known yet, nor one with collectives, which
    ranks would try at times of their own, nor one that begins before the backward of another. The
    next one is in its place. The first step in which captured insides run is one, too. A call that
    goes on with the step of another method is tried in a step that has room beside what the frames
    of the others hold.

    The plain forward, which saves nothing, holds less than the smallest peak of frames: that is
    outside of frames all that is saved, and of one frame forward and backward.
    """

    def __init__(
        self, option: TrialOption, model: nn.Module, memory: Memory, *, is_joined: bool = False
    ) -> None:
        """None has been made yet; `is_joined` ones are beside frames of the same step."""
        self._steps, self._is_joined = TrialSteps(option), is_joined
        self._model, self._memory = model, memory
        self._tried = {0}  # numbers of the schedules of steps
        self._tried_paths: tuple[list[str], bool] | None = None
        self._undropped = set[str]()  # paths of frames that some step could not drop

    def repeat(self) -> None:
        """Has the next steps tried again, those without schedules, too."""
        self._tried.clear()

    def run(self, call: _Given, ours: Callable[[], Any]) -> Any:
        """The output of a step of frames, held against eager if the step is a trial.

        Raises:
            TrialError: the step differs from eager.
        """
        memory = self._memory
        budget_bytes, needs = memory.budget_bytes, memory.needs
        if needs is None or budget_bytes is None or memory.measuring.recorder is not None:
            self._steps.is_next(can_run=False)
            return ours()
        room_bytes = max(0, budget_bytes - needs.outside_bytes - memory.held_bytes)
        each = needs.by_key.values()
        own_bytes = max((of.forward_bytes - of.before_forward_bytes for of in each), default=0)
        most_bytes, can_run = budget_bytes, not memory.held_bytes
        if self._is_joined:
            most_bytes, can_run = room_bytes, room_bytes > own_bytes
        can_run = can_run and memory.agreement is None and not memory.outside.has_collectives
        is_due = needs.schedules_number not in self._tried
        if not self._steps.is_next(can_run=can_run, is_due=is_due):
            return ours()
        self._tried.add(needs.schedules_number)
        conditions = Conditions(
            most_bytes=most_bytes,
            largest_bytes=own_bytes,
            has_backward=not self._is_joined,
            most_copied_bytes=room_bytes,
            is_exact=memory.device.type == "cpu" or torch.are_deterministic_algorithms_enabled(),
            what="the step in frames",
        )
        return run_beside_eager(self._model, *call, ours, conditions, self._steps)

    def have_tried(self, paths: list[str]) -> bool:
        """Whether it is known which of some frames cannot be dropped."""
        return self._tried_paths == (paths, True)

    def not_repeated(
        self, paths: list[str], call: _Given, ours: Callable[[], Any], undropped: set[str]
    ) -> tuple[set[str], set[str], int]:
        """Those of some frames that do not run again as in a first run, with a line.

        The step runs forward, then each frame once more, as in a backward. All of it is undone.
        If a step has left some `undropped` (else a first one may set up the model), those of this
        run are returned apart, with the bytes that are live at its end: what such frames hold, and
        what is outside of frames. Where it cannot run, those that an earlier step has left, too.
        For the other arguments, see `run`.
        """
        memory = self._memory
        known, num_bytes, found = (paths, bool(undropped)), 0, dict[str, str]()
        if known == self._tried_paths or memory.agreement is not None:
            return set(), set(), 0
        alone = undropped & self._undropped.intersection(paths)
        self._undropped |= undropped
        before = None if self._steps.option == "never" else CallState(self._model, *call)
        if before is None or before.has_iterators():
            return set(), _left_whole(alone), 0
        memory.log.tried = []
        try:
            with before.undone(), random_state_kept([memory.device]), autocast_uncached():
                if undropped:
                    num_bytes, output = net_allocated(ours, memory.device)
                else:
                    output = ours()  # it holds the frames
                for frame in reversed(memory.log.tried):
                    try:
                        frame.recompute()
                    except Exception as error:  # noqa: BLE001 - also the script's own
                        found.setdefault(frame.key.path, f"{error}")
                    frame.drop()
                del output
        except Exception:  # noqa: BLE001 - of the forward: the step itself raises, or takes items
            return set(), _left_whole(alone), 0
        finally:
            memory.log.tried = None
            memory.calls.forget()
            memory.in_flight.undo()
        within = memory.log.undropped.difference(found) if undropped else set[str]()
        _left_whole({*found, *within}, *list(found.values())[:1])
        if not within:
            self._tried_paths = [each for each in paths if each not in found], bool(undropped)
        return found.keys() - within, within, num_bytes


def _left_whole(paths: set[str], reason: str = "a forward cannot run again") -> set[str]:
    """Some frames, which a line tells of if there are any."""
    if paths:
        logger.warning("left whole, as by keep=%r, since %s", sorted(paths), reason)
    return paths
