"""RockmateModule: a model that trains inside a memory budget.

A wrapper shares the dictionaries of the wrapped module, so both have the same parameters, buffers
and submodules at all times. It holds a `PlanCache`, which plans and runs training calls. All else
is the wrapped module's own.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rockmate._torch.members import share_members
from rockmate.budget import Budget, OnInfeasible
from rockmate.capture.compiled_model import innermost, plain_model
from rockmate.entry.arguments import (
    check_choices,
    check_mode,
    check_options,
    checked_budget,
    checked_plan,
    memory_limit_of,
)
from rockmate.errors import (
    BackwardError,
    InfeasibleBudgetError,
    InvalidSampleError,
    NothingToTrainError,
    RockmateError,
    SignatureMismatchError,
    TrialError,
    UnsupportedModelError,
    advise_frames,
)
from rockmate.memory_limit import Optimizer
from rockmate.planning.options import PlanOptions
from rockmate.runtime.first_backward import FirstBackward
from rockmate.runtime.methods import Methods, names_of_methods, twin_of
from rockmate.runtime.model_checks import is_lazy, raise_as_eager, refuse_surroundings
from rockmate.runtime.wrapper import (
    ForwardOfModel,
    Wrapper,
    take_special_methods,
    with_signature_of,
)
from rockmate.trial.steps import TrialOption

if TYPE_CHECKING:
    from rockmate.entry.plan_cache import PlanCache
    from rockmate.frames.runner import FrameRunner
    from rockmate.plan.plan import Plan
    from rockmate.runtime.program import PlannedCall

logger = logging.getLogger(__name__)

Mode = Literal["plan", "frames", "auto"]
_BACKWARD_ERRORS = TrialError, BackwardError
_CALL_ERRORS = UnsupportedModelError, InvalidSampleError, SignatureMismatchError, *_BACKWARD_ERRORS


class RockmateModule(Wrapper):
    """A module that trains within a memory budget and otherwise behaves as the module it wraps.

    In training mode with gradients enabled, a call runs the plan, else the wrapped module. Losses
    and gradients equal eager's.

    Parameters, buffers and submodules are the wrapped module's own objects under the same names.
    `state_dict`, optimizers, `.to`, `.train` and attributes (`config`, `generate`,
    `save_pretrained`, ...) work unchanged. `isinstance` and `__class__` report the wrapped
    module's class. `inspect.signature(module.forward)` reports the arguments of its `forward`.

    Give exactly one of `budget`, `max_slowdown`, `memory_limit` and `plan`.

    Examples:
        >>> module = RockmateModule(model, batch, budget=0.5)  # doctest: +SKIP
        >>> loss = module(**batch).loss                        # doctest: +SKIP
        >>> loss.backward()                                    # doctest: +SKIP
        >>> print(module.plan.summary())                       # doctest: +SKIP

    Args:
        model: a module in training mode, on the device that it trains on. If it has been through
            `torch.compile`, training calls run the plain model and eval calls the compiled one, and
            the names in its `state_dict` stay (`_orig_mod.` before each).
        sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. With None, the first training call is the sample.
        budget: the activation budget: bytes, a size ("6GiB"), or a fraction in (0, 1] of the
            sample's baseline peak, which is the peak without recomputation; or "knee", where the
            curve of time against memory bends. A fraction refers to
            the sample's shapes, also when the module changes. A call with other keywords that is
            smaller than the sample gets the bytes of the sample's plan.
        memory_limit: a bound on the whole device, in bytes or as a size. It includes parameters,
            gradients and the optimizer's state; see `rockmate.memory_limit`.
        optimizer: with `memory_limit`, the optimizer that will step: an instance, or the name or
            class of one that does not exist yet.
        steps_in_backward: with `memory_limit`, whether each parameter is stepped, and its gradient
            freed, within the backward.
        max_slowdown: in place of a budget, takes the smallest one whose step takes at most so much
            of the time without recomputation, as 1.05.
        plan: a plan for the same model and sample (`Plan.load`). Nothing is measured or solved.
        strategy: the planning strategy; see `Planner.plan`. The default finds the fastest plans.
        replan: True plans again, with a line in the log, when the module has changed (device,
            dtype, added rows, frozen parameters, autocast, modes) or a call differs in keywords,
            constants, shapes or inputs that require gradients. Shapes no larger than the sample's
            reuse its schedule. False, or a given `plan`, raises `SignatureMismatchError` instead.
        mode: "plan" captures the model and plans. "frames" does not: what calls of submodules save
            is dropped and recomputed. "auto" takes frames, with a line in the log, where the model
            cannot be captured or a trial fails, and eager where one of frames fails, too.
        keep: paths of submodules that frames leave alone.
        plan_frames: whether the insides of frames that can be captured are planned by themselves.
        on_infeasible: what happens if no schedule fits the budget, at first or for a larger call.
            "error" raises `InfeasibleBudgetError`. "least" plans the smallest peak found, which is
            above the budget, and warns with both in one line.
        trial: which steps are held against eager, whose forward runs beside them and is undone:
            "log" has steps 1, 2, 4, 8 and so on of each plan, "always" all, "never" none.
        methods: names of methods beside `forward` that train (`["encode_image", "encode_text"]`),
            whose calls are planned, too. Their forwards are in memory together: a budget in bytes
            holds for the sum, of which the plan of each method has an equal part; a fraction is one
            of the peak of each. Without it, they run as in eager, with a warning.
        options: of planning, all at once; `rockmate.PlanOptions` documents them. A `plan` has its.
        **keywords: single options of planning, as numerics="bitwise" or untraced=["router"].

    Raises:
        InvalidBudgetError: the budget cannot be read, or neither budget, limit nor plan is given.
        InfeasibleBudgetError: no schedule fits the budget; the error names the smallest peak.
        InfeasibleMemoryLimitError: parameters, gradients and optimizer state reach the limit.
        InvalidSampleError: the sample does not fit the model, or nothing requires a gradient.
        UnsupportedModelError: the model cannot be captured as one static graph.
        PlanMismatchError: the plan was made for another model or sample.
        UnknownOptionError: there is no option of a name; the text says the nearest one.
        InvalidArgumentError: more than one of budget, limit and plan is given; a plan is given with
            options or without a sample; or `plan` is not a `Plan`; `larger`, `on_infeasible`,
            `strategy` or `trial` is not one of its values; or the model has no method of a name in
            `methods`.
    """

    def __init__(
        self,
        model: nn.Module,
        sample_input: Any = None,
        budget: Budget | None = None,
        *,
        memory_limit: int | str | None = None,
        optimizer: Optimizer = "adamw",
        steps_in_backward: bool = False,
        max_slowdown: float | None = None,
        plan: Plan | None = None,
        strategy: str | None = None,
        replan: bool = True,
        on_infeasible: OnInfeasible = "error",
        mode: Mode = "plan",
        keep: Collection[str] = (),
        plan_frames: bool = True,
        trial: TrialOption = "log",
        methods: Collection[str] = (),
        options: PlanOptions | None = None,
        **keywords: Any,
    ) -> None:
        options = PlanOptions.of(options, keywords, known=RockmateModule.__init__.__annotations__)
        budget = checked_budget(model, sample_input, budget, max_slowdown, memory_limit, plan)
        check_mode(mode, keep, plan, strategy, {**options.changed, **keywords})
        check_choices(on_infeasible, replan=replan, plan_frames=plan_frames)
        plain = plain_model(model)
        check_options(options, plain, strategy)
        self._wrap(model, trial)
        names = names_of_methods(plain, methods, has_plan=plan is not None)
        limit = memory_limit_of(memory_limit, optimizer, steps_in_backward)
        if mode != "plan":
            frames: Any = {"on_infeasible": on_infeasible, "keep": keep, "trial": trial}
            frames |= {"plans_insides": plan_frames, "is_fallback": mode == "auto"}
            self._make_frames = partial(_frame_runner, plain, limit or budget, **frames)
        if mode == "frames" and self._make_frames is not None:
            self._frames = self._make_frames()
            self._take_methods(names, self._plans)
            return
        from rockmate.capture.signature import SampleCall  # late: faults are told at once
        from rockmate.entry.plan_cache import PlanCache
        from rockmate.entry.request import PlanRequest, planned_call_of

        if plan is None:
            bound: Any = {"budget": budget, "memory_limit": limit, "on_infeasible": on_infeasible}
            request = PlanRequest(**bound, strategy=strategy or "rockmate", options=options)
            self._plans = PlanCache(plain, request, replans=replan, trial=trial)
            self._plans.new_plans.hands_over = self._ends_in_eager = mode == "auto"
            self._take_methods(names, self._plans)
            if sample_input is not None and not is_lazy(plain):
                try:
                    self._plans.plan_for_sample(SampleCall.of(sample_input))
                except _CALL_ERRORS as error:
                    self._go_on_with_frames(error)
        else:
            given = {**options.changed, **keywords}
            plan = checked_plan(plan, strategy, given, has_sample=sample_input is not None)
            planned = planned_call_of(plan, plain, SampleCall.of(sample_input))
            self._plans.adopt(planned)
            self._plans.runnables[0].difference(replans=False)  # warns of hooks

    @classmethod
    def of(cls, model: nn.Module, call: PlannedCall, *, trial: TrialOption) -> RockmateModule:
        """A module for a planned call; see `Planner.module`. It refuses calls of other shapes."""
        module = cls.__new__(cls)
        module._wrap(model, trial)
        module._plans.adopt(call)
        return module

    def _wrap(self, model: nn.Module, trial: TrialOption = "log") -> None:
        from rockmate.entry.plan_cache import PlanCache
        from rockmate.runtime.ungraded import UngradedCalls

        super().__init__()
        self._plans = PlanCache(innermost(model), trial=trial)
        self._frames: FrameRunner | None = None
        self._make_frames: partial[FrameRunner] | None = None
        self._first_backward: FirstBackward | None = None
        self._num_runs, self._methods = 0, Methods()
        self._ungraded = UngradedCalls(innermost(model))
        self._ends_in_eager = self._is_eager = False
        # The wrapped module's own dictionaries: a registration in one module appears in the other.
        share_members(self, model)
        self.__dict__["_wrapped"] = model
        self.__dict__["_forward_of_model"] = with_signature_of(innermost(model))
        take_special_methods(self, model)

    def _take_methods(self, names: Collection[str], plans: PlanCache) -> None:
        """Has methods planned, as `plans` do; frames are of all of them together."""
        model, make = innermost(self.original), self._make_frames
        for name in names:
            module = self._methods.planned[name] = RockmateModule.__new__(RockmateModule)
            module._wrap(twin_of(model, name))
            module._plans = plans.empty_for(module.original, num_methods=len(names))
            module._ends_in_eager = self._ends_in_eager
        if make is None or not names:
            if make and self._ends_in_eager:
                self._first_backward = FirstBackward(model, make)
            return

        from rockmate.frames.joined import JoinedRunner, MethodFrames

        @cache
        def runner() -> JoinedRunner:
            return JoinedRunner(twin_of(model), *make.args[1:], **make.keywords)

        for name, module in self._methods.planned.items():
            module._make_frames = partial(lambda name: MethodFrames(runner(), name), name)
            if self._plans.request is None:
                module.take_frames()

    def take_frames(self) -> FrameRunner | None:
        """From here on frames keep the budget."""
        if self._frames is None and self._make_frames is not None:
            first = self._first_backward
            self._frames = (first.frames if first else None) or self._make_frames()
        return self._frames

    def _go_on_with_frames(self, error: RockmateError) -> Any:
        """With mode "auto": leaves planning for frames; else raises."""
        is_refused = isinstance(error, SignatureMismatchError) and not self._plans.replans
        if self._make_frames is None or is_refused or not isinstance(error, _CALL_ERRORS):
            if isinstance(error, UnsupportedModelError):
                advise_frames(error)
            raise error
        left_out = self._plans.request.left_out_by_frames if self._plans.request else []
        logger.warning(
            "the budget is kept by frames instead of a plan%s, since %s",
            f", without {' and '.join(left_out)}" if left_out else "",
            error,
        )
        return self.take_frames()

    @property
    def plan(self) -> Plan:
        """The plan in use: its schedule, predicted peak and time.

        Raises:
            RockmateError: there is no plan yet: no sample was given and no training call was made.
        """
        if not self._plans.runnables:
            msg = (
                "nothing is planned yet: the module was made without a sample, so it plans at its "
                "first call in training mode."
            )
            raise RockmateError(msg)
        return self._plans.runnables[0].planned.plan

    @property
    def frames(self) -> FrameRunner | None:
        """What runs the training calls where there is no plan: mode "frames", or "auto"."""
        return self._frames

    @property
    def planned_methods(self) -> dict[str, RockmateModule]:
        """For each of the `methods` what plans its calls; it has a `plan`, or `frames`."""
        return dict(self._methods.planned)

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan. Without a sample, the first training call makes it."""
        return bool(self._plans.runnables)

    @property
    def plan_cache(self) -> PlanCache:
        """The plans of all calls, and what becomes of a call that none of them serves."""
        return self._plans

    @ForwardOfModel
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward: planned in training, unchanged otherwise.

        Raises:
            SignatureMismatchError: a training call or the module's state differs from the sample's
                in any way, and the module was made with a plan or with `replan=False`.
            Exception: the model's own, where it raises in eager, too.
            InfeasibleBudgetError, InvalidSampleError, UnsupportedModelError: the call, or the
                changed module, cannot be planned for.
            TrialError: the step differs from eager's. It is undone.
        """
        return self._run(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, with the module's hooks.

        Raises:
            RockmateError: a `forward` was assigned after wrapping, and in a training call it did
                not call the planned one.
        """
        if "forward" not in self.__dict__:
            return super().__call__(*args, **kwargs)
        num_before = self._num_runs
        output = super().__call__(*args, **kwargs)
        if self._num_runs == num_before and self.training and torch.is_grad_enabled():
            msg = (
                "forward was replaced after the model was wrapped, and the replacement does not "
                "call the planned forward, so the budget did not hold. Wrap last: for a trainer "
                "that replaces forward (TRL's), make the trainer with the plain model, then call "
                "rockmate.wrap_trainer(trainer, budget)."
            )
            raise RockmateError(msg)
        return output

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():
            from rockmate.runtime.uncompiled import run_uncompiled

            return run_uncompiled(self, args, kwargs)
        # Set directly: `nn.Module.__setattr__` takes as long as an op.
        self.__dict__["_num_runs"] += 1
        if self._is_eager or not (self.training and torch.is_grad_enabled()):
            self._ungraded.begin_plain(self._frames or self._first_backward, self._is_eager)
            return self.original(*args, **kwargs)
        refuse_surroundings()
        if self._ungraded.includes(args, kwargs):
            return self._ungraded.run(self.original, args, kwargs)
        first, frames = self._first_backward, self._frames
        if frames is None and first is not None:
            frames = first if first.is_of(args, kwargs) else first.chosen_frames()
            self.__dict__["_frames"] = None if frames is first else frames
        if frames is None:
            try:
                return self._plans.run(args, kwargs, first and first.casts_to)
            except NothingToTrainError:
                self._ungraded.add(args, kwargs)
                return self._ungraded.run(self.original, args, kwargs)
            except RockmateError as error:
                if self._ungraded.includes_failed(error, ends_in_eager=self._ends_in_eager):
                    return self.original(*args, **kwargs)
                if isinstance(error, _CALL_ERRORS):
                    raise_as_eager(error, self.original, args, kwargs)
                frames = self._go_on_with_frames(error)
        try:
            return frames.run(args, kwargs)
        except (InfeasibleBudgetError, TrialError) as error:
            if frames is first or self._plans.new_plans.go_on(error):
                self._frames = None
                return self._run(args, kwargs)
            if not self._ends_in_eager or isinstance(error, InfeasibleBudgetError):
                raise
            logger.warning("nothing keeps the budget from here on: eager runs, since %s", error)
        self.__dict__["_is_eager"] = True
        return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the wrapped module under the same plan.

        With opaque submodules, the copy plans at its first training call; if the plan was given,
        the copy is the plain model. Frames of the copy measure its first steps anew.
        """
        model = copy.deepcopy(self.original, memo)
        plans = self._plans.copy_for(innermost(model), memo)
        if plans is None:
            logger.warning(
                "a RockmateModule is copied as the plain %s, since the plan that it was made with "
                "runs untraced submodules, or is not for it as it is. Load the plan for the copy.",
                type(model).__name__,
            )
            return memo.setdefault(id(self), model)
        module = RockmateModule.__new__(RockmateModule)
        module._wrap(model)
        module._plans = plans
        if (own := self._make_frames) is not None:
            module._make_frames = partial(own.func, innermost(model), *own.args[1:], **own.keywords)
            module._frames = None if self._frames is None else module._make_frames()
            module._ends_in_eager, module._is_eager = self._ends_in_eager, self._is_eager
        of_methods = next(iter(self._methods.planned.values()), self)
        module._take_methods(self._methods.planned, of_methods._plans)
        return memo.setdefault(id(self), module)

    def __reduce__(self) -> Any:
        """Pickles the wrapped module in its place: a plan holds code that was made here."""
        logger.warning(
            "a RockmateModule is pickled, by torch.save or for another process, as the %s that it "
            "wraps, without its plan. Wrap what is loaded to plan again.",
            type(self.original).__name__,
        )
        return _plain, (self.original,)

    def _replicate_for_data_parallel(self) -> Any:
        """Refuses `nn.DataParallel`, which calls this before each step on several GPUs."""
        from rockmate.runtime.ddp import REPLICATED

        raise UnsupportedModelError(REPLICATED)

    def __repr__(self) -> str:
        """The wrapped module, with one line on the plan, and one for each planned method."""
        wrapped = repr(self.original).replace("\n", "\n  ")
        lines = [self._line(), *(f"{n}: {m._line()}" for n, m in self.planned_methods.items())]
        return "\n  ".join(["RockmateModule(", *(f"({each})" for each in lines), wrapped]) + "\n)"

    def _line(self) -> str:
        if self._frames is not None:
            report = self._frames.report()
            return self._frames.summary() if report is None else report.line()
        from rockmate.plan.summary import line_of

        return line_of(self.plan) if self.is_planned else "not planned yet"


def _frame_runner(*args: Any, **keywords: Any) -> FrameRunner:
    from rockmate.frames.runner import FrameRunner

    return FrameRunner(*args, **keywords)


def _plain(model: nn.Module) -> nn.Module:
    """What a pickled `RockmateModule` is loaded as."""
    return model
