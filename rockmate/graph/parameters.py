"""A model's parameters and buffers by the names that the capture gave them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rockmate._torch.members import tensor_tables


class Binding:
    """The present parameters and buffers of a module, by name.

    Attributes:
        places: for each name, the table of the submodule that holds the tensor, and its key there.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.places = {name: _place(model, name) for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        table, key = self.places[name]
        tensor = table[key]
        assert tensor is not None, f"{name} has been removed from the model"
        return tensor


def owner_names(model: nn.Module) -> dict[str, str]:
    """For each name of a tensor, the first name of the same one: tied parameters share an owner."""
    first: dict[int, str] = {}
    named = (model.named_parameters, model.named_buffers)  # buffers may have gradients
    return {
        name: first.setdefault(id(tensor), name)
        for each in named
        for name, tensor in each(remove_duplicate=False)
    }


def _place(model: nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
    path, _, key = name.rpartition(".")
    parameters, buffers = tensor_tables(model.get_submodule(path))
    return (parameters if key in parameters else buffers), key
