"""The options of planning, in one place: what each does, its values and its default.

`Planner`, `RockmateModule`, sweeps, fits, the backend of `torch.compile` and the command line read
them. To add one, add a field and its paragraph here, and read it where it acts. Entry points take
keywords as they come and make a `PlanOptions` first, so no signature repeats the list. This module
loads neither torch nor a solver, so that `rockmate --help` is quick.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from rockmate.capture.options import CaptureOptions, ExistingCheckpoints, Kernels, Numerics
from rockmate.errors import InvalidArgumentError, UnknownOptionError
from rockmate.fusion.report import COMPILE_LIMIT_S

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from rockmate.costs.machine import Machine
    from rockmate.graph.mark_request import Policy
    from rockmate.graph.step_options import StepOptions
    from rockmate.planning.simulated_ranks import MeshSizes, Shard
    from rockmate.schedule.offload_request import OffloadRequest

logger = logging.getLogger(__name__)

Weights = Literal["by_limit", "resident", "auto", "all"]
AT_HOME = ("auto", "all")
"""Those that let weights be at home."""
_BUDGET_HINT = "A budget: Planner(model, sample).plan(budget)."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(CaptureOptions):
    """All options of planning. `Planner` and `RockmateModule` take each as a keyword, or them all.

    >>> options = PlanOptions(numerics="bitwise", untraced=["router"])    # doctest: +SKIP
    >>> planner = Planner(model, batch, options)                       # doctest: +SKIP
    >>> planner = Planner(model, batch, numerics="bitwise")            # doctest: +SKIP

    Options are plain values, but for functions and a `Machine`: `dataclasses.asdict` gives what a
    file holds, and `PlanOptions(**values)` reads it.

    Attributes:
        differentiable: "loss" gives only the loss a backward, if the output has a loss. "all" gives
            one to every output that has one in eager mode.
        outputs: "loss" returns None for all output tensors but the loss, so their memory is
            released.
        gradients: "accumulated" adds each parameter's gradient to `.grad` as soon as it is final.
            "returned" returns all gradients at the end of the backward, which
            `torch.autograd.grad` needs. They are then all in memory together.
        time_limit_s: seconds after which a search stops looking for faster schedules; `Plan.status`
            is then "time_limit". A feasible budget has a plan however short the limit. It bounds
            "checkmate" for each budget, too.
        gap_tolerance: distance to the lower bound, as a fraction of the time without recomputation,
            at which a search ends. A larger one plans faster, a smaller one searches longer.
        progress: shows a progress bar while ops are measured, and while a plan takes long to find:
            the best time and its gap to the lower bound.
        cache: whether `RockmateModule` takes the plan that an earlier start has stored for the same
            step, bound and options, and stores its own; see docs/guide/plans.md.
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
        weights: "resident" leaves the model's weights in the device's memory. "auto" lets frozen
            ones be at home in the tier of `offload`, from which steps fetch them: a budget then
            bounds activations and frozen weights together. "all" lets trained ones, too, whose
            gradients and optimizer's states are then at home. "by_limit" is "auto" where a
            `memory_limit` has no plan with resident weights, which the log says, and else
            "resident". See docs/guide/weights.md.
        mesh: plans the step of one rank of a cluster that need not be there, of the `machine`:
            (8,) shards parameters over 8 ranks, (2, 8) keeps 2 replicas of 8 shards each. The model
            stays as it is: a copy without memory is sharded. There are plans and a frontier, but no
            module.
        shard: shards the copy on the mesh, in place: a function of the model and the device mesh.
            By default `torch.distributed.fsdp.fully_shard` shards each item of lists of modules,
            then the model. With {"data": 4, "tensor": 8} for a mesh it may parallelize the
            model over `mesh["tensor"]` first.

    Raises:
        UnknownOptionError: there is no option of a name; the text says the nearest one.
        InvalidArgumentError: an option has none of its values, or they contradict each other
            ("bitwise" and "auto"); or `in_flight` is no whole number from 1 on; `progress` is no
            bool, or a limit or tolerance no number.
    """

    time_limit_s: float = 30.0
    gap_tolerance: float = 1e-3
    progress: bool = False
    cache: bool = True
    machine: str | Path | Machine | None = None
    numerics: Numerics = "any_order"
    kernels: Kernels = "eager"
    compile_limit_s: float = COMPILE_LIMIT_S
    marks: Mapping[Any, str] | None = None
    policy: Policy | None = None
    existing_checkpoints: ExistingCheckpoints = "lift"
    offload: str | None = None
    host_budget: int | str | None = None
    weights: Weights = "by_limit"
    mesh: MeshSizes | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        CaptureOptions.__post_init__(self)
        for each in fields(self):
            value, default = getattr(self, each.name), each.default
            if isinstance(default, float):
                _check_positive(each.name, value, default)
            elif isinstance(default, bool) and not isinstance(value, bool):
                raise InvalidArgumentError(f"{each.name} is {value!r}; give True or False")
        if self.weights == "all" and self.gradients == "returned":
            msg = "weights='all' has gradients at home in .grad, and gradients='returned' has none"
            raise InvalidArgumentError(f"{msg} there; leave one of them out")
        if self.numerics == "bitwise" and self.kernels == "auto":
            msg = (
                "numerics='bitwise' keeps the same bits at every budget, and kernels='auto' "
                "chooses kernels that round otherwise by the budget. Give kernels 'eager' or "
                "'fused'."
            )
            raise InvalidArgumentError(msg)

        if self.weights in AT_HOME and self.offload is None:
            msg = f"weights={self.weights!r} needs a home for them; give offload="
            raise InvalidArgumentError(f"{msg}'host' or 'disk:FOLDER'")

    @classmethod
    def of(
        cls,
        options: PlanOptions | None,
        keywords: Mapping[str, Any],
        *,
        known: Collection[str] | None = None,
        but: Collection[str] = (),
        what: str = "there is",
    ) -> PlanOptions:
        """The options with others in the place of some.

        Args:
            options: given as one; None for the defaults.
            keywords: given by name.
            known: further names that the error for an unknown one may propose.
            but: names of options that are not taken.
            what: who has no such option, as the error begins.
        """
        if options is not None and not isinstance(options, PlanOptions):
            msg = f"options is {options!r}; give PlanOptions(...), or single options by name."
            raise InvalidArgumentError(f"{msg} {_BUDGET_HINT}")
        names = [each.name for each in fields(cls) if each.name not in but]
        near = [*(each for each in known or () if each not in ("return", "keywords")), *names]
        for name in keywords:
            if name not in names:
                nearest = difflib.get_close_matches(name, near, n=1)
                hint = f"Did you mean {nearest[0]}?" if nearest else f"Take {', '.join(near)}."
                hint = _BUDGET_HINT if name == "budget" and "budgets" not in near else hint
                raise UnknownOptionError(f"{what} no option {name!r}. {hint}")
        return replace(options or cls(), **keywords)

    def with_homes(self, model: nn.Module, error: Exception) -> PlanOptions:
        """The options with frozen weights at home, where a limit has no other plan.

        Raises:
            error: the options say otherwise, or no weight can go home.
        """
        from rockmate.offload.weight_home import named_weights

        if self.weights != "by_limit" or self.offload is None or not named_weights(model):
            raise error
        logger.warning("frozen weights may be at home in %s, since %s", self.offload, error)
        return replace(self, weights="auto")

    @property
    def changed(self) -> dict[str, Any]:
        """The options that have not their default, by name."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @property
    def step(self) -> StepOptions:
        """What the capture of a step needs of them.

        Raises:
            MarkError: a mark or the policy cannot be read.
        """
        from rockmate.graph.mark_request import MarkRequest
        from rockmate.graph.step_options import StepOptions

        return StepOptions(
            **{each.name: getattr(self, each.name) for each in fields(CaptureOptions)},
            marks=MarkRequest.of(self.marks, self.policy, self.existing_checkpoints),
            # Gradients of a parameter with several uses are added to each other first, as in eager.
            is_bitwise=self.numerics == "bitwise",
            kernels="fused" if self.kernels == "fused" else "eager",
        )

    @property
    def moves(self) -> OffloadRequest | None:
        """Where values may move.

        Raises:
            ValueError, InvalidBudgetError, OffloadError: as for `OffloadRequest.parse`.
        """
        from rockmate.schedule.offload_request import OffloadRequest

        request = OffloadRequest.parse(self.offload, self.host_budget)
        return request and replace(request, with_trained=self.weights == "all")


def _check_positive(name: str, value: Any, default: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name} is {value!r}; give a number above 0, such as {default}"
        raise InvalidArgumentError(msg)
    if not value > 0:
        msg = f"{name} is {value}; it must be above 0, such as {default}"
        raise InvalidArgumentError(msg)
