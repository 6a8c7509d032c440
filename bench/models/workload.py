"""What a training step of a model needs: the module, its batches, its loss, its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from bench.models.batches import TARGET, MakeBatch

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Callable[..., Any], Batch], tuple[Any, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with everything that a training step of it needs.

    Attributes:
        name: The registry name.
        model: The module, in train mode.
        layers: `layers(model)` gives the modules that "one checkpoint per layer" wraps.
        stages: `stages(model)` gives larger modules, each of several layers, which one would
            checkpoint instead; None if the model has none.
        loss: `loss(model, batch)` gives outputs and loss. The caller holds the outputs until the
            backward has ended, as a training loop does. So their bytes count alike for every peer.
        make_batch: `make_batch(seed)` gives a batch, `make_batch(seed, rows)` one of so many rows.
            Equal seeds give equal values, and all seeds give equal shapes.
        rows: Of a batch.
    """

    name: str
    model: nn.Module
    layers: Callable[[nn.Module], list[nn.Module]]
    loss: LossFunction
    make_batch: Callable[..., Batch]
    stages: Callable[[nn.Module], list[nn.Module]] | None = None
    rows: int = 0

    @property
    def sample(self) -> dict[str, Tensor]:
        """The keyword arguments of one call of the model, without a target for an outside loss."""
        return model_inputs(self.make_batch(0))

    def with_loss_inside(self) -> Workload:
        """The same step with the loss computed by the module; itself if it already is."""
        if self.loss in (own_loss, loss_alone):
            return self
        return replace(
            self,
            model=LossInside(self.model, self.loss).train(),
            layers=lambda model: self.layers(model.model),  # pyright: ignore
            stages=self.stages and (lambda model: self.stages(model.model)),  # pyright: ignore
            loss=_first_loss,
            make_batch=lambda *which: _labelled(self.make_batch(*which)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What the function of an architecture makes, from which `build` makes a workload.

    Attributes:
        model: the module.
        make_batch: a batch of so many rows drawn from a generator, on the CPU.
        rows: of a batch.
        layers: paths of the modules that "one checkpoint per layer" wraps, where a `*` stands for
            any one name; or their class.
        stages: those of larger modules; empty if it has none.
        loss: as for `Workload`.
    """

    model: nn.Module
    make_batch: MakeBatch
    rows: int
    layers: tuple[str, ...]
    stages: tuple[str, ...] = ()
    loss: LossFunction | None = None


class Step(NamedTuple):
    """The output of a model that is no library's: the loss and the prediction it came from."""

    loss: Tensor
    prediction: Tensor


def modules_at(model: nn.Module, patterns: tuple[str, ...]) -> list[nn.Module]:
    """The submodules whose paths match one of the patterns, in the model's order.

    Raises:
        ValueError: A pattern matches no submodule.
    """
    wanted = set[nn.Module]()
    for pattern in patterns:
        found = {
            module
            for path, module in model.named_modules()
            if _matches(path, pattern) or type(module).__name__ == pattern
        }
        if not found:
            msg = (
                f"no submodule of {type(model).__name__} has a path like {pattern!r}; "
                "the library may have moved it"
            )
            raise ValueError(msg)
        wanted |= found
    return [module for module in model.modules() if module in wanted]


def _matches(path: str, pattern: str) -> bool:
    names, wanted = path.split("."), pattern.split(".")
    return bool(path) and len(names) == len(wanted) and all(map(fnmatchcase, names, wanted))


def own_loss(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    """The loss that the model itself computes."""
    outputs = model(**batch)
    return outputs, outputs.loss


def loss_alone(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    """The loss of a model that returns nothing else."""
    loss = model(**batch)
    return loss, loss


def outside_cross_entropy(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    """Cross entropy of the model's outputs and the target."""
    outputs = model(**model_inputs(batch))
    return outputs, functional.cross_entropy(outputs, batch[TARGET])


def outside_squared_error(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    """Squared error of the model's outputs and the target."""
    outputs = model(**model_inputs(batch))
    return outputs, functional.mse_loss(outputs, batch[TARGET])


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """The batch without its target."""
    return {name: value for name, value in batch.items() if name != TARGET}


class LossInside(nn.Module):
    """A model with an outside loss, computed inside."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        """`loss` as in `Workload`."""
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, labels: Tensor, **inputs: Tensor) -> tuple[Tensor, Any]:
        """The loss, then the model's outputs."""
        outputs, loss = self.loss(self.model, {**inputs, TARGET: labels})
        return loss, outputs


def _labelled(batch: Batch) -> Batch:
    return {"labels" if name == TARGET else name: value for name, value in batch.items()}


def _first_loss(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    loss, outputs = model(**batch)
    return outputs, loss
