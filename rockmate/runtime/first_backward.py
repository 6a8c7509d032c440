"""Whether a script wants gradients that no plan gives, as first steps in frames show.

Those are gradients that it differentiates (create_graph=True), gradients of parameters that
autograd returns, and those that autocast rounds. Once a planned backward runs it is too late for
frames. Scripts that want them have inputs that require gradients, or say so in their text.
"""

from __future__ import annotations

import linecache
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.engine import call_before_backward, returns_gradients_of
from rockmate._util import is_users
from rockmate.capture.structure import Structure
from rockmate.errors import InfeasibleBudgetError, TrialError
from rockmate.state.opened_object import tensors_within

logger = logging.getLogger(__name__)
_WISH = r"create_graph|autograd(\.grad\b| import grad\b)"
_NAME = re.compile(r"(?<!class )'(\w+)'")  # in the text of a structure
_NO_NAMES = {"loss", "item", "attribute"}
OF_OUTPUTS = "the script names outputs beside the loss, and the first step shows if it uses them"
OTHERS = tuple(str(Path(code.__file__ or "").parent) for code in (torch, sys.modules["rockmate"]))


class FirstBackward:
    """The first step of each kind of inputs that require gradients, and autocast. Frames run it.

    Attributes:
        frames: those that have run one; None before.
    """

    def __init__(self, model: nn.Module, make_frames: Callable[[], Any]) -> None:
        self._model, self._make_frames, self.frames = model, make_frames, None
        self._is_over = self._is_wanted = False
        self._kind, self._known = (), dict[tuple[Any, ...], torch.dtype | None]()

    def is_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call begins a step of a kind that has had no backward."""
        given = [each for each in tensors_within((args, kwargs)) if each.requires_grad]
        casts = bool(dtypes := autocast_dtypes())
        self._kind = (*dtypes.items(), *(each.is_leaf for each in given))
        is_new = not self._is_over and self._kind not in self._known
        return is_new and (bool(given) or self._is_written or (casts and self._sets_autocast))

    @cached_property
    def _is_written(self) -> bool:
        return _is_in(_WISH, _callers())

    @cached_property
    def _sets_autocast(self) -> bool:
        return _is_in("autocast", _users_files())

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of that call. Where frames refuse it, a plan may do."""
        self.frames, note = self.frames or self._make_frames(), partial(self._note, self._kind)
        try:
            output = self.frames.run(args, kwargs)
        except (InfeasibleBudgetError, TrialError):
            self._is_over = True
            raise
        call_before_backward(tensors_within(output), note)
        return output

    def begin_plain(self) -> int:
        """As that of frames."""
        return 0 if self.frames is None else self.frames.begin_plain()

    def _note(self, kind: tuple[Any, ...], _: Any) -> None:
        devices = {each.device.type for each in self._model.parameters()}
        dtypes = (dtype for device, dtype in autocast_dtypes().items() if device in devices)
        self._known[kind] = next(dtypes, None)
        returns = returns_gradients_of(self._model.parameters())
        self._is_wanted |= returns or torch.is_grad_enabled()

    @property
    def casts_to(self) -> torch.dtype | None:
        """What autocast casts to in the backward of this kind of step."""
        return self._known.get(self._kind)

    def chosen_frames(self) -> Any:
        """The frames, if a step has had gradients that no plan gives; else None."""
        if self.frames is not None:
            self.frames.end_recording()
        if self._is_wanted:
            text = "a plan has no second derivative and returns no gradient of a parameter"
            logger.warning("the budget is kept by frames: %s", text)
        return self.frames if self._is_wanted else None


def names_outputs(structure: Structure) -> bool:
    """Whether the script has names of an output's parts beside the loss; a tuple has none."""
    names = set(_NAME.findall(repr(structure))) - _NO_NAMES
    pattern = rf"\b({'|'.join(names)}|to_tuple|values)\b"
    return not names or _is_in(pattern, {*_callers(), *_users_files()})


def _callers() -> set[str]:
    """The files whose code calls the model, libraries' among them."""
    files = {frame.f_code.co_filename for frame, _ in walk_stack(None)}
    return {each for each in files if not each.startswith(OTHERS)}


def _users_files() -> set[str]:
    """The files of all modules of the script: one has the loss, or the autocast."""
    modules = [getattr(each, "__dict__", {}) for each in sys.modules.values()]  # some are lazy
    files = {str(each.get("__file__")) for each in modules}
    return set(filter(is_users, files | _callers()))


def _is_in(pattern: str, files: Iterable[str]) -> bool:
    return any(re.search(pattern, line) for each in files for line in linecache.getlines(each))
