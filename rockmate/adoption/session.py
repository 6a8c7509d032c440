"""One run of a script whose models train inside a budget, although it does not say so.

Nothing of this may end the run, but with `strict`: what cannot be planned runs as in eager, after a
line that says why.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rockmate._torch.members import compiled_call, set_compiled_call
from rockmate.adoption.after_import import after_import
from rockmate.adoption.in_place import InPlace
from rockmate.adoption.watch import Watch
from rockmate.budget import Budget, is_share
from rockmate.errors import InfeasibleMemoryLimitError, RockmateError
from rockmate.hf.trainer import wrap_trainer
from rockmate.memory_limit import device_of
from rockmate.module import RockmateModule

if TYPE_CHECKING:
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

_SHARE_OF_DEVICE = 0.95  # the rest is for what the allocator loses to fragments
_MOST_IN_FLIGHT = 4  # each further one is planned anew
_OWN, _TORCH = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How the models of a script are to train.

    Attributes:
        budget: the activation budget of all of them, as for `RockmateModule`.
        memory: the bound on the whole device; "auto" for what a GPU has.
        options: of `RockmateModule`.
        is_strict: whether an error of planning ends the run.
        is_dry: whether the run ends after the first step of an optimizer, with what budgets cost.
    """

    budget: Budget | None = None
    memory: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    is_strict: bool = False
    is_dry: bool = False


@dataclass(slots=True, eq=False)
class Adopted:
    """A model of the script.

    Attributes:
        what: it is, in words.
        call: what its calls run.
        trouble: why the plain model runs; empty while it does not.
        num_calls: its training calls.
    """

    what: str
    call: InPlace
    trouble: str = ""
    num_calls: int = 0

    @property
    def module(self) -> RockmateModule:
        """What plans and runs its calls."""
        return self.call.module


