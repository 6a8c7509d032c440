"""Planner: a planning session whose plans become modules."""

from __future__ import annotations

from rockmate.budget import Budget, OnInfeasible
from rockmate.entry.arguments import check_plan
from rockmate.entry.module import RockmateModule
from rockmate.plan.plan import Plan
from rockmate.planning.session import PlanningSession
from rockmate.trial.steps import TrialOption


class Planner(PlanningSession):
    """Captures and measures a model once, then plans for any number of budgets.

    To make a planner takes seconds: it captures the joint graph of forward and backward, measures
    each distinct op once and finds the smallest peak. Each budget then takes milliseconds to
    seconds. `RockmateModule` does all of this in one call for one budget.

    >>> planner = Planner(model, batch)                             # doctest: +SKIP
    >>> planner.baseline_peak_bytes, planner.minimum_peak_bytes     # doctest: +SKIP
    >>> plan = planner.plan(0.4)                                    # doctest: +SKIP
    >>> print(plan.summary(), plan.lower_bound_ms)                  # doctest: +SKIP
    >>> module = planner.module_of(plan)                            # doctest: +SKIP

    Args:
        model: a module in training mode, on the device that it will train on. With `machine`, it
            may be on any device, the meta device included.
        sample_input: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. The plan holds for its shapes, dtypes and constants. Tensor values do not
            matter.
        options: all options at once; by default all have their defaults.
        **keywords: single options, by name. `rockmate.PlanOptions` documents them all.

    Raises:
        UnknownOptionError, InvalidArgumentError: as for `PlanOptions`; or `mesh` has no sizes of
            a mesh.
        RockmateError: there is a process group, which excludes a `mesh`.
        MissingCompilerError: "fused" needs a compiler that is not there.
        MarkError: a mark or the policy cannot be read or kept.
        OffloadError: values of this model cannot move to the tier, or it cannot be reached.
        InvalidSampleError: the sample does not fit the model, or nothing requires a gradient.
        UnsupportedModelError: the model cannot be captured as one static graph.
        MachineError: the machine is unknown, or its description cannot be used; or there is a
            `mesh` without a machine.

    Attributes:
        model: the model, as given.
        timings: seconds spent in "capture", "costs" and "solve", and in "compile" with
            kernels="auto". Planning for one more budget is not included.
        numerics: as given.
        fusion: what fusing has brought, group by group; None where every op runs by itself.
        baseline_peak_bytes: the activation peak without recomputation.
        baseline_ms: the time of one forward and backward without recomputation, in milliseconds.
        minimum_peak_bytes: the smallest budget that has a plan whatever the measured op times:
            without chunks. Plans in chunks meet smaller budgets;
            `InfeasibleBudgetError.minimum_bytes` is the smallest of all.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of the frozen weights that a budget bounds beside activations, if it does."""
        return 0 if self.weights is None else self.weights.num_bytes

    def module(
        self,
        budget: Budget,
        *,
        strategy: str = "rockmate",
        on_infeasible: OnInfeasible = "error",
        trial: TrialOption = "log",
    ) -> RockmateModule:
        """A module that trains within a budget; arguments and errors as for `plan`.

        `trial` is as for `RockmateModule`. The module refuses calls of other shapes.
        `RockmateModule(...)` makes one that plans for them.
        """
        call = self.planned_call(budget, strategy=strategy, on_infeasible=on_infeasible)
        return RockmateModule.of(self.model, call, trial=trial)

    def module_of(self, plan: Plan, *, trial: TrialOption = "log") -> RockmateModule:
        """A module that runs a plan which any planner made for the same step.

        `trial` is as for `RockmateModule`.

        Raises:
            PlanMismatchError: the plan was made for another step.
            InvalidArgumentError: `plan` is no `Plan`.
        """
        check_plan(plan)
        self._step.check_present()
        return RockmateModule.of(self.model, self.planned_call_of(plan), trial=trial)
