"""Random small training scripts: a model of unusual layers, and a loop with unusual habits.

A script is drawn from a seed. `run` trains its model, plain or wrapped, and records what a user can
see after each step: losses, gradients, parameters, buffers, attributes, hooks, what the script has
collected, and the state of random numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import script_layers
import torch
from script_layers import LAYERS, ROWS, WIDTH, Block
from script_loops import BATCHES, LOOPS
from torch import Tensor, nn

NUM_STEPS = 4
KINDS = (*LAYERS, *LOOPS)
MODES = ("plan", "auto", "frames")
_OF_GRADIENTS = ("[0].gradients", "[0].other gradients", "[0].seen", "[0].parameters")


@dataclass(frozen=True)
class Script:
    """One script.

    Attributes:
        seed: that it was drawn from.
        layers: kinds of its model, in order.
        habits: kinds of its loop.
        mode: in which it is wrapped.
        share: budget over eager's measured peak.
        has_sample: whether it is wrapped with its first batch.
    """

    seed: int
    layers: tuple[str, ...]
    habits: tuple[str, ...]
    mode: str
    share: float
    has_sample: bool

    @staticmethod
    def of(seed: int, mode: str | None = None, kinds: tuple[str, ...] | None = None) -> Script:
        """The script of a seed. Seeds that follow each other go through all kinds and modes.

        The first seeds have one kind each, later ones up to five.

        Args:
            seed: any number.
            mode: instead of the drawn one.
            kinds: instead of the drawn ones.
        """
        draw = random.Random(seed)
        first = KINDS[seed % len(KINDS)]
        most = 0 if seed < len(KINDS) else 2
        layers = draw.sample(sorted(LAYERS), draw.randint(0, most))
        habits = draw.sample(sorted(LOOPS), draw.randint(0, most))
        drawn = {first, *layers, *habits} if kinds is None else set(kinds)
        chosen = sorted(drawn & set(LAYERS))
        draw.shuffle(chosen)
        # What holds the batch is put around it last, and once.
        habits = sorted(drawn & set(LOOPS), key=lambda each: (each in BATCHES, each))
        num_batches = len(drawn & set(BATCHES))
        habits = habits[: len(habits) - max(0, num_batches - 1)]
        return Script(
            seed=seed,
            layers=tuple(chosen),
            habits=tuple(habits),
            mode=mode or MODES[(seed + seed // len(KINDS)) % len(MODES)],
            share=draw.choice((0.7, 1.0)),
            has_sample=draw.random() < 0.5,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of model and loop."""
        return (*self.layers, *self.habits)


