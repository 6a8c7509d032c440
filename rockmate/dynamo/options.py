"""The options of `torch.compile(model, backend="rockmate", options={...})`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rockmate.budget import Budget, check_on_infeasible, parse_budget
from rockmate.errors import InvalidBudgetError
from rockmate.module import RockmateModule
from rockmate.planner import Planner
from rockmate.planning.strategies import STRATEGIES

GraphBreaks = Literal["error", "share"]
# The values of an option, the default first.
_CHOICES = {
    "graph_breaks": ("error", "share"),
    "larger": ("plan", "refuse"),
    "differentiable": ("all", "loss"),
    "gradients": ("accumulated", "returned"),
    "kernels": ("eager", "fused", "auto"),
    "numerics": ("any_order", "bitwise"),
}
_KINDS: dict[str, tuple[type, ...]] = {
    "time_limit_s": (int, float),
    "compile_limit_s": (int, float),
    "gap_tolerance": (int, float),
    "progress": (bool,),
}
# Of the arguments of `Planner`: those that speak of a module or a device that Dynamo's graph has
# not. Dynamo's graph returns a flat tuple, in which no output has a name.
_NOT_OF_GRAPHS = {"self", "model", "sample_input", "machine", "untraced", "outputs"}


def _planner_options() -> frozenset[str]:
    """Names of the options that go to `Planner` as they are."""
    return frozenset(inspect.signature(Planner.__init__).parameters) - _NOT_OF_GRAPHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for, checked.

    Attributes:
        budget: the activation budget of a step.
        graph_breaks: what happens where a step has several graphs.
        strategy: see `Planner.plan`.
        on_infeasible: see `RockmateModule`.
        larger: see `RockmateModule`.
        planner: options of `Planner`.
    """

    budget: Budget
    graph_breaks: GraphBreaks = "error"
    strategy: str = "rockmate"
    on_infeasible: Literal["error", "least"] = "error"
    larger: Literal["plan", "refuse"] = "plan"
    planner: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, others: Mapping[str, Any]) -> Options:
        """The checked options.

        Args:
            options: as given to `torch.compile`.
            others: further arguments that `torch.compile` hands to a backend.

        Raises:
            InvalidBudgetError: there is no budget, or it cannot be read.
            TypeError: an option, or another argument, is unknown.
            ValueError: an option has none of its values.
        """
        given = dict(options or {})
        if others:
            name, value = next(iter(others.items()))
            msg = (
                f'torch.compile(backend="rockmate") takes no {name} ({value!r}). Leave it out; the '
                'bound and all else stand in options={"budget": "6GiB", ...}.'
            )
            raise TypeError(msg)
        own = ("graph_breaks", "strategy", "on_infeasible", "larger")
        for name in given:
            _check_name(name, ["budget", *own, *sorted(_planner_options())])
        if given.get("budget") is None:
            msg = (
                'budget None: torch.compile(model, backend="rockmate", options={"budget": ...}) '
                'needs one: bytes, "6GiB", or a fraction in (0, 1].'
            )
            raise InvalidBudgetError(msg)
        parse_budget(given["budget"], 1 << 62)  # an unreadable one fails before all else
        for name, values in _CHOICES.items():
            if given.get(name, values[0]) not in values:
                msg = f"{name} is {given[name]!r}; choose one of {', '.join(map(repr, values))}"
                raise ValueError(msg)
        for name, kinds in _KINDS.items():
            if name in given and not isinstance(given[name], kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                msg = f"{name} is {given[name]!r}; give {wanted}"
                raise TypeError(msg)
        if given.get("strategy", "rockmate") not in STRATEGIES:
            known = ", ".join(map(repr, STRATEGIES))
            msg = f"strategy is {given['strategy']!r}; choose one of {known}"
            raise ValueError(msg)
        check_on_infeasible(given.get("on_infeasible", "error"))
        return cls(
            budget=given.pop("budget"),
            **{name: given.pop(name) for name in own if name in given},
            # Outputs have no names here. So the loss is not told from others unless asked for.
            planner={"differentiable": "all", **given},
        )

    def module_of(self, graph: Any, budget: Budget) -> RockmateModule:
        """A module that plans for the first call of a graph."""
        return RockmateModule(
            graph,
            budget=budget,
            strategy=self.strategy,
            on_infeasible=self.on_infeasible,
            larger=self.larger,
            trial="never",  # Dynamo guards what a graph depends on
            **self.planner,
        )


def _check_name(name: str, known: list[str]) -> None:
    """Raises for an option that does not exist."""
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    msg = f'the backend "rockmate" has no option {name!r}; {meant}It has {", ".join(known)}.'
    raise TypeError(msg)
