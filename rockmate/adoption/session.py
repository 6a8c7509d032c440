"""One run of a script whose models train inside a budget, although it does not say so.

Nothing of this may end the run, but with `strict`: what cannot be planned runs as in eager, after a
line that says why.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import sys
import traceback
import weakref
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rockmate._torch.allocator import is_out_of_memory
from rockmate._torch.engine import is_profiling
from rockmate._torch.members import compiled_call, set_compiled_call
from rockmate.adoption.in_place import InPlace
from rockmate.adoption.script import after_import
from rockmate.adoption.watch import Watch
from rockmate.budget import is_share, size_text
from rockmate.capture.compiled_model import innermost
from rockmate.capture.signature import SampleCall
from rockmate.curves.sweep_run import sweep
from rockmate.entry.module import RockmateModule
from rockmate.errors import InfeasibleMemoryLimitError, RockmateError
from rockmate.hf.trainer import wrap_model_of
from rockmate.memory_limit import device_of
from rockmate.runtime.first_backward import OTHERS

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_SHARE_OF_DEVICE = 0.95  # the rest is for what the allocator loses to fragments
_MOST_IN_FLIGHT = 4  # each further one is planned anew
_NONE = "no model was called in training mode that an optimizer of torch.optim trains"
_OF_OPS = ("/rockmate/state/writes.py", "/rockmate/_torch/dispatch.py")  # run what models call
_AS_IN_EAGER = "%s: it runs as in eager, within no budget, since %s"


class Adopted(InPlace):
    """A model of the script: what it is, in words, and how it has trained."""

    def __init__(
        self, session: Session, what: str, model: nn.Module, make: Callable[..., RockmateModule]
    ) -> None:
        super().__init__(model, make)
        self.what, self.trouble, self.num_calls, self._session = what, "", 0, session
        self.alone_bytes: tuple[int, int] | None = None  # without others: its baseline, its budget

    def __del__(self) -> None:
        if not vars(self).get("trouble", "refused"):  # such a one is told
            line = f"{self.what}: {self.num_calls} training calls; it has ended"
            self._session.ended.append(line)

    def _output(self, *args: Any) -> Any:
        self._session.adopting = "" if self.alone_bytes else self.what
        return super()._output(*args)

    def note_call(self) -> None:
        """Counts a training call."""
        self.num_calls += 1
        request = self.module._plans.request
        if request is not None and request.options.in_flight > _MOST_IN_FLIGHT:
            self._leave(f"it is called more than {_MOST_IN_FLIGHT} times before a backward")
        elif self.alone_bytes is None and (
            self.module.is_planned or self.module.frames is not None
        ):
            frames = self.module.frames
            if frames is None:
                plan = self.module.plan
                self.alone_bytes = plan.baseline_peak_bytes, plan.budget_bytes
            elif frames.needs is not None and frames.budget_bytes is not None:  # it is measured
                logger.warning("%s: frames keep its budget", self.what)
                self.alone_bytes = frames.needs.baseline_bytes, frames.budget_bytes
            if self.alone_bytes is not None:
                self._session.share()

    def instead(self, error: Exception) -> nn.Module | None:
        """The plain model, released unless only a profiler is in the way; or the smallest peak."""
        if self._session.settings.strict or is_out_of_memory(error) or _is_of_script(error):
            return None
        if isinstance(error, InfeasibleMemoryLimitError):
            logger.warning("%s The smallest peak is planned.", error)
            self.renew(memory_limit=None, budget=1)
            return self.module
        if is_profiling():
            logger.warning("%s: this call runs as in eager, since %s", self.what, error)
        else:
            self._leave(" ".join(str(error).split()) or type(error).__name__)
        return self.module.original

    def _leave(self, reason: str) -> None:
        self.release()
        self.trouble = reason
        logger.warning(_AS_IN_EAGER, self.what, reason)
        self._session.ended.append(str(self))

    def __str__(self) -> str:
        shapes = len(self.module._plans.runnables)
        how = f"planned, shapes: {shapes}; " if shapes and not self.module.frames else ""
        how = f"as in eager, since {self.trouble}" if self.trouble else how + self.module._line()
        return f"{self.what}: {self.num_calls} training calls, {how}"


class Session:
    """The models that a process trains, from when it is made, with the arguments of the command."""

    def __init__(self, settings: Namespace) -> None:
        self.settings, self._has_curve = settings, False
        self.adopting = ""  # what is planned at present
        # By their numbers. Models are the script's, and end when it lets them go.
        self.adopted: weakref.WeakValueDictionary[int, Adopted] = weakref.WeakValueDictionary()
        self.ended, self.refused = list[str](), list[str]()
        self._is_first = os.environ.get("RANK", "0") == "0"
        handler, root = logging.StreamHandler(), logging.getLogger("rockmate")
        handler.setFormatter(logging.Formatter("rockmate: %(message)s"))
        handler.addFilter(self._told)
        root.addHandler(handler)
        root.propagate = False
        self._watch = Watch(self._adopt)
        self._watch.begin()
        if settings.dry_run:
            register_optimizer_step_post_hook(lambda *_: self._end_dry_run())
        else:
            after_import("transformers.trainer", self._watch_trainers)

    def _adopt(self, model: nn.Module, optimizer: Optimizer) -> Any:
        name, holder = type(innermost(model)).__name__, type(optimizer).__name__
        what = f"{name}, called at {_caller()}, is trained by {holder}"
        if self.settings.dry_run:
            set_compiled_call(model, partial(self._print_curve, model, what))
            return compiled_call(model)

        def make(**given: Any) -> RockmateModule:
            options = {"mode": "auto", "on_infeasible": "least", "differentiable": "all"}
            return RockmateModule(model, **{**options, **given})

        return self._install(model, what, make, {"optimizer": optimizer})

    def _watch_trainers(self, module: Any) -> None:
        """Has the trainers of transformers adopted when they begin."""
        train = module.Trainer.train

        def planned(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            # A model that is made or compiled later is found when it is called.
            if trainer.model is not None and not (trainer.model_init or trainer.args.torch_compile):
                self._adopt_trainer(trainer, trainer.model)
            return train(trainer, *args, **kwargs)

        module.Trainer.train = planned

    def _adopt_trainer(self, trainer: Any, model: nn.Module) -> None:
        if isinstance(model, RockmateModule) or compiled_call(model) in self.adopted.values():
            return
        what = f"{type(model).__name__}, trained by {type(trainer).__name__} at {_caller()}"

        def make(**given: Any) -> RockmateModule:
            bound = {name: given.pop(name, None) for name in ("budget", "memory_limit")}
            module, _ = wrap_model_of(trainer, bound, given)
            trainer.model = trainer.model_wrapped = model  # which is planned in place
            return module

        self._watch.ignore(model)
        self._install(model, what, make, {})

    def _install(
        self, model: nn.Module, what: str, make: Callable[..., Any], options: dict[str, Any]
    ) -> Adopted | None:
        names = ("numerics", "offload", "host_budget", "weights")
        given = {name: getattr(self.settings, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if self.adopted:
            gc.collect()  # one before it may have ended, and would share the budget
        try:
            make = partial(make, **self._bound(model, options), **given)
            adopted = Adopted(self, what, model, make)
        except Exception as error:
            if self.settings.strict:
                raise
            self.refused.append(_AS_IN_EAGER % (what, error))
            logger.warning("%s", self.refused[-1])
            return None
        self.adopted[max(self.adopted, default=-1) + 1] = adopted
        return adopted

    def _bound(self, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        if self.settings.budget is not None:
            return {"budget": self.settings.budget}
        memory, device = self.settings.memory, device_of(model)
        if memory == "auto":
            if device.type != "cuda":
                msg = "--memory auto is what a GPU has, and the model is on the CPU. Name a size."
                raise RockmateError(msg)
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            memory = int(_SHARE_OF_DEVICE * free)  # that others do not have
        return {"memory_limit": memory, **options}

    def share(self) -> None:
        """Has several models share bytes by what each would take without recomputation."""
        present = [each for each in self.adopted.values() if not each.trouble]
        begun = [(each, *each.alone_bytes) for each in present if each.alone_bytes]
        if len(begun) < 2 or is_share(self.settings.budget):
            return
        needed = sum(baseline_bytes for _, baseline_bytes, _ in begun)
        most = min(budget_bytes for *_, budget_bytes in begun)
        if needed > most:
            logger.warning("%d models share the budget by what each takes", len(begun))
            for each, baseline_bytes, _ in begun:
                each.renew(memory_limit=None, budget=max(1, most * baseline_bytes // needed))

    def _print_curve(self, model: nn.Module, what: str, *args: Any, **kwargs: Any) -> Any:
        set_compiled_call(model, None)
        self._has_curve = True
        try:
            found = sweep(model, SampleCall(args, kwargs), differentiable="all")
            logger.warning("%s\n%s", what, found.text(shutil.get_terminal_size().columns))
        except RockmateError as error:
            logger.warning("%s: nothing can be planned, since %s", what, error)
        return model(*args, **kwargs)

    def _end_dry_run(self) -> None:
        if self._has_curve:
            sys.exit()

    # --- what it tells ---

    def _told(self, record: logging.LogRecord) -> bool:
        """Whether this rank tells a line; that of a first plan says what it is a plan of."""
        if self.adopting and record.msg.startswith("planned for this call") and record.args:
            record.args = (self.adopting, *tuple(record.args)[1:])
        return self._is_first

    def end(self, error: BaseException | None) -> None:
        """Tells how each model trained, and where memory ran out; `error` ended the script."""
        if self._has_curve or not self._is_first:
            return
        present = [str(each) for each in self.adopted.values() if not each.trouble]
        lines = [*self.ended, *present, *self.refused] or [_NONE]
        resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident
        lines.append(f"peak of the process: {size_text(peak)}")
        if error is not None and is_out_of_memory(error):
            names = " ".join(each.filename for each in traceback.extract_tb(error.__traceback__))
            where = "in what no plan bounds: evaluation, a loss, data"
            where = "in the step of an optimizer" if "/torch/optim/" in names else where
            where = "in a planned step" if "/rockmate/runtime/" in names else where
            lines.append(f"memory ran out {where}. Lower --memory or --budget.")
        sys.stderr.write("".join(f"rockmate: {line}\n" for line in lines))


def _is_of_script(error: Exception) -> bool:
    """Whether the script's own code has raised an error, or a function of PyTorch that it calls."""
    files = [each.filename for each in traceback.extract_tb(error.__traceback__)]
    while files and (files[-1].startswith(OTHERS[0]) or files[-1].endswith(_OF_OPS)):
        files.pop()
    return bool(files) and not files[-1].startswith((OTHERS[1], "<"))


def _caller() -> str:
    """File and line of the nearest frame that is neither PyTorch's nor of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OTHERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
