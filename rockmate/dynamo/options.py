"""The options of `torch.compile(model, backend="rockmate", options={...})`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rockmate.budget import Budget, check_on_infeasible, parse_budget
from rockmate.entry.module import RockmateModule
from rockmate.errors import InvalidArgumentError, InvalidBudgetError, check_choice
from rockmate.planning.options import PlanOptions
from rockmate.planning.strategies import STRATEGIES

# Options that speak of a module or a device that Dynamo's graph has not. It returns a flat tuple,
# in which no output has a name.
_NOT_OF_GRAPHS = ("machine", "untraced", "outputs", "mesh", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for, checked.

    Attributes:
        budget: the activation budget of a step.
        strategy: see `Planner.plan`.
        on_infeasible: see `RockmateModule`.
        planner: options of planning.
    """

    budget: Budget
    strategy: str = "rockmate"
    on_infeasible: Literal["error", "least"] = "error"
    planner: PlanOptions

    @classmethod
    def of(cls, options: Mapping[str, Any] | None, others: Mapping[str, Any]) -> Options:
        """The checked options.

        Args:
            options: as given to `torch.compile`.
            others: further arguments that `torch.compile` hands to a backend.

        Raises:
            InvalidBudgetError: there is no budget, or it cannot be read.
            UnknownOptionError: an option is unknown, or not for graphs of Dynamo's.
            InvalidArgumentError: an argument is unknown, or an option no number; an option has none
                of its values.
        """
        given = dict(options or {})
        if others:
            name, value = next(iter(others.items()))
            raise InvalidArgumentError(
                f'torch.compile(backend="rockmate") takes no {name} ({value!r}). Leave it out; the '
                'bound and all else stand in options={"budget": "6GiB", ...}.'
            )
        own = [each.name for each in fields(cls) if each.name != "planner"]
        planner = {name: given.pop(name) for name in [*given] if name not in own}
        # Outputs have no names here. So the loss is not told from others unless asked for.
        planning = PlanOptions.of(
            PlanOptions(differentiable="all"),
            planner,
            known=own,
            but=_NOT_OF_GRAPHS,
            what='the backend "rockmate" has',
        )
        if given.get("budget") is None:
            raise InvalidBudgetError(
                'budget None: torch.compile(model, backend="rockmate", options={"budget": ...}) '
                'needs one: bytes, "6GiB", or a fraction in (0, 1].'
            )
        parse_budget(given["budget"], 1 << 62)  # an unreadable one fails before all else
        check_choice("strategy", given.get("strategy", "rockmate"), STRATEGIES)
        check_on_infeasible(given.get("on_infeasible", "error"))
        return cls(**given, planner=planning)

    def module_of(self, graph: Any, budget: Budget) -> RockmateModule:
        """A module that plans for the first call of a graph."""
        module = RockmateModule(
            graph,
            budget=budget,
            strategy=self.strategy,
            on_infeasible=self.on_infeasible,
            trial="never",  # Dynamo guards what a graph depends on
            options=self.planner,
        )
        module.plan_cache.refuses_in_flight = False  # a layer that others equal is called often
        return module
