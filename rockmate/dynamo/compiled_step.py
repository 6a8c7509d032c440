"""What the graphs of one `torch.compile` have in common: options, breaks, one budget.

Most models are one graph, and the budget is that of one. A graph break leaves several parts, and
what one saves is live while later ones run. So a part is refused if another one waits for its
backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rockmate._torch.dynamo import Break
from rockmate.budget import Budget
from rockmate.dynamo.options import Options
from rockmate.errors import UnsupportedModelError
from rockmate.runtime.pending_steps import PendingSteps, is_pending

_HOW_TO_SEE = "torch.compile(..., fullgraph=True) or TORCH_LOGS=graph_breaks explains each"
_DATA_PARALLEL = (
    "the compiled module is a DistributedDataParallel, whose graph Dynamo splits into one for each "
    "bucket of gradients, and the budget is that of one graph. Compile the model first: "
    "DistributedDataParallel(torch.compile(model, ...)). Or switch the splitting off: "
    "torch._dynamo.config.optimize_ddp = False."
)


class CompiledStep:
    """What the graphs of one `torch.compile` have in common.

    Attributes:
        options: the user's.
        breaks: the graph breaks that Dynamo has told of.
        pending: the forwards of all graphs, so that a parameter of several has its hooks run once.
        budget: the activation budget. A fraction becomes bytes with the first plan.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.breaks: list[Break] = []
        self.pending = PendingSteps()
        self.budget: Budget = options.budget
        self._nodes: list[weakref.ref[Any]] = []  # of autograd, from forwards of parts

    def refuse_second_part(self) -> None:
        """Raises if a part of a broken frame is about to run while another waits for its backward.

        Raises:
            UnsupportedModelError: as said; it names the lines of the breaks. Also for the first
                part of a module that Dynamo splits for DistributedDataParallel.
        """
        if any(each.is_of_data_parallel for each in self.breaks):
            raise UnsupportedModelError(_DATA_PARALLEL)
        nodes = ((each, each()) for each in self._nodes)
        self._nodes = [each for each, node in nodes if node is not None and is_pending(node)]
        if not self._nodes:
            return
        places = "; ".join(dict.fromkeys(map(str, self.breaks)))
        raise UnsupportedModelError(
            "the compiled model runs in several graphs, and the budget is that of one. Dynamo "
            f"broke the graph at: {places}. Remove the breaks ({_HOW_TO_SEE}), or have the whole "
            "model planned without torch.compile: RockmateModule(model, budget=...)."
        )

    def note_part(self, outputs: Sequence[Any]) -> None:
        """Notes the forward of a part, by its outputs."""
        nodes = [each.grad_fn for each in outputs if isinstance(each, Tensor) and each.grad_fn]
        self._nodes += map(weakref.ref, nodes)