class Net(nn.Module):
    """Blocks, and the layers of a script among them."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.layers = nn.ModuleList(LAYERS[name]() for name in script.layers)

    def forward(self, x: Any, given: Any = None, **arguments: Any) -> Tensor:
        return self.encode(x, given, **arguments)

    def encode(self, x: Any, given: Any = None, **arguments: Any) -> Tensor:
        arguments = (given or {}) | arguments
        x = x if isinstance(x, Tensor) else x.x
        scale = getattr(x, "domain_scale", 1.0)
        h = self.stem(x) * scale
        for index, block in enumerate(self.blocks):
            h = block(h)
            for layer in self.layers[index : index + 1]:
                taken = getattr(layer, "takes", None)
                h = layer(h) if taken is None else layer(h, arguments[taken])
        return self.head(h)


@dataclass
class Run:
    """A script while it runs."""

    script: Script
    model: Net
    callee: Any
    habits: list[Any]
    seen: list[Any] = field(default_factory=list)
    taps: list[Any] = field(default_factory=list)
    others: Any = field(default_factory=nn.ModuleList)
    given: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    make_optimizer: Callable[..., Any] = field(default=lambda p: torch.optim.SGD(p, 0.01))
    optimizer: Any = None
    num_micro_batches: int = 1
    is_positional: bool = False
    sets_to_none: bool = True
    dtype: torch.dtype = torch.float32
    saved: Any = None
    copied: Any = None
    prefetched: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    last_output: Any = None
    around: Callable[[], Any] = contextlib.nullcontext  # of a call

    def train(self, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
        """Runs steps; the record of each."""
        trained = [*self.model.parameters(), *self.others.parameters()]
        self.optimizer = self.make_optimizer([each for each in trained if each.requires_grad])
        records = []
        for step in range(num_steps):
            self.prepare_step(step)
            losses = [loss.detach() for loss in self.forward_and_backward(step)]
            for habit in self.habits:
                habit.after(self, step)
            for layer in self.model.layers:
                getattr(layer, "after_backward", int)()
            record = {"loss": losses} | self.record()
            self.optimizer.step()
            records.append(record | {"parameters": _copied(dict(self.model.named_parameters()))})
            self.optimizer.zero_grad(set_to_none=self.sets_to_none)
        return records

    def prepare_step(self, step: int) -> None:
        """What the script changes before a step."""
        for layer in self.model.layers:
            getattr(layer, "each_step", lambda _: None)(step)
        for habit in self.habits:
            habit.before(self, step)

    def prefetch(self, step: int) -> None:
        """Makes the batches of a step ahead."""
        for call in range(4):
            self.prefetched[step, call] = self.inputs(step, call)

    def inputs(self, step: int, call: int = 0) -> dict[str, Any]:
        """Keywords of a call."""
        if (step, call) in self.prefetched:
            return self.prefetched.pop((step, call))
        generator = torch.Generator().manual_seed(100 * step + call)
        rows = ROWS
        for habit in self.habits:
            rows = habit.rows(step, rows)
        extras = {
            "ids": torch.randint(0, 40, (ROWS + 16,), generator=generator),
            "cuts": torch.tensor([[4, 8], [8, 20, 24], [rows], [16]][(step + call) % 4][:rows]),
            "number": torch.tensor(step + call),
            "temperature": 1.0 + 0.5 * ((step + call) % 3),
            "task": "ab"[(step + call) % 2],
            "optional": torch.randn(ROWS + 16, WIDTH, generator=generator) if step % 2 else None,
        }
        taken = {getattr(layer, "takes", None) for layer in self.model.layers}
        x = torch.randn(rows, WIDTH, generator=generator).to(self.dtype)
        given = {"x": x} | {name: value for name, value in extras.items() if name in taken}
        for habit in self.habits:
            given = habit.arguments(self, step, given)
        return given

    def call(self, step: int, call: int) -> Any:
        """Output of a call of the wrapped model."""
        given = self.inputs(step, call)
        self.given.append(given)

        def plain() -> Any:
            with self.around():
                if self.is_positional:
                    rest = {name: value for name, value in given.items() if name != "x"}
                    return self.callee(given["x"], rest)
                return self.callee(**given)

        run = plain
        for habit in self.habits:
            run = lambda habit=habit, run=run: habit.call(self, step, run)  # noqa: E731
        return run()

    def forward_and_backward(self, step: int) -> list[Tensor]:
        """The losses of a step."""
        found: list[Tensor] = []
        for micro_batch in range(self.num_micro_batches):
            self.given.clear()
            self.losses = []
            with contextlib.ExitStack() as stack:
                for habit in self.habits:
                    stack.enter_context(habit.context(self, step))
                for number in range(max((habit.num_calls for habit in self.habits), default=1)):
                    output = self.call(step, 2 * micro_batch + number)
                    self.last_output = output.detach()
                    self.losses.append(self.loss(step, output))
                    del output
            for habit in self.habits:
                habit.between(self, step)
            run: Callable[[], None] = lambda: sum(self.losses[1:], self.losses[0]).backward()  # noqa: E731
            for habit in self.habits:
                run = lambda habit=habit, run=run: habit.backward(self, step, run)  # noqa: E731
            run()
            found += self.losses
        return found

    def loss(self, step: int, output: Tensor) -> Tensor:
        """Of one call."""
        loss = output.float().square().mean()
        for habit in self.habits:
            loss = habit.loss(self, step, output, loss)
        for layer in self.model.layers:
            if hasattr(layer, "extra_loss"):
                loss = loss + 0.1 * layer.extra_loss().float()
        return loss

    def record(self) -> dict[str, Any]:
        """What a user sees after a backward."""
        model = self.model
        numpy_state: Any = np.random.get_state()
        return {
            "gradients": {n: _copied(p.grad) for n, p in model.named_parameters()},
            "gradients of inputs": [_copied(getattr(g["x"], "grad", None)) for g in self.given],
            "other gradients": [_copied(each.grad) for each in self.others.parameters()],
            "buffers": _copied(dict(model.named_buffers())),
            "attributes": {name: _attributes(each) for name, each in model.named_modules()},
            "globals": _copied([script_layers.SCALE, sorted(script_layers._TABLE)]),
            "hooks": {
                name: len((each if name else self.callee)._forward_hooks)
                for name, each in model.named_modules()
            },
            "seen": _copied(self.seen),
            "random": [torch.get_rng_state(), random.getstate(), numpy_state[1].tolist()],
        }


def _copied(value: Any) -> Any:
    """The same in memory of its own; what is no number, text or container of these, by its type."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.to_dense().clone() if value.layout != torch.strided else value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list) or type(value) is tuple:
        return [_copied(each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Without the methods that TorchScript keeps at a first call."""
    return {
        name: _copied(value)
        for name, value in vars(module).items()
        if not (name.startswith("_") or isinstance(value, torch._C.ScriptMethod))
    }


def run_of(script: Script, wrap: Callable[[Net, dict[str, Any]], nn.Module] | None = None) -> Run:
    """A script, ready to train.

    Args:
        script: the script.
        wrap: gives what the script calls for a model and its first inputs; None: the model.
    """
    script_layers.SCALE, script_layers.Settings.scale = 1.0, 1.0
    script_layers.Settings.table["scale"] = 1.0
    script_layers.ClassAttributeThatIsRead.scale = 1.0
    script_layers._TABLE.clear()
    script_layers._ramp.cache_clear()
    _seed(script.seed)
    model = Net(script)
    run = Run(script, model, model, [LOOPS[name]() for name in script.habits])
    for habit in run.habits:
        habit.prepare(run)
    if wrap is not None:
        for layer in model.layers:
            getattr(layer, "each_step", lambda _: None)(0)
        run.callee = wrap(model, run.inputs(0) if script.has_sample else {})
        run.is_positional = False
    _seed(script.seed + 1)
    return run


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def difference(ours: Any, theirs: Any, path: str = "", *, rounding: float = 0.0) -> str:
    """Where two records first differ; empty if nowhere.

    Args:
        ours: of one run.
        theirs: of another.
        path: of both within a record.
        rounding: share of the largest value of a tensor, or of 1 where sums cancel, by which others
            may differ, where they are gradients or come of them: parameters, and all from the
            second step on.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{path}: {sorted(ours.keys() ^ theirs.keys(), key=str)} in one of both"
        pairs = [(f"{path}.{key}", ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} elements, {len(theirs)} in eager"
        pairs = [(f"{path}[{n}]", *both) for n, both in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        return _tensor_difference(ours, theirs, path, rounding)
    else:
        is_same = type(ours) is type(theirs) and (ours == theirs or theirs != theirs)
        return "" if is_same else f"{path}: {_short(ours)}, {_short(theirs)} in eager"
    found = (difference(a, b, name, rounding=rounding) for name, a, b in pairs)
    return next(filter(None, found), "")


def _tensor_difference(ours: Tensor, theirs: Tensor, path: str, rounding: float) -> str:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{path}: {ours.shape} {ours.dtype}, {theirs.shape} {theirs.dtype} in eager"
    if torch.equal(ours, theirs):
        return ""
    if path.startswith("[0].") and not path.startswith(_OF_GRADIENTS):
        rounding = 0.0
    far = (ours.double() - theirs.double()).abs()
    largest = theirs.double().abs().nan_to_num().amax() if theirs.numel() else 0
    if (
        torch.equal(ours.isnan(), theirs.isnan())
        and not (far.nan_to_num() > rounding * max(largest, 1.0)).any()
    ):
        return ""
    return f"{path}: differs by {far.max():.2g} of {largest:.2g}"


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
