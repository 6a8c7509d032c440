"""Behaviours of selective checkpointing that PyTorch promises, for policies of plans.

What is saved runs once, also with several results, random or changed in place afterwards; decisions
may depend on what a policy counts; checkpoints nest; values are those of eager. A policy that a
model's own checkpoint has is held against that checkpoint in eager mode.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import REGIMES, budget_for, check_against_eager, counts_of
from made_of import made_of
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rockmate import InvalidSampleError, MarkError, Planner, RockmateModule, UnsupportedModelError

_aten = torch.ops.aten
SAVE, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
PREFER = CheckpointPolicy.PREFER_RECOMPUTE


def sample() -> Tensor:
    return torch.randn(64, 32)


def check(model: nn.Module, **options: Any) -> None:
    x = sample()
    check_against_eager(model, x, lambda module, _: ((), module(x)), **options)


def saving(*ops: Any, other: CheckpointPolicy = RECOMPUTE) -> Callable[..., CheckpointPolicy]:
    return lambda context, op, *args, **kwargs: SAVE if op in ops else other


class Mixed(nn.Module):
    """Products, an op with several results, a split, dropout, and a change in place."""

    def __init__(self, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(64)
        self.wrap = wrap

    def inner(self, x: Tensor) -> Tensor:
        left, right = self.norm(self.first(x)).split(32, 1)
        hidden = nn.functional.dropout(torch.tanh(left) * torch.sigmoid(right), 0.25)
        hidden.mul_(2.0)  # PyTorch's policies refuse this of a value that they save
        return torch.sin(self.second(hidden))

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x) if self.wrap is None else self.wrap(self.inner, x)
        return out.square().mean()


@pytest.mark.parametrize(
    "op",
    [_aten.addmm.default, _aten.native_layer_norm.default, _aten.tanh.default],
    ids=["product", "several results", "elementwise"],
)
def test_what_must_be_saved_runs_once(op: Any) -> None:
    name = str(op).split(".")[1]
    model, x = Mixed(), sample()
    expected = counts_of(copy.deepcopy(model), x)[name]
    planner = Planner(model, x, policy=saving(op, other=PREFER))
    for regime in REGIMES:
        module = planner.module(budget_for(planner, regime), trial="never")
        assert counts_of(module, x)[name] == expected
    check(model, policy=saving(op, other=PREFER))


def test_all_decisions_are_kept_and_values_are_eagers() -> None:
    """Of a policy that recomputes all but products: random ops draw the same numbers again."""
    check(Mixed(), policy=saving(_aten.addmm.default))


def test_a_policy_that_counts() -> None:
    """Every second product is saved, as the policy's own state says."""
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not _aten.addmm.default:
            return PREFER
        seen.append(op)
        return SAVE if len(seen) % 2 else RECOMPUTE

    @made_of(lambda: {"layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(4))})
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x).exp())
            return x.mean()

    plan = Planner(Chain(), sample(), policy=policy).plan(1.0)
    marks = {each.name: each.mark for each in plan.snapshot.storages if each.name[:5] == "addmm"}
    assert list(marks.values()) == ["save", "recompute", "save", "recompute"]
    assert len(seen) == 4


@pytest.mark.parametrize(("answer", "mark"), [(True, "save"), (False, None)])
def test_the_older_form_of_a_policy(answer: bool, mark: str | None) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return answer if op is _aten.tanh.default else PREFER

    plan = Planner(Mixed(), sample(), policy=policy).plan(1.0)
    (storage,) = (each for each in plan.snapshot.storages if each.name == "tanh")
    assert (storage.mark or None) == mark


def selectively(policy: Any) -> Callable[..., Any]:
    """Wraps a call as one that PyTorch checkpoints selectively."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda run, *args: checkpoint(run, *args, use_reentrant=False, context_fn=contexts)


def nested(run: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint of a checkpoint."""
    inner = functools.partial(checkpoint, run, use_reentrant=False)
    return checkpoint(lambda *given: inner(*given), *args, use_reentrant=False)


