"""Random small training scripts: a model with habits, and a loop that does what scripts do.

A case is drawn from a seed. `run` trains its model, plain or wrapped, and records what a user can
see after each step: losses, gradients, weights, buffers, attributes, hooks that fired, and the
state of the generator.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, NUM_LAYERS, NUM_STEPS, ROWS = 16, 4, 4, 12

# Each case draws some habits of its model and some of its loop.
HABITS = (
    "flag",
    "integer",
    "float",
    "string",
    "list",
    "config",
    "used counter",
    "unused counter",
    "detached attribute",
    "differentiable attribute",
    "cache",
    "statistics",
    "detach",
    "shared layer",
    "tied weight",
    "dropout",
    "batch norm",
    "layer norm",
    "in-place op",
    "in-place input",
    "optional input",
    "several outputs",
    "dictionary output",
    "view output",
    "infinite head",
    "normalized input",
)
ACTIONS = (
    "other rows",
    "two calls",
    "two backwards",
    "accumulate",
    "eval call",
    "no_grad call",
    "mode of a submodule",
    "overwrite the input",
    "freeze",
    "tensor hook",
    "accumulation hook",
    "forward hook",
    "load weights",
    "write weights",
    "swap a layer",
    "input gradient",
    "change an attribute",
    "autocast",
    "leave an output out",
    "clip",
    "momentum",
    "set gradients to zero",
)


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        seed: that it was drawn from.
        habits: of the model.
        actions: of the loop, each with the step at which it happens.
        ops: of the forward: kind and layer.
        budget: as a fraction, for the wrapped run.
    """

    seed: int
    habits: frozenset[str]
    actions: tuple[tuple[str, int], ...]
    ops: tuple[tuple[str, int], ...]
    budget: float

    @staticmethod
    def of(seed: int) -> Case:
        """The case of a seed."""
        draw = random.Random(seed)
        habits = draw.sample(HABITS, draw.randint(1, 5))
        actions = draw.sample(ACTIONS, draw.randint(1, 5))
        kinds = ("linear", "gelu", "tanh", "add", "multiply")
        ops = tuple(
            (draw.choice(kinds), draw.randrange(NUM_LAYERS)) for _ in range(draw.randint(4, 9))
        )
        return Case(
            seed=seed,
            habits=frozenset(habits),
            actions=tuple((action, draw.randrange(1, NUM_STEPS)) for action in actions),
            ops=(("linear", 0), *ops),
            budget=draw.choice((0.6, 0.8, 1.0)),
        )

    def does(self, action: str, step: int) -> bool:
        """Whether the loop does something at a step, or from the first on if it is a setting."""
        return (action, step) in self.actions

    def has(self, action: str) -> bool:
        """Whether the loop does something at any step."""
        return any(action == each for each, _ in self.actions)


