"""A planned call as it is run: its code, its autograd state, and the model that it was made for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._torch.engine import has_saved_tensor_hooks, is_profiling
from rockmate._torch.fake import is_fake
from rockmate._torch.members import has_global_hooks
from rockmate._torch.storage import bytes_of
from rockmate.budget import size_text
from rockmate.capture.model_signature import ModelSignature, ModelWatch
from rockmate.capture.opaque_module import opaque_modules
from rockmate.capture.signature import CallSignature
from rockmate.entry.step_family import StepFamily
from rockmate.runtime.autograd import Runner
from rockmate.runtime.ddp import finds_unused_parameters
from rockmate.runtime.model_checks import raise_as_eager
from rockmate.runtime.program import PlannedCall
from rockmate.runtime.step_arguments import addresses_of, contents_of
from rockmate.runtime.undefined_tangents import forbid_gradient
from rockmate.state.random_state import RandomState
from rockmate.trial.conditions import conditions_of
from rockmate.trial.evidence import Evidence
from rockmate.trial.run import run_beside_eager
from rockmate.trial.steps import TrialSteps

logger = logging.getLogger(__name__)

_OF_ALL = (
    "hooks of all modules (register_module_forward_hook) run in no submodule of a planned step"
)
_OF_SAVED = (
    "hooks of saved tensors are on around a planned step and get what the plan saves, which is not "
    'what eager saves. Where they change values, gradients are not eager\'s: take mode="frames".'
)


class RunnableCall:
    """A planned call, its autograd state, and a watch over the model's state.

    Attributes:
        planned: the plan and its code.
        family: the captures of the same model at other sizes.
        is_adapted: whether the schedule was made for a larger call.
        trials: which of its steps are held against eager.
        graded: indices of outputs that the script's backwards have given gradients.
    """

    def __init__(
        self,
        planned: PlannedCall,
        model: nn.Module,
        family: StepFamily,
        trials: TrialSteps,
        *,
        is_adapted: bool,
        is_first: bool,
    ) -> None:
        self.planned, self.trials, self.family = planned, trials, family
        self.is_adapted, self._is_first = is_adapted, is_first
        self._model, self._told, self.graded = model, set[str](), set[int]()
        self._watch: ModelWatch | None = None
        self._copied_bytes = self._most_copied_bytes = self._tangent_bytes = 0
        if planned.program.moved.has_homes:
            self.runner.arguments.send_weights_home()

    @cached_property
    def runner(self) -> Runner:
        """Runs the code under autograd."""
        runner = Runner(self.planned.program, self._model)
        runner.saved_bytes = lambda: self.planned.plan.simulation.saved_bytes
        runner.check_tangents = self._note_tangents
        return runner

    @cached_property
    def evidence(self) -> Evidence | None:
        """What its first steps have taken; None where the schedule was made for others."""
        return None if self.is_adapted else Evidence(self.planned, is_first=self._is_first)

    def difference(self, *, replans: bool = True) -> str:
        """What has changed in the model since planning, in words; empty if nothing has.

        A tensor hook needs a plan that makes the parameter's whole gradient. With `replans` False
        it is only warned of, because it costs memory and changes no number.
        """
        if self._watch is not None and not self._watch.has_changed():
            return ""
        now, model = ModelSignature.of(self._model), self._model
        opaque = opaque_modules(model, self.family.founder.plan.options.untraced)
        found = self.planned.state.difference(now, opaque) or self.planned.attributes.difference()
        hooked = sorted(now.hooked - self.planned.state.hooked)
        if found:
            return found
        if hooked and replans:
            return f"{hooked[0]} has a tensor hook, which needs its whole gradient"
        if hooked:
            _warn_of_hooks(model, hooked)
        self._watch = ModelWatch(model, self.planned.attributes)
        return ""

    def _note_tangents(self, tangents: Sequence[Tensor | None]) -> None:
        given = {index: each for index, each in enumerate(tangents) if each is not None}
        self.graded |= given.keys()
        layouts = self.planned.program.layouts.tangents
        pairs = ((given[index], planned) for index, planned in layouts.items() if index in given)
        copied = [each for each, own in pairs if not own.is_of(each)]  # sums have some of no memory
        held = [each for each in copied if each.untyped_storage().nbytes() >= bytes_of(each)]
        self._tangent_bytes = sum(map(bytes_of, held))
        if self.evidence is not None:
            self.evidence.tangent_bytes = sum(map(bytes_of, given.values()))

    @property
    def others(self) -> list[Runner]:
        """What has run forwards of the model whose backward is to come."""
        return self.runner.pending.runners_of(self._model)

    def beyond_budget(self) -> str:
        """Forwards in flight that leave no room for a further one, in words; empty if all do."""
        others = self.others
        num_planned = self.planned.program.num_in_flight
        if len(others) < num_planned:
            return ""
        plan = self.planned.plan
        num_bytes = plan.predicted_peak_bytes - (num_planned - 1) * plan.simulation.saved_bytes
        num_bytes += sum(each.saved_bytes() for each in others)
        if num_bytes <= plan.budget_bytes:
            return ""
        return (
            f"{len(others) + 1} forwards of this model are in flight, their backwards not begun, "
            f"which take {size_text(num_bytes)} together, and the plan's budget of "
            f"{size_text(plan.budget_bytes)} bounds {num_planned}"
        )

    def take_copied_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Bytes of what lies in other strides than planned; 0 if an earlier call had as many.

        That is inputs, and gradients of the outputs of the call before. The plan runs with copies
        of them, which it does not count.
        """
        layouts = self.planned.program.layouts.inputs
        copied = [tensors[at] for at, planned in layouts.items() if not planned.is_of(tensors[at])]
        self._copied_bytes, most_bytes = sum(map(bytes_of, copied)), self._most_copied_bytes
        if is_profiling():  # beside which nothing is planned
            return 0
        copied_bytes = self._copied_bytes + self._tangent_bytes
        self._most_copied_bytes = max(most_bytes, copied_bytes)
        return copied_bytes if copied_bytes > most_bytes else 0

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The model's output for the tensors of a call that the plan serves."""
        attributes = self.planned.attributes
        leaves_any = attributes.leaves_any
        if leaves_any:
            attributes.release()
        if self.evidence is not None:
            self.evidence.begin(self.runner, tensors)
        outputs = list(self.runner.run(tensors, hooks_last=finds_unused_parameters()))
        for index in self.planned.non_differentiable_outputs:
            outputs[index] = forbid_gradient(outputs[index])
        if leaves_any:
            attributes.deliver(outputs)
        return self.planned.output_structure.rebuild(outputs)

    def run_or_try(
        self, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The model's output, in some steps held against eager's; see `run` and `TrialSteps`.

        Raises:
            TrialError: the step differs from eager's. It is undone.
        """
        step = partial(self.run, tensors)
        pairs = ((_OF_ALL, has_global_hooks()), (_OF_SAVED, has_saved_tensor_hooks()))
        untold = {text for text, is_on in pairs if is_on} - self._told
        self._told |= untold
        for text in untold:
            logger.warning("%s", text)
        if not self.trials.is_next(can_run=not self.others, is_due=bool(untold)):
            is_graph = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if is_graph or any(map(is_fake, tensors)):  # generators have no state
                return step()
            random = RandomState([each.device for each in tensors], of_pytorch_alone=True)
            try:
                return step()
            except Exception as error:  # what eager leaves behind it, a plan writes at the end
                random.restore()
                raise_as_eager(error, self._model, args, kwargs)
                raise
        if self.planned.program.collectives:
            logger.info("the planned step is not held against eager: its ranks communicate")
            return step()
        self.planned.attributes.release()  # as at the begin of the step itself
        known = self.planned.larger or self.planned  # its own plan takes a second to make
        conditions = conditions_of(known.plan, is_laid_out=not self._copied_bytes)
        conditions = replace(conditions, takes_gradient=self.planned.attributes.takes_gradient)
        self.runner.memory_of = contents_of
        try:
            return run_beside_eager(self._model, args, kwargs, step, conditions, self.trials)
        finally:
            self.runner.memory_of = addresses_of
            self.graded.clear()  # by the trial's own backward


def kin_of(runnables: Sequence[RunnableCall], call: CallSignature) -> list[RunnableCall]:
    """Those with its dims of size 1: what was planned for, or a family began with, comes first."""
    dims = call.broadcast_dims
    kin = [each for each in runnables if each.planned.call.broadcast_dims == dims]
    founders = [each for each in kin if not each.is_adapted or each.family.founder is each.planned]
    return founders or kin[:1]


def _warn_of_hooks(model: nn.Module, hooked: Sequence[str]) -> None:
    """Warns of tensor hooks on parameters whose whole gradients a plan does not count."""
    named = dict(model.named_parameters(remove_duplicate=False))
    largest = max(hooked, key=lambda name: named[name].nbytes)
    logger.warning(
        "the tensor hook on %s needs the whole gradient, which the plan does not count: "
        "up to %s bytes beyond the budget. Parameters with such a hook: %d. "
        "Register hooks before planning.",
        largest,
        f"{2 * named[largest].nbytes:,}",
        len(hooked),
    )