def later_dropout(run: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint that leaves the generator as it is in its recomputation."""
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=True)


WRAPS = {
    "plain": later_dropout,
    "nested": nested,
    "products": selectively([_aten.addmm.default]),
    "all but products": selectively(saving(_aten.tanh.default, _aten.sigmoid.default)),
}


@pytest.mark.parametrize("existing", ["lift", "honour"])
@pytest.mark.parametrize("name", WRAPS)
def test_checkpoints_of_each_kind_train_as_in_eager(name: str, existing: str) -> None:
    check(Mixed(WRAPS[name]), existing_checkpoints=existing)


@pytest.mark.parametrize("name", ["plain", "products", "all but products"])
def test_an_honoured_checkpoint_runs_what_eagers_does(name: str) -> None:
    """With memory to spare, no op runs more often than under PyTorch's own checkpoint.

    And those do that its policy saves: as often as without a checkpoint.
    """
    model, x = Mixed(WRAPS[name]), sample()
    theirs = counts_of(copy.deepcopy(model), x)
    plain = counts_of(Mixed(), x)
    module = RockmateModule(model, x, 1.0, existing_checkpoints="honour", trial="never")
    ours = counts_of(module, x)
    for op in ("addmm", "native_layer_norm", "tanh", "sigmoid", "sin"):
        assert plain[op] <= ours[op] <= theirs[op], op
    if name == "products":
        assert ours["addmm"] == plain["addmm"] == 2
    if name == "all but products":
        assert ours["tanh"] == plain["tanh"] == 1
        assert ours["native_layer_norm"] == 2


def in_half(run: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint whose forward and recomputation run under autocast."""
    half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    return checkpoint(run, *args, use_reentrant=False, context_fn=lambda: (half(), half()))


@pytest.mark.parametrize("existing", ["lift", "honour"])
def test_checkpoints_with_contexts_of_their_own(existing: str) -> None:
    check(Mixed(in_half), existing_checkpoints=existing)
    plan = Planner(Mixed(in_half), sample(), existing_checkpoints=existing).plan(1.0)
    marks = {storage.mark for storage in plan.snapshot.storages}
    assert marks == ({"", "recompute"} if existing == "honour" else {""})
    assert any("bfloat16" in op.call for op in plan.snapshot.ops)


@made_of(lambda *, use_reentrant: {"layer": nn.Linear(32, 32), "use_reentrant": use_reentrant})
class Dropped(nn.Module):
    """Two checkpointed calls that leave the random state, and one of them draws."""

    def forward(self, x: Tensor) -> Tensor:
        drawing = functools.partial(torch.nn.functional.dropout, p=0.5)
        for run in (lambda x: drawing(self.layer(x)).exp(), torch.sin):
            x = checkpoint(run, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x.square().mean()


@pytest.mark.parametrize("existing", ["lift", "honour"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_call_that_eager_recomputes_with_other_numbers_is_refused(
    use_reentrant: bool, existing: str
) -> None:
    x = sample().requires_grad_()
    with pytest.raises(
        UnsupportedModelError, match="a checkpointed call in the model draws numbers"
    ):
        Planner(Dropped(use_reentrant=use_reentrant), x, existing_checkpoints=existing)
    Planner(Mixed(later_dropout), sample(), existing_checkpoints=existing)


def test_lifted_checkpoints_recompute_nothing_with_memory_to_spare() -> None:
    x = sample()
    for wrap in WRAPS.values():
        ours = counts_of(RockmateModule(Mixed(wrap), x, 1.0, trial="never"), x)
        assert ours["native_layer_norm"] == ours["tanh"] == 1


def test_a_checkpoint_with_outputs_that_are_no_tensors() -> None:
    @made_of(lambda: {"layer": nn.Linear(32, 32)})
    class Several(nn.Module):
        def inner(self, x: Tensor) -> tuple[Tensor, int, dict[str, Tensor]]:
            hidden = torch.tanh(self.layer(x)).exp()
            return hidden, x.shape[1], {"other": hidden.sin()}

        def forward(self, x: Tensor) -> Tensor:
            hidden, width, others = checkpoint(self.inner, x, use_reentrant=False)
            return (hidden + others["other"]).square().mean() / width

    for existing in ("lift", "honour"):
        check(Several(), existing_checkpoints=existing)


def test_a_policy_is_not_asked_where_nothing_is_planned() -> None:
    asked: list[Any] = []
    model = Mixed()
    module = RockmateModule(model, sample(), 1.0, policy=lambda *args, **_: asked.append(1) or SAVE)
    number = len(asked)
    module.eval()
    with torch.no_grad():
        module(sample())
    assert len(asked) == number > 0


def test_a_policy_for_a_model_that_needs_no_gradient() -> None:
    model = Mixed().requires_grad_(False)
    with pytest.raises(InvalidSampleError):
        Planner(model, sample(), policy=saving(_aten.tanh.default))


READING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda value: value.sum().item(),
    "comparison": lambda value: bool(value.sum() > 0),
    "list": lambda value: value.tolist(),
    "numpy": lambda value: value.detach().numpy(),
    "shape": lambda value: len(value.nonzero()),
}


@pytest.mark.parametrize("name", READING)
def test_a_policy_cannot_read_values(name: str) -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is _aten.tanh.default:
            READING[name](args[0])
        return SAVE

    with pytest.raises(MarkError, match=r"reads a value .*aten.tanh.default.* sees shapes"):
        Planner(Mixed(), sample(), policy=policy)


def test_an_error_of_a_policy_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        Planner(Mixed(), sample(), policy=lambda *_, **__: 1 / 0)


# --- marks that cover no value --------------------------------------------------------------------


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Unflatten(1, (4, 8)))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).view(-1, 32)).sum()


NONE = {
    "head": ({"head": "recompute"}, "is read outside of head"),
    "returned": ({"aten.sum": "recompute"}, "the model returns sum"),
    "views": ({"aten.view": "save"}, "has its own memory"),
}


@pytest.mark.parametrize("name", NONE)
def test_a_mark_that_covers_no_value_has_a_row_and_a_line(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    marks, why = NONE[name]
    ((pattern, word),) = marks.items()
    with caplog.at_level(logging.WARNING):
        planner = Planner(Headed(), sample(), marks={**marks, "aten.tanh": "save"})
    (line,) = [each.message for each in caplog.records if "covers no value" in each.message]
    assert f"{pattern!r} ({word})" in line
    assert why in line
    rows = [row for row in planner.plan(1.0).summary().splitlines() if row.startswith("marked")]
    assert len(rows) == 2
    assert rows[0].startswith("marked save         1 value, 8.0 KiB, by 'aten.tanh'")
    assert rows[1].startswith(f"marked {word:<9}    covers no value, by {pattern!r}")
