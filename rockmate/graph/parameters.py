"""TODO: graph.parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rockmate._torch.members import tensor_tables


class Binding:
    """Finds the present parameters and buffers of a module by the names that the capture gave them.

    Attributes:
        places: for each name the mapping that the tensor stands in, and the key that it stands under.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.places = {name: self._place(model, name) for name in names}

    @staticmethod
    def _place(model: nn.Module, name: str) -> tuple[Mapping[str, torch.Tensor | None], str]:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        parameters, buffers = tensor_tables(owner)
        return (parameters if leaf in parameters else buffers), leaf

    def __getitem__(self, name: str) -> torch.Tensor:
        holder, leaf = self.places[name]
        tensor = holder[leaf]
        assert tensor is not None, f"{name} has been removed from the model"
        return tensor


def owner_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter the first name of the same tensor: tied parameters share one."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.named_parameters(remove_duplicate=False)
    }
