"""The options of one captured step: what was asked for, and what its capture has decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rockmate.capture.options import CaptureOptions
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.ir import Graph
from rockmate.graph.mark_request import NO_MARKS, MarkRequest
from rockmate.graph.pass_options import PassOptions

StepKernels = Literal["eager", "fused"]
_ALWAYS_WRITTEN = ("differentiable", "outputs", "gradients")
# Written as texts with commas by earlier releases.
_LISTS = {"untraced", "hooked", "unfused"}
# The type of an option -> what is written.
_PLAIN: dict[type, Callable[[Any], Any]] = {tuple: list, Chunks: str}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(CaptureOptions):
    """How one step is captured. A plan has those of its step: a capture with them gives the step.

    Attributes:
        differentiable: as for `PlanOptions`, as are `outputs`, `gradients`, `untraced` and
            `in_flight`.
        marks: what plans must save or recompute; after a capture with the policy's decisions.
        hooked: names of parameters with whole gradients. None takes those with a tensor hook.
        is_bitwise: masks are read, and `hooked` of None takes those with several gradients, too.
        kernels: "fused" runs groups of ops as one kernel each.
        unfused: keys of the groups that stay as they are; None measures.
        loss_chunks: the loss block or feed-forward blocks in chunks; None leaves them whole.
    """

    marks: MarkRequest = NO_MARKS
    hooked: tuple[str, ...] | None = None
    is_bitwise: bool = False
    kernels: StepKernels = "eager"
    unfused: tuple[str, ...] | None = None
    loss_chunks: Chunks | None = None

    @property
    def traced(self) -> dict[str, Any]:
        """Arguments of `capture_joint`."""
        return {
            "differentiable": self.differentiable,
            "outputs": self.outputs,
            "untraced": self.untraced,
            "keeps_checkpoints": self.marks.honours_checkpoints,
            "reads_masks": self.is_bitwise,
        }

    @property
    def are_exact(self) -> bool:
        """Whether the ops of the step are eager's, one by one."""
        return self.kernels == "eager" and not self.loss_chunks

    def for_passes(self, owner_of: Mapping[str, str], *, like: Graph | None = None) -> PassOptions:
        """The options of passes over a step that is captured with these; see `PassOptions`."""
        hooked = self.hooked or ()
        return PassOptions(hooked=hooked, owner_of=owner_of, like=like, marks=self.marks)

    def to_json(self) -> dict[str, Any]:
        """The options of a captured step as plain values, those aside that have their default."""
        found = {}
        for each in fields(self):
            value = getattr(self, each.name)
            default = () if each.name == "hooked" else each.default
            if each.name in _ALWAYS_WRITTEN or value != default:
                found[each.name] = _PLAIN.get(type(value), lambda same: same)(value)
        found.pop("marks", None)
        return found | self.marks.to_json()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StepOptions:
        """The options that `to_json` wrote, or an earlier release, which wrote texts alone.

        Raises:
            TypeError, ValueError: the content has another form.
        """
        found: dict[str, Any] = {"hooked": (), **content, "marks": MarkRequest.from_json(content)}
        for name in (
            "policy", "existing_checkpoints", "contiguous_convolutions", "output_layouts",
            "memory_format",
        ):  # fmt: skip
            found.pop(name, None)
        for name in _LISTS & found.keys():
            is_text, value = isinstance(found[name], str), found[name]
            found[name] = tuple(value.split(",") if is_text and value else value)
        if "loss_chunks" in found:
            found["loss_chunks"] = Chunks.parse(found["loss_chunks"])
        found["in_flight"] = int(found.get("in_flight", 1))
        return cls(**found)
