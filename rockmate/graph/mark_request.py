"""What the user marks: patterns with a word, a policy of selective checkpointing, and their text.

A *mark* says what a plan must do with values of the forward:

| word | the op | the value |
|---|---|---|
| save | is never recomputed | is live from the forward to its last read in the backward |
| recompute | may be recomputed | is not live when the forward ends and the backward begins |

A pattern is the path of a submodule (`"encoder.*.mlp"`), an op (`"aten.mm"`), or a name that
`rockmate.name` has given to a value. A request can be written as plain values and read again,
because a plan says how its step was captured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy

from rockmate._torch.dispatch import is_op
from rockmate.capture.options import ExistingCheckpoints
from rockmate.errors import MarkError

WORDS = ("save", "recompute")
Policy = Callable[..., Any] | Sequence[Any]

# A decision of a policy on one op -> the letter that stands for it in a request's text.
_LETTERS = {
    CheckpointPolicy.MUST_SAVE: "s",
    CheckpointPolicy.MUST_RECOMPUTE: "r",
    CheckpointPolicy.PREFER_SAVE: "-",
    CheckpointPolicy.PREFER_RECOMPUTE: "-",
}
WORD_OF_LETTER = {"s": "save", "r": "recompute"}


@dataclass(frozen=True, slots=True)
class Mark:
    """One mark of one value or op.

    Attributes:
        word: "save" or "recompute".
        source: what asked for it: a pattern, "policy", or the name of a value.
        scope: the submodule or the checkpointed call that the mark covers. A value that is read
            outside of it is not recomputed for this mark. None: the value itself is marked.
        is_named: whether the value was marked by its own name.
    """

    word: str
    source: str
    scope: str | None = None
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkRequest:
    """All marks of one step.

    Attributes:
        patterns: each pattern with its word, in the user's order.
        policy: the user's policy; None if there is none or its decisions are known.
        decisions: a letter for each op of the forward that the policy was asked about.
        honours_checkpoints: whether checkpointed calls in the model's code become marks.
    """

    patterns: tuple[tuple[str, str], ...] = ()
    policy: Callable[..., Any] | None = None
    decisions: str = ""
    honours_checkpoints: bool = False

    @staticmethod
    def of(
        marks: Mapping[Any, str] | None = None,
        policy: Policy | None = None,
        existing_checkpoints: ExistingCheckpoints = "lift",
    ) -> MarkRequest:
        """The request of the user's arguments.

        Raises:
            MarkError: a word, a pattern or the policy cannot be read.
        """
        return MarkRequest(
            patterns=_patterns(marks),
            policy=None if policy is None else _policy_function(policy),
            honours_checkpoints=existing_checkpoints == "honour",
        )

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> MarkRequest:
        """The request that `to_json` wrote; earlier releases wrote the patterns as text."""
        marks = content.get("marks", ())
        patterns = json.loads(marks) if isinstance(marks, str) else marks
        runs = re.findall(r"(\d+)([sr-])", content.get("policy", ""))
        return MarkRequest(
            patterns=tuple((pattern, word) for pattern, word in patterns),
            decisions="".join(int(number) * letter for number, letter in runs),
            honours_checkpoints=content.get("existing_checkpoints") == "honour",
        )

    def to_json(self) -> dict[str, Any]:
        """The request as plain values, whose policy is decided; empty without marks."""
        runs = (f"{len(list(run))}{letter}" for letter, run in groupby(self.decisions))
        content = {
            "marks": list(map(list, self.patterns)),
            "policy": " ".join(runs),
            "existing_checkpoints": "honour" if self.honours_checkpoints else "",
        }
        return {name: value for name, value in content.items() if value}

    def uncovered(self, covering: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        """The patterns and decisions that are on no value: (word, source).

        Args:
            covering: the marks that are on values: (word, source).
        """
        asked = [(word, pattern) for pattern, word in self.patterns]
        decided = [word for letter, word in WORD_OF_LETTER.items() if letter in self.decisions]
        asked += [(word, "policy") for word in decided]
        return [each for each in asked if each not in covering]

    def decided(self, decisions: Iterable[Any]) -> MarkRequest:
        """The request with the policy's decisions in its place.

        Args:
            decisions: what the policy returned for each op of the forward, in order.

        Raises:
            MarkError: one is no decision that a plan can keep.
        """
        return replace(self, policy=None, decisions="".join(map(_letter, decisions)))


NO_MARKS = MarkRequest()


def _patterns(marks: Any) -> tuple[tuple[str, str], ...]:
    if marks is None:
        return ()
    if not isinstance(marks, Mapping):
        msg = (
            f"marks are {marks!r}; give a mapping of patterns to words, as "
            '{"encoder.*.mlp": "recompute", "aten.mm": "save"}.'
        )
        raise MarkError(msg)
    found = []
    for pattern, word in marks.items():
        text = pattern if isinstance(pattern, str) else str(pattern)
        if not (isinstance(pattern, str) and pattern) and "." not in text:
            msg = f"the mark's pattern {pattern!r} is no text; give a path, an op or a name."
            raise MarkError(msg)
        if word not in WORDS:
            msg = (
                f"the mark {text!r} has the word {word!r}; choose one of "
                f"{', '.join(map(repr, WORDS))}."
            )
            raise MarkError(msg)
        found.append((text, word))
    return tuple(found)


def _policy_function(policy: Policy) -> Callable[..., Any]:
    """The policy as a function; a list of ops saves those and leaves the others free."""
    if not isinstance(policy, str | Mapping) and isinstance(policy, Iterable):
        ops = list(policy)
        for op in ops:
            if not is_op(op):
                msg = (
                    f"the policy's list has {op!r}, which is no overload of an op; give "
                    "torch.ops.aten.mm.default for torch.ops.aten.mm."
                )
                raise MarkError(msg)
        preferred = CheckpointPolicy.PREFER_RECOMPUTE
        return lambda _, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE if op in ops else preferred
    if not callable(policy):
        msg = (
            f"policy is a {type(policy).__name__}; give a function of (context, op, *args, "
            "**kwargs) that returns a CheckpointPolicy, or a list of ops to save."
        )
        raise MarkError(msg)
    return policy


def _letter(decision: Any) -> str:
    if isinstance(decision, bool):  # the older form of a policy
        decision = CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    if decision not in _LETTERS:
        msg = (
            f"the policy returned {decision!r}; a plan keeps MUST_SAVE and MUST_RECOMPUTE of "
            "torch.utils.checkpoint.CheckpointPolicy, and takes PREFER_SAVE and "
            "PREFER_RECOMPUTE for no mark."
        )
        raise MarkError(msg)
    return _LETTERS[decision]
