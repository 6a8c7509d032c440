"""Errors that a user can act on: each names the value, the limit and the next step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_FEW_BYTES = 100  # a budget that was hardly meant to be one of bytes


class RockmateError(Exception):
    """Base of every error that this package raises on purpose."""


class InfeasibleBudgetError(RockmateError, ValueError):
    """No schedule of this planner fits the budget.

    Attributes:
        budget_bytes: the activation budget that was asked for.
        minimum_bytes: the smallest budget for which `Planner.plan` succeeds whatever the ops are
            measured to take. One up to 10 % below is met, too, if the plan at the minimum happens
            to need no more.
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int,
        *,
        where: str = "",
        slowdown: float | None = None,
    ) -> None:
        """Build the text from the numbers.

        Args:
            budget_bytes: the budget asked for.
            minimum_bytes: the smallest one for which a schedule was found.
            where: what is running when the smallest plan is at its peak.
            slowdown: predicted step time of the smallest plan over that of no recomputation.
        """
        text = (
            f"the activation budget of {budget_bytes:,} bytes is below {minimum_bytes:,} bytes, "
            "the smallest peak found"
        )
        if where:
            text += f", which is set by {where}"
        if slowdown is not None:
            text += f"; the plan there takes {slowdown:.2f}x the step time of no recomputation"
        text += (
            f". Ask for budget={minimum_bytes} or more, make the batch smaller, or take the "
            'smallest peak where nothing fits: on_infeasible="least" (on the command line: '
            "--on-infeasible least)."
        )
        if budget_bytes <= _FEW_BYTES:
            text += f' An int is bytes: write "{budget_bytes}GiB" for GiB, '
            text += f"{budget_bytes / 100} for {budget_bytes} % of the peak without recomputation."
        super().__init__(text)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self._peak = {"where": where, "slowdown": slowdown}
        self._advices: list[str] = []

    def of_whole(self, num_parts: int, beside_bytes: int) -> InfeasibleBudgetError:
        """The error of the budget of which this one's is an equal part, without what is beside."""
        sizes = (self.budget_bytes, self.minimum_bytes)
        whole = (num_parts * (each + beside_bytes) for each in sizes)
        made = InfeasibleBudgetError(*whole, **self._peak)
        for advice in self._advices:
            made.advised(advice)
        return made

    def advised(self, advice: str) -> InfeasibleBudgetError:
        """The same error, which says more."""
        self.args = (f"{self} {advice}",)
        self._advices.append(advice)
        return self


class InfeasibleMemoryLimitError(RockmateError, ValueError):
    """A memory limit that parameters, gradients and the optimizer's state alone reach.

    Attributes:
        limit_bytes: the limit that was asked for.
        held_bytes: what they take.
    """

    def __init__(self, text: str, *, limit_bytes: int, held_bytes: int) -> None:
        super().__init__(text)
        self.limit_bytes = limit_bytes
        self.held_bytes = held_bytes


class InvalidBudgetError(RockmateError, ValueError):
    """A budget that cannot be read as bytes or as a fraction."""


class InvalidSampleError(RockmateError, ValueError):
    """The sample input does not fit the model.

    Wrong device, wrong arguments, nothing to differentiate.
    """


class NothingToTrainError(InvalidSampleError):
    """No output of a call requires a gradient."""


class UnsupportedModelError(RockmateError, ValueError):
    """The model cannot be captured as one static graph, or holds an op that cannot be planned."""


class InPlaceCollectiveError(UnsupportedModelError):
    """A forward that is traced calls a collective of `torch.distributed` itself.

    An opaque op would run it as often as each rank measures it, and ranks would wait for ever.
    """


class KernelLayoutError(UnsupportedModelError):
    """Kernels lay results out otherwise than their fake tensors, on which the capture went.

    Attributes:
        differences: calls with both layouts. Another capture has the layouts of the kernels.
    """

    def __init__(self, text: str, differences: frozenset[object]) -> None:
        super().__init__(text)
        self.differences = differences


