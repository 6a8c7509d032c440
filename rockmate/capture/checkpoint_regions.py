"""Checkpointed calls in a model's forward: which nodes each of them made.

A planned step replaces checkpoints: their recomputation is captured as equal calls, which are
merged, and the plan recomputes what it has to. A request may take them for marks instead
(`existing_checkpoints="honour"`), so each node of a checkpointed call says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from rockmate._torch.checkpoints import checkpoints_observed
from rockmate._torch.graphs import on_node_created
from rockmate.capture.huggingface import modules_with_checkpointing
from rockmate.capture.roles import Capture, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.ops.rng import is_random

logger = logging.getLogger(__name__)

# Keys in a node's `meta`: the checkpointed calls that made it, outermost first; and what their
# policy says of it ("save", "recompute", or "" for no mark). Without a policy there is no decision.
REGIONS, DECISION = "checkpoint_regions", "checkpoint_decision"
# Whether it draws random numbers, and in eager other ones when the call is recomputed.
_IS_REDRAWN = "checkpoint_is_redrawn"

# PyTorch writes the decision of a selective checkpoint to this key, and leaves it set behind the
# call.
_TORCH_DECISION = "recompute"
_WORDS = {CheckpointPolicy.MUST_SAVE: "save", CheckpointPolicy.MUST_RECOMPUTE: "recompute"}


class CheckpointRegions:
    """The checkpointed calls of one trace.

    Attributes:
        num_calls: number of calls so far, those within others included.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._running: list[tuple[str, bool, bool]] = []
        self._selected: list[fx.Node] = []

    @contextlib.contextmanager
    def region(self, is_selective: bool, restores_random_state: bool) -> Iterator[None]:
        """The context of one call."""
        self.num_calls += 1
        self._running.append((f"call {self.num_calls}", is_selective, restores_random_state))
        try:
            yield
        finally:
            self._running.pop()

    def note(self, node: fx.Node) -> None:
        """Writes the running calls to a node."""
        if self._running:
            node.meta[REGIONS] = tuple(name for name, _, _ in self._running)
            if self._running[-1][1]:
                self._selected.append(node)
            is_redrawn = not all(restores for _, _, restores in self._running)
            node.meta[_IS_REDRAWN] = is_redrawn and is_random(node.target)

    def note_decisions(self) -> None:
        """Reads the decisions of selective checkpoints, which PyTorch makes after each op."""
        for node in self._selected:
            decision = node.meta.get(_TORCH_DECISION)
            node.meta[DECISION] = "" if decision is None else _WORDS.get(decision, "")


@contextlib.contextmanager
def checkpoint_regions() -> Iterator[CheckpointRegions]:
    """Records the checkpointed calls of a forward that is traced meanwhile."""
    regions = CheckpointRegions()
    with checkpoints_observed(regions.region), on_node_created(regions.note):
        yield regions


def num_checkpoints(graph: fx.Graph) -> int:
    """The number of checkpointed calls that made a node of a graph."""
    return len({name for node in graph.nodes for name in node.meta.get(REGIONS, ())})


def refuse_unequal(model: nn.Module, capture: Capture) -> None:
    """Raises `UnsupportedModelError` for a checkpointed call that eager recomputes otherwise.

    It updates a buffer, which eager does twice: a batch norm counts each batch twice. Or it draws
    random numbers, and eager draws other ones.
    """
    what, advice = "", "Take the checkpoint off, since a plan recomputes instead"
    for node in capture.joint.graph.nodes:
        if node.meta.get(_IS_REDRAWN):
            what = f"a checkpointed call in {node.meta.get('module') or 'the model'} draws numbers"
            advice = "Have it draw the same ones, preserve_rng_state=True"
    layers = [each for each in modules_with_checkpointing(model) if _is_layer(each)]
    whole = {id(each) for layer in layers for each in layer.buffers()}
    update = RoleKind.BUFFER_UPDATE
    updated = {role.name: node for node, role in capture.outputs if role.kind is update}
    for name, buffer in model.named_buffers():
        if (node := updated.get(name)) and (id(buffer) in whole or node.meta.get(REGIONS)):
            what = what or f"{name} is updated in a checkpointed call"
    if what:
        msg = f"{what}, and eager, which runs the call twice, does so again. {advice}."
        raise UnsupportedModelError(msg)


def _is_layer(module: nn.Module) -> bool:
    """Whether it checkpoints its own calls, not those of modules within."""
    return any(each.__name__ == "GradientCheckpointingLayer" for each in type(module).__mro__)


def log_lifted(model: nn.Module, num_checkpoints: int) -> None:
    """Says that checkpoints in a model's code are the plan's to replace.

    Args:
        model: the model.
        num_checkpoints: number of checkpointed calls in its captured forward.
    """
    if modules_with_checkpointing(model):
        logger.warning(
            "gradient checkpointing is off in the planned forward: the plan recomputes instead"
        )
    elif num_checkpoints:
        logger.warning(
            "%d checkpointed calls in the model's code are lifted: the plan recomputes instead "
            '(existing_checkpoints="honour" takes them for marks)',
            num_checkpoints,
        )