class Model(nn.Module):
    """A network with the habits of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        if "shared layer" in case.habits:
            self.layers[2] = self.layers[1]
        if "tied weight" in case.habits:
            self.layers[3].weight = self.layers[0].weight
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.25)
        self.first_head, self.second_head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.flag, self.integer, self.float, self.string = True, 2, 0.5, "tanh"
        self.list, self.config = [1.0, 2.0], {"scale": 1.5, "bias": True}
        self.counter, self.calls = 0, 0
        self.aux: Any = None
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        habits = self.case.habits
        if "in-place input" in habits:
            x.mul_(0.9)
        h = x if extra is None else x + extra
        if "normalized input" in habits:
            h = h * 2 - 0.5
        first = h
        for kind, layer in self.case.ops:
            h = self._op(kind, layer, h, first)
        h = self._normalized(self._scaled(h))
        if "detach" in habits:
            h = h + self.layers[1](h.detach())
        if "statistics" in habits:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            h = h - self.mean.clone()
        self._remember(h)
        return self._outputs(h)

    def _op(self, kind: str, layer: int, h: Tensor, first: Tensor) -> Tensor:
        match kind:
            case "linear":
                return self.layers[layer](h)
            case "gelu":
                return nn.functional.gelu(h)
            case "tanh":
                return h.tanh()
            case "add":
                return h + first * 0.5
            case _:
                return h * torch.sigmoid(first)

    def _scaled(self, h: Tensor) -> Tensor:
        habits = self.case.habits
        if "flag" in habits and self.flag:
            h = h * 2
        if "integer" in habits:
            h = h / self.integer
        if "float" in habits:
            h = h * self.float
        if "string" in habits:
            h = getattr(torch, self.string)(h)
        if "list" in habits:
            h = h * sum(self.list)
        if "config" in habits:
            h = h * self.config["scale"] + (1 if self.config["bias"] else 0)
        if "used counter" in habits:
            self.counter += 1
            h = h * (1 + 0.1 * self.counter)
        return h

    def _normalized(self, h: Tensor) -> Tensor:
        habits = self.case.habits
        # In the other order, the gradient of the layer norm's bias would be nothing but rounding.
        if "batch norm" in habits:
            h = self.batch_norm(h)
        if "layer norm" in habits:
            h = self.norm(h)
        if "dropout" in habits:
            h = self.dropout(h)
        return nn.functional.relu(h * 1.0, inplace=True) if "in-place op" in habits else h

    def _remember(self, h: Tensor) -> None:
        habits = self.case.habits
        if "unused counter" in habits:
            self.calls += 1
        if "detached attribute" in habits:
            self.aux = h.mean().detach()
        if "differentiable attribute" in habits:
            self.aux = h.square().mean()
        if "cache" in habits:
            self.cache["last"] = h.detach()

    def _outputs(self, h: Tensor) -> Any:
        habits, outputs = self.case.habits, [self.first_head(h)]
        if "several outputs" in habits:
            outputs.append(self.second_head(h).sin())
        if "infinite head" in habits:
            outputs.append(torch.log(self.second_head(h) * 0))
        if "view output" in habits:
            outputs.append(outputs[0][:, :2])
        if "dictionary output" in habits:
            return {f"output{index}": output for index, output in enumerate(outputs)}
        return tuple(outputs)


@dataclass
class Record:
    """What a user sees after a step, as tensors and plain values by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Script:
    """One run of a case's loop."""

    case: Case
    model: Model
    callee: nn.Module
    hooks: list[str] = field(default_factory=list)

    def train(self) -> list[Record]:
        """Runs all steps."""
        # Momentum moves a parameter with a zero gradient. Adam would take full steps on rounding.
        momentum = 0.9 if self.case.has("momentum") else 0.0
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=momentum)
        records = []
        for step in range(NUM_STEPS):
            self._change(step)
            losses = self._step(step, optimizer)
            records.append(self._record(losses))
        return records

    def inputs(self, step: int, call: int = 0) -> dict[str, Tensor]:
        """Keywords of a call."""
        generator = torch.Generator().manual_seed(100 * step + call)
        rows = ROWS - 4 if self.case.does("other rows", step) else ROWS
        x = torch.randn(rows, WIDTH, generator=generator)
        extra = torch.randn(rows, WIDTH, generator=generator)
        has_extra = "optional input" in self.case.habits and step % 2 == 1
        needs_gradient = (
            self.case.has("input gradient") and "in-place input" not in self.case.habits
        )
        x.requires_grad_(needs_gradient)
        return {"x": x, "extra": extra} if has_extra else {"x": x}

    def _step(self, step: int, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        case = self.case
        if not case.does("accumulate", step):
            optimizer.zero_grad(set_to_none=not case.has("set gradients to zero"))
        inputs = [self.inputs(step, call) for call in range(2 if case.has("two calls") else 1)]
        autocast = (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if case.has("autocast")
            else contextlib.nullcontext()
        )
        with autocast:
            losses = [self._loss(self.callee(**given), step) for given in inputs]
        if case.does("overwrite the input", step):
            for given in inputs:
                given["x"].detach().fill_(3.0)
        if case.has("two backwards"):
            for loss in losses:
                loss.backward(retain_graph=True)
        sum(losses[1:], losses[0]).backward()
        if case.has("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        gradients = [given["x"].grad for given in inputs]
        return [*(loss.detach() for loss in losses), *filter(torch.is_tensor, gradients)]

    def _loss(self, outputs: Any, step: int) -> Tensor:
        used = list(outputs.values()) if isinstance(outputs, dict) else list(outputs)
        if self.case.does("leave an output out", step) or "infinite head" in self.case.habits:
            used = used[:1]
        loss = sum((output.float().square().mean() for output in used), torch.zeros(()))
        if "differentiable attribute" in self.case.habits:
            loss = loss + self.model.aux.float()
        return loss

    def _change(self, step: int) -> None:
        for action, when in self.case.actions:
            if when == step and action in _CHANGES:
                _CHANGES[action](self, step)

    def _record(self, losses: list[Tensor]) -> Record:
        record = Record()
        for index, loss in enumerate(losses):
            record.tensors[f"loss or input gradient {index}"] = loss.clone()
        for name, parameter in self.model.named_parameters():
            record.tensors[name] = parameter.detach().clone()
            record.values[f"{name}.grad is None"] = parameter.grad is None
            if parameter.grad is not None:
                record.tensors[f"{name}.grad"] = parameter.grad.clone()
        for name, buffer in self.model.named_buffers():
            record.tensors[name] = buffer.clone()
        for name in ("flag", "integer", "float", "string", "list", "config", "counter", "calls"):
            value = getattr(self.model, name)
            record.values[name] = value.copy() if isinstance(value, list | dict) else value
        if isinstance(self.model.aux, Tensor):
            record.tensors["aux"] = self.model.aux.detach().clone()
        if "last" in self.model.cache:
            record.tensors["cache"] = self.model.cache["last"].clone()
        record.values["hooks"] = sorted(self.hooks)
        record.tensors["generator"] = torch.get_rng_state()
        return record


def _eval_call(script: Script, step: int) -> None:
    script.callee.eval()
    with torch.no_grad():
        script.callee(**script.inputs(step, 7))
    script.callee.train()


def _no_grad_call(script: Script, step: int) -> None:
    with torch.no_grad():
        script.callee(**script.inputs(step, 8))


def _mode_of_a_submodule(script: Script, _: int) -> None:
    script.model.dropout.training = False
    script.model.batch_norm.eval()


def _freeze(script: Script, _: int) -> None:
    script.model.layers[1].requires_grad_(False)


def _tensor_hook(script: Script, _: int) -> None:
    script.model.layers[0].weight.register_hook(
        lambda gradient: script.hooks.append("tensor") or gradient * 0.5
    )


def _accumulation_hook(script: Script, _: int) -> None:
    for layer in (script.model.first_head, script.model.second_head):
        layer.weight.register_post_accumulate_grad_hook(
            lambda parameter: script.hooks.append("accumulation")
        )


def _forward_hook(script: Script, _: int) -> None:
    script.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)


def _load_weights(script: Script, _: int) -> None:
    state = script.model.state_dict()
    script.model.load_state_dict({name: value * 0.9 for name, value in state.items()})


def _write_weights(script: Script, _: int) -> None:
    with torch.no_grad():
        script.model.layers[0].weight.mul_(0.5)
    script.model.layers[1].bias.data = script.model.layers[1].bias.data * 0.5


def _swap_a_layer(script: Script, step: int) -> None:
    torch.manual_seed(step)
    script.model.layers[1] = nn.Linear(WIDTH, WIDTH)


def _change_an_attribute(script: Script, _: int) -> None:
    model = script.model
    model.flag, model.integer, model.float, model.string = False, 3, 0.25, "sin"
    model.list.append(3.0)
    model.config["scale"], model.config["bias"] = 0.5, False


_CHANGES: dict[str, Callable[[Script, int], None]] = {
    "eval call": _eval_call,
    "no_grad call": _no_grad_call,
    "mode of a submodule": _mode_of_a_submodule,
    "freeze": _freeze,
    "tensor hook": _tensor_hook,
    "accumulation hook": _accumulation_hook,
    "forward hook": _forward_hook,
    "load weights": _load_weights,
    "write weights": _write_weights,
    "swap a layer": _swap_a_layer,
    "change an attribute": _change_an_attribute,
}


def run(
    case: Case, wrap: Callable[[Model, dict[str, Tensor]], nn.Module] | None = None
) -> list[Record]:
    """The records of a case's steps.

    Args:
        case: the script.
        wrap: gives what the script calls for a model and its first inputs; None: the model.
    """
    torch.manual_seed(case.seed)
    model = Model(case)
    script = Script(case, model, model)
    if wrap is not None:
        script.callee = wrap(model, script.inputs(0))
    torch.manual_seed(case.seed + 1)
    return script.train()


def difference(case: Case, ours: list[Record], theirs: list[Record]) -> str:
    """The first difference of two runs of a case, empty if there is none but rounding.

    Gradients are added in another order in some scripts. So tensors may differ by a thousandth, and
    by five hundredths where they were added in bfloat16. It is that of the largest element of the
    tensor, or of all gradients or all parameters: some are nothing but rounding. It adds up over
    the steps.
    """
    tolerance = 5e-2 if case.has("autocast") else 1e-3
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in other.values.items():
            if mine.values.get(name) != value:
                return f"step {step}: {name} is {mine.values.get(name)}, {value} in eager"
        if mine.tensors.keys() != other.tensors.keys():
            return f"step {step}: {sorted(mine.tensors.keys() ^ other.tensors.keys())}"
        largest: dict[str, float] = {}
        for name, tensor in other.tensors.items():
            largest[_kind(name)] = max(largest.get(_kind(name), 0.0), _largest(tensor))
        for name, tensor in other.tensors.items():
            scale = max(_largest(tensor), largest[_kind(name)], 1e-6)
            if not _is_close(mine.tensors[name], tensor, (step + 1) * tolerance * scale):
                return f"step {step}: {name} differs"
    return ""


def _kind(name: str) -> str:
    """What a recorded tensor is compared with."""
    if name.endswith(".grad"):
        return "gradient"
    return "parameter" if name.endswith((".weight", ".bias")) else name


def _largest(tensor: Tensor) -> float:
    return tensor.nan_to_num().abs().double().max().item() if tensor.numel() else 0.0


def _is_close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return False
    distance = (ours.nan_to_num().double() - theirs.nan_to_num().double()).abs()
    return not distance.numel() or distance.max().item() <= tolerance
