"""`rockmate.fully_shard`, which stands for PyTorch's function for as long as scripts call it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def sharded_by_layers(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: Collection[type[nn.Module]] = (),
    **options: Any,
) -> nn.Module:
    """A model after `torch.distributed.fsdp.fully_shard` of its layers, then of itself.

    Args:
        module: the model. It is changed in place.
        mesh: see PyTorch's function, as for `options`.
        units: classes of layers. None given: the items of the outermost lists of modules
            (`nn.ModuleList`, `nn.ModuleDict`, `nn.Sequential`).
        **options: of PyTorch's function.
    """
    from torch.distributed.fsdp import fully_shard as of_torch  # takes seconds to load

    layers = [each for each in module.modules() if isinstance(each, tuple(units))]
    for layer in dict.fromkeys(layers if units else _layers(module)):
        of_torch(layer, mesh=mesh, **options)
    of_torch(module, mesh=mesh, **options)
    return module


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LISTS):
            yield from [child] if next(child.parameters(), None) is not None else []
        else:
            yield from _layers(child)


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: Collection[type[nn.Module]] = (),
    ignored: Collection[str] = (),
    bucket_bytes: int = 0,
    **options: Any,
) -> nn.Module:
    """Deprecated: `torch.distributed.fsdp.fully_shard` of each layer, then of the model.

    Args:
        module: the model.
        mesh: see PyTorch's function, as for `options`.
        units: classes of layers; none given: the items of lists of modules.
        ignored: names of parameters that stay whole.
        bucket_bytes: has no effect.
        **options: of PyTorch's function, as `mp_policy`.
    """
    warnings.warn(
        "rockmate.fully_shard is PyTorch's function, and goes in a later release. Write: from "
        "torch.distributed.fsdp import fully_shard; then fully_shard(layer) for each layer, and "
        "fully_shard(model).",
        DeprecationWarning,
        stacklevel=2,
    )
    whole = {module.get_parameter(name) for name in ignored}
    options |= {"ignored_params": whole} if whole else {}
    return sharded_by_layers(module, mesh, units=units, **options)
