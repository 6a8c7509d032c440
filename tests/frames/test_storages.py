"""Containers of tensors, taken apart and put together as PyTorch's own functions do it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from transformers.modeling_outputs import BaseModelOutput

from rockmate._torch.pytree import tree_flatten, tree_map
from rockmate.state.tensors import tensors_in, with_changed


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


def nested() -> Any:
    one, two, three = (torch.full((2,), float(number)) for number in range(3))
    return (
        [one, (two, None, 3, "text", True)],
        {"b": Pair(three, [one]), "a": (), "none": None},
        OrderedDict(z=two, y=[three]),
        BaseModelOutput(last_hidden_state=one, hidden_states=(two, three)),
        torch.nn.Parameter(one),
    )


def test_what_changes_is_what_pytorch_changes() -> None:
    def change(value: Any) -> Any:
        return value + 1 if isinstance(value, torch.Tensor) else value

    ours, ours_spec = tree_flatten(with_changed(change, nested()))
    theirs, theirs_spec = tree_flatten(tree_map(change, nested()))
    assert ours_spec == theirs_spec
    assert list(map(str, ours)) == list(map(str, theirs))


def test_tensors_are_the_leaves_of_pytorch() -> None:
    value = nested()
    leaves = [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]
    ours = tensors_in(value)
    assert len(leaves) == 10
    assert sorted(map(id, ours)) == sorted(map(id, leaves))