class Session:
    """The models of one script.

    Attributes:
        adopted: those that train, in the order of their first calls.
        refused: a line for each that trains and could not be adopted.
        adopting: the one that is planned at present, in words.
        watch: finds them.
        has_curve: whether a dry run has told what budgets cost.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings, self.adopted, self.adopting = settings, list[Adopted](), ""
        self.refused: list[str] = []
        self.watch = Watch(self._adopt)
        self.has_curve = False

    def install(self) -> None:
        """Has the models adopted that the process trains from here on."""
        self.watch.install()
        if self.settings.is_dry:
            register_optimizer_step_post_hook(lambda *_: self._end_dry_run())
        after_import("transformers.trainer", self._install_trainer)

    # --- finding ----------------------------------------------------------------------------------

    def _adopt(self, model: nn.Module, optimizer: Optimizer | None) -> Any:
        name, holder = type(model).__name__, type(optimizer).__name__ if optimizer else "hand"
        what = f"{name}, called at {_caller()}, is trained by {holder}"
        if self.settings.is_dry:
            set_compiled_call(model, partial(self._print_curve, model, what))
            return compiled_call(model)

        def make(**given: Any) -> RockmateModule:
            options = {"mode": "auto", "on_infeasible": "least", "differentiable": "all"}
            return RockmateModule(model, **{**options, **given})

        return self._install(model, what, make, {"optimizer": optimizer or "sgd"})

    def _install_trainer(self, module: Any) -> None:
        """Has the trainers of transformers adopted when they begin."""
        train = module.Trainer.train

        def planned(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            # A compiled model is found when it is called.
            is_known = trainer.model is not None and trainer.model_init is None
            if is_known and not trainer.args.torch_compile and not self.settings.is_dry:
                self._adopt_trainer(trainer)
            return train(trainer, *args, **kwargs)

        module.Trainer.train = planned

    def _adopt_trainer(self, trainer: Any) -> None:
        model = trainer.model
        what = f"{type(model).__name__}, trained by {type(trainer).__name__} at {_caller()}"
        if isinstance(model, RockmateModule) or any(
            model is each.module.original for each in self.adopted
        ):
            return

        def make(**given: Any) -> RockmateModule:
            module = wrap_trainer(trainer, **given)
            trainer.model = trainer.model_wrapped = model  # which is planned in place
            return module

        self.watch.ignore(model)
        self._install(model, what, make, {})

    def _install(
        self,
        model: nn.Module,
        what: str,
        make: Callable[..., RockmateModule],
        options: dict[str, Any],
    ) -> InPlace | None:
        try:
            given = {**self._bound(model, options), **self.settings.options}
            make = partial(make, **given)
            call = InPlace(model, make(), make)
        except Exception as error:
            if self.settings.is_strict:
                raise
            self.refused.append(f"{what}: as in eager, since {_tell(what, error)}")
            return None
        adopted = Adopted(what, call)
        call.on_call = partial(self._note_call, adopted)
        call.on_error = partial(self._go_on, adopted)
        self.adopted.append(adopted)
        self.adopting = what
        call.install()
        return call

    def _bound(self, model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
        """The bound as arguments of `RockmateModule`."""
        memory = self.settings.memory
        if memory is None:
            return {"budget": self.settings.budget}
        if memory == "auto":
            device = device_of(model)
            if device.type != "cuda":
                msg = "--memory auto is what a GPU has, and the model is on the CPU. Name a size."
                raise RockmateError(msg)
            memory = int(_SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[1])
        return {"memory_limit": memory, **options}

    # --- while it runs ----------------------------------------------------------------------------

    def _note_call(self, adopted: Adopted) -> None:
        adopted.num_calls += 1
        request = adopted.module._plans.request
        if request is not None and request.options.in_flight > _MOST_IN_FLIGHT:
            msg = f"it is called more than {_MOST_IN_FLIGHT} times before a backward"
            adopted.call.release()
            adopted.trouble = _tell(adopted.what, RockmateError(msg))
        if adopted.num_calls > 1:
            return
        self.adopting = ""
        if adopted.module.frames is not None:
            logger.warning("%s: frames keep its budget", adopted.what)
        self._share()

    def _share(self) -> None:
        """Has several models share bytes by what each would take without recomputation."""
        planned = [each for each in self.adopted if each.module.is_planned and not each.trouble]
        if len(planned) < 2 or is_share(self.settings.budget):
            return
        needs = [each.module.plan.baseline_peak_bytes for each in planned]
        most = min(each.module.plan.budget_bytes for each in planned)
        if sum(needs) <= most:
            return
        logger.warning("%d models share the budget by what each takes", len(planned))
        for each, need in zip(planned, needs, strict=True):
            each.call.renew(memory_limit=None, budget=max(1, most * need // sum(needs)))

    def _go_on(self, adopted: Adopted, error: Exception) -> bool:
        """Whether a call that ended in an error runs anew, released or with another bound."""
        if self.settings.is_strict or is_out_of_memory(error):
            return False
        if isinstance(error, InfeasibleMemoryLimitError):
            logger.warning("%s The smallest peak is planned.", error)
            adopted.call.renew(memory_limit=None, budget=1)
        else:
            adopted.call.release()
            adopted.trouble = _tell(adopted.what, error)
        return True

    # --- a dry run --------------------------------------------------------------------------------

    def _print_curve(self, model: nn.Module, what: str, *args: Any, **kwargs: Any) -> Any:
        set_compiled_call(model, None)
        self.has_curve = True
        from rockmate.adoption.report import curve_text

        try:
            logger.warning("%s\n%s", what, curve_text(model, args, kwargs, self.settings.options))
        except Exception as error:
            if self.settings.is_strict:
                raise
            _tell(what, error)
        return model(*args, **kwargs)

    def _end_dry_run(self) -> None:
        if self.has_curve:
            raise SystemExit(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out, on a GPU or on the host."""
    is_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_host or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _tell(what: str, error: Exception) -> str:
    """Says that a model runs as in eager, and gives the reason."""
    reason = " ".join(str(error).split()) or type(error).__name__
    logger.warning("%s: it runs as in eager, within no budget, since %s", what, reason)
    return reason


def _caller() -> str:
    """File and line of the nearest frame that is neither PyTorch's nor of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