FRAMES_ADVICE = (
    "Or keep the budget without a captured graph: "
    'plan_step(loss_fn, modules, None, budget, mode="frames") for a step, else '
    'RockmateModule(model, None, budget, mode="frames").'
)


def advise_frames(error: RockmateError) -> None:
    """Ends the text of an error of the capture in the line that works without one."""
    text = str(error)
    if not text.endswith(FRAMES_ADVICE):
        error.args = (f"{text} {FRAMES_ADVICE}",)


@contextmanager
def frames_advised() -> Iterator[None]:
    """Has the error of a model without a graph end in the line that works."""
    try:
        yield
    except UnsupportedModelError as error:
        advise_frames(error)
        raise


class UntestedVersionError(RockmateError, ImportError):
    """An interface of PyTorch or transformers does not behave as this package relies on.

    Attributes:
        name: of the interface, with its module.
    """

    def __init__(self, name: str, found: str) -> None:
        package = name.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "")
        super().__init__(
            f"{name} does not behave as rockmate relies on in {package} {version}: {found}. A "
            "captured step could silently differ from eager's. Install a version that "
            "docs/reference/versions.md lists, or report this with the output of `rockmate check "
            "--json`. ROCKMATE_SKIP_CHECK=1 goes on without the check."
        )
        self.name = name


class MachineError(RockmateError, ValueError):
    """A machine that is not known, or whose description cannot be used."""


class MissingCompilerError(RockmateError, RuntimeError):
    """Fused kernels were asked for, and there is no compiler for the device."""


class SignatureMismatchError(RockmateError, ValueError):
    """A call differs in shapes, dtypes, devices or constants from the sample of the plan."""


class TrialError(RockmateError, RuntimeError):
    """A step within the budget that was held against eager differs from it.

    The step is undone: parameters, buffers, attributes and random state are as before the call.

    Attributes:
        sets_up: whether the plain forward has added or removed hooks, as a first call may.
    """

    def __init__(self, text: str, *, sets_up: bool = False) -> None:
        super().__init__(text)
        self.sets_up = sets_up


class NotRepeatableError(RockmateError, RuntimeError):
    """The plain model's forward gives other tensors when it runs again from the same state.

    It reads or changes something that cannot be put back, so a capture or trial has changed it.
    """


class BackwardError(RockmateError, RuntimeError):
    """A backward that this kind of schedule cannot serve.

    A second one, a second derivative, `autograd.grad`.
    """


class OffloadError(RockmateError, RuntimeError):
    """Values cannot move to another memory tier, or did not arrive there or come back.

    The tier is full or gone, or the user's limit on it is reached. The module serves the next step.
    """


class SolverLimitError(RockmateError, RuntimeError):
    """A solver found neither a schedule nor a proof that there is none in its time limit."""


class PlanFileError(RockmateError, ValueError):
    """A plan's text that cannot be used.

    Cut off, damaged, of a newer format, or with a schedule that is not valid.
    """


class PlanMismatchError(RockmateError, ValueError):
    """A plan was made for another model, another sample or other options."""


class InvalidArgumentError(RockmateError, TypeError, ValueError):
    """An argument has another type, none of its values, or contradicts another one."""


def check_choice(name: str, value: object, values: Collection[str]) -> None:
    """Raises `InvalidArgumentError` unless an argument has one of its values."""
    if value not in values:
        *first, last = map(repr, values)
        raise InvalidArgumentError(f"{name} is {value!r}; choose {', '.join(first)} or {last}")


class UnknownOptionError(RockmateError, TypeError):
    """There is no option of this name. The text says the nearest one."""


class MarkError(RockmateError, ValueError):
    """A mark that cannot be read or kept.

    An unknown word, a pattern that matches nothing, two marks that contradict each other, a value
    that cannot be recomputed.
    """


class UnknownNameError(RockmateError, LookupError):
    """A name that is no value, parameter, input or submodule of the captured step."""
