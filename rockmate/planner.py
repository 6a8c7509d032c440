"""Planner: a planning session whose plans become modules."""

from __future__ import annotations

from rockmate.budget import Budget, OnInfeasible
from rockmate.module import RockmateModule
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
        differentiable: "loss" gives only the loss a backward, if the output has a loss. "all" gives
            one to every output that has one in eager mode.
        outputs: "loss" returns None for all output tensors but the loss, so their memory is
            released.
        gradients: "accumulated" adds each parameter's gradient to `.grad` as soon as it is final.
            "returned" returns all gradients at the end of the backward, which
            `torch.autograd.grad` needs. They are then all in memory together.
        time_limit_s: seconds of wall time, for two things. The search for one plan of the default
            strategy stops looking for faster schedules after it, and `Plan.status` is then
            "time_limit". However short the limit, a budget that is feasible has a plan: the
            smallest peak is found beforehand, and a schedule of that search is the least that is
            returned. And all solves of the default strategy together take it, those for chunks
            included: one takes at most half of the rest, and a problem cut short is answered from
            its convex hull, found in polynomial time. The lower bound of a budget may take as long
            again, and so may each budget of "checkmate".
        gap_tolerance: distance to the lower bound, as a fraction of the time without recomputation,
            at which a search ends. A larger one plans faster, a smaller one searches longer.
        progress: shows a progress bar while ops are measured, and while a plan takes long to find:
            the best time and its gap to the lower bound.
        machine: estimates costs for a machine instead of measuring them here: a name as "h100", or
            the path of a description (see `rockmate.costs.machine`). For a model on another kind of
            device, there are plans and a frontier, but no module.
        untraced: paths of submodules to leave out of the capture, for control flow that depends on
            tensor values. Each runs as it is, with its memory and time measured. The rest is
            planned around it. Recurrent layers are always left out.
        numerics: "any_order" takes the fastest plan, in chunks where that is faster by more than
            noise: the loss block, or feed-forward blocks, then run in chunks of their rows, which
            adds the same numbers in another order. "bitwise" leaves chunks out: gradients are the
            same bits at every budget, and those of eager unless kernels are fused. Gradients of one
            parameter from several uses, as of tied weights, then wait for each other as in eager,
            and so take memory.
        kernels: "eager" runs PyTorch's own kernels, with eager's bits. "fused" runs groups of
            pointwise ops, normalizations and reductions as one kernel each, compiled by Inductor
            before ops are measured. The numbers then differ from eager's by rounding, and are the
            same bits for every budget without chunks. "auto" plans with both and takes the faster
            plan for each budget; without a compiler it takes eager's, with a line in the log.
        compile_limit_s: seconds that compiling the kernels of a step may take. Compilers are then
            stopped, and groups that are not ready stay unfused, as `fusion` says.
        marks: what every plan must save or recompute: a mapping of patterns to "save" or
            "recompute". A pattern is the path of a submodule ("encoder.*.mlp"), an op ("aten.mm"),
            or a name that `rockmate.name` gave. See docs/guide/marks.md.
        policy: decides about each op of the forward, as for
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`: a function, or a list of
            ops to save.
        existing_checkpoints: "lift" undoes checkpointed calls in the model's code, with one line in
            the log. "honour" takes them for marks.
        in_flight: number of forwards that run before the backward of the first. A peak then counts
            the saved values of all of them.
        offload: lets values move to another memory tier and back: "host" for pinned memory of the
            host of a GPU, "disk:FOLDER" for a file in a folder. Its rates are measured here, or
            those of the `machine`. None moves nothing.
        host_budget: most bytes that moved values take there, an int or a size as "32GiB"; None for
            no limit.
        mesh: plans the step of one rank of a cluster that need not be there, of the `machine`:
            (8,) shards parameters over 8 ranks, (2, 8) keeps 2 replicas of 8 shards each. The model
            stays as it is: a copy without memory is sharded. There are plans and a frontier, but no
            module.
        shard: shards the copy on the mesh, in place; by default `rockmate.fully_shard`. A function
            of the model and the device mesh, as `functools.partial(rockmate.fully_shard,
            mp_policy=policy)`. With {"data": 4, "tensor": 8} for a mesh it may parallelize the
            model over `mesh["tensor"]` first.

    Raises:
        TypeError: `time_limit_s` or `gap_tolerance` is no number.
        ValueError: one of them is not above 0; `numerics` or `kernels` has none of its values, or
            they contradict each other ("bitwise" and "auto"); or `mesh` has no sizes of a mesh.
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

    def module(
        self,
        budget: Budget,
        *,
        strategy: str = "rockmate",
        on_infeasible: OnInfeasible = "error",
        trial: TrialOption = "never",
    ) -> RockmateModule:
        """A module that trains within a budget; arguments and errors as for `plan`.

        `trial` is as for `RockmateModule`. The module refuses calls of other shapes.
        `RockmateModule(...)` makes one that plans for them.
        """
        call = self.planned_call(budget, strategy=strategy, on_infeasible=on_infeasible)
        return RockmateModule.of(self.model, call, trial=trial)

    def module_of(self, plan: Plan, *, trial: TrialOption = "never") -> RockmateModule:
        """A module that runs a plan which any planner made for the same step.

        `trial` is as for `RockmateModule`.

        Raises:
            PlanMismatchError: the plan was made for another step.
        """
        self._step.check_present()
        return RockmateModule.of(self.model, self.planned_call_of(plan), trial=trial)
