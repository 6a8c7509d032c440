"""The main job on real input.

One language model trained twice, eager and inside an activation budget, and compared.

Both runs start from the same weights and see the same batches, random states and optimizer; they
take their steps in turn, so that drift of the machine moves both times alike. The text is the
sources of Python's standard library, which every machine has. Peaks are those of
`rockmate._torch.allocator.timeline`: the largest excess, within one forward and backward, over the
bytes allocated when the forward was called. `.grad` exists before. Runs on the CPU.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate._torch.allocator import Timeline, timeline
from rockmate._util import end_stages, is_terminal, progress_bar
from rockmate.budget import size_text
from rockmate.entry.module import RockmateModule
from rockmate.entry.planner import Planner
from rockmate.errors import InfeasibleBudgetError, InvalidArgumentError
from rockmate.plan.plan import Plan

Batch = Mapping[str, torch.Tensor]

BACKWARD_MARK = "rockmate.demo::backward"
_HEAD_WIDTH, _NUM_BYTE_VALUES = 64, 256  # of the GPT-2
_STEP_LENGTHS = 16  # of a sequence, from its beginning in one step to that in the next
_LEARNING_RATE = 1e-4
_NUM_RECORDED_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the two runs: memory over one step, then loss and time of each."""

    memory: Timeline
    losses: list[float] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Both runs, the plan and what it took to make it."""

    title: str
    eager: Run
    planned: Run
    plan: Plan
    planning_s: float
    stage_s: Mapping[str, float]
    equal_weights: bool

    @property
    def equal_losses(self) -> bool:
        """Whether each step's loss is the same number in both runs."""
        return self.eager.losses == self.planned.losses

    @property
    def fits(self) -> bool:
        """Whether the measured peak is inside the budget."""
        return self.planned.memory.peak_bytes <= self.plan.budget_bytes

    @property
    def succeeded(self) -> bool:
        """Whether everything that is promised came true."""
        return self.equal_losses and self.equal_weights and self.fits

    @property
    def measured_ratio(self) -> float:
        """Median over the steps of the planned run's time over eager's time of the same step."""
        pairs = zip(self.planned.times_ms, self.eager.times_ms, strict=True)
        return statistics.median(planned / eager for planned, eager in pairs)


# --- the two runs ---------------------------------------------------------------------------------


def run(arguments: Namespace) -> DemoResult:
    """Trains both ways, by the arguments of the command.

    Raises `InvalidArgumentError` and the package's other errors.
    """

    def say(line: str) -> None:
        if not arguments.quiet:
            end_stages()
            sys.stderr.write(f"{line}\n")

    model, batches = _built(arguments), _batches(arguments)
    ours = copy.deepcopy(model)

    say("measuring eager's activation peak")
    eager = Run(memory=_memory_of_step(model, model, batches[0]))
    say(
        f"eager's peak is {size_text(eager.memory.peak_bytes)}; planning for {arguments.budget} of "
        "the peak without recomputation"
    )
    start = time.perf_counter()
    module, stage_s = _wrap(ours, batches[0], arguments)
    planning_s = time.perf_counter() - start
    planned = Run(memory=_memory_of_step(module, ours, batches[0]))
    lanes = [(model, model, eager), (ours, module, planned)]
    _train_in_turn(lanes, batches, show=not arguments.quiet)
    return DemoResult(
        title=_title(model, arguments),
        eager=eager,
        planned=planned,
        plan=module.plan,
        planning_s=planning_s,
        stage_s=stage_s,
        equal_weights=all(map(torch.equal, model.parameters(), ours.parameters())),
    )


def _memory_of_step(call: Callable[..., Any], owner: nn.Module, batch: Batch) -> Timeline:
    # The first step makes `.grad` and library buffers; with those in place the others are steps
    # like any other. Of those the one with the largest peak, and the one least disturbed by the
    # rest of the machine, is shown.
    _step(call, batch, seed=0)
    recorded = []
    for _ in range(_NUM_RECORDED_STEPS):
        owner.zero_grad(set_to_none=False)
        recorded.append(timeline(lambda: _step(call, batch, seed=0)))
    owner.zero_grad(set_to_none=False)
    return min(recorded, key=lambda memory: (-memory.peak_bytes, memory.duration_s))


def _step(call: Callable[..., Any], batch: Batch, *, seed: int) -> float:
    """Forward and backward from a fixed random state.

    The outputs live until it is over, as in a loop that logs them.
    """
    torch.manual_seed(seed)
    outputs = call(**batch)
    with torch.profiler.record_function(BACKWARD_MARK):
        outputs.loss.backward()
    return outputs.loss.item()


def _wrap(
    model: nn.Module, batch: Batch, arguments: Namespace
) -> tuple[RockmateModule, Mapping[str, float]]:
    """The module, and seconds of stages of its planning."""
    progress = not arguments.quiet and is_terminal()
    try:
        # The demo promises every bit.
        planner = Planner(model, batch, progress=progress, numerics="bitwise")
        module = planner.module(arguments.budget, trial="never")  # it compares by itself
    except InfeasibleBudgetError as error:
        # The fraction that was asked for tells what it is one of.
        share = arguments.budget * error.minimum_bytes / max(error.budget_bytes, 1)
        msg = f"{error} As a fraction: --budget {math.ceil(1000 * share) / 1000:.3f}."
        raise InvalidArgumentError(msg) from error
    return module, dict(planner.timings)


def _train_in_turn(
    lanes: Sequence[tuple[nn.Module, Callable[..., Any], Run]],
    batches: Sequence[Batch],
    *,
    show: bool,
) -> None:
    owners = [owner for owner, *_ in lanes]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=_LEARNING_RATE) for each in owners]
    bar = progress_bar(
        batches, desc="training, eager and planned in turn", unit="step", disable=not show
    )
    for index, batch in enumerate(bar):
        for (owner, call, run), optimizer in zip(lanes, optimizers, strict=True):
            start = time.perf_counter()
            run.losses.append(_step(call, batch, seed=index + 1))
            run.times_ms.append((time.perf_counter() - start) * 1e3)
            optimizer.step()
            owner.zero_grad(set_to_none=False)
        bar.set_postfix_str(" | ".join(f"loss {run.losses[-1]:.4f}" for *_, run in lanes))


# --- model and text -------------------------------------------------------------------------------


def _built(arguments: Namespace) -> nn.Module:
    """A GPT-2 over bytes, from its configuration: nothing is downloaded."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=_NUM_BYTE_VALUES,
        n_positions=max(arguments.tokens, 2),
        n_layer=arguments.layers,
        n_head=max(1, arguments.width // _HEAD_WIDTH),
        n_embd=arguments.width,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    if arguments.width % config.n_head:
        raise InvalidArgumentError(
            f"--width {arguments.width} does not divide into heads of {_HEAD_WIDTH}. Take a "
            f"multiple of {_HEAD_WIDTH}."
        )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # it would be taken anyway, but with a warning
    return model


def _batches(arguments: Namespace) -> list[Batch]:
    """One batch a step.

    Each sequence of a batch advances through a part of the text of its own.
    """
    # The sources of the standard library's public top-level modules, by name.
    files = sorted(Path(os.__file__).parent.glob("[!_]*.py"))
    text = b"".join(path.read_bytes() for path in files)
    length = arguments.tokens
    step_bytes, stretch_bytes = length * _STEP_LENGTHS, len(text) // arguments.batch
    if stretch_bytes < arguments.steps * step_bytes:
        raise InvalidArgumentError(
            f"the sources of Python's standard library hold {len(text):,} bytes, too few for "
            f"{arguments.steps} steps of "
            f"{arguments.batch} x {length} tokens. Take fewer --steps, --batch or --tokens."
        )
    batches = []
    for step in range(arguments.steps):
        starts = [row * stretch_bytes + step * step_bytes for row in range(arguments.batch)]
        tokens = torch.tensor([[*text[start : start + length]] for start in starts])
        batches.append({"input_ids": tokens, "labels": tokens})
    return batches


def _title(model: nn.Module, arguments: Namespace) -> str:
    sizes = f"{arguments.layers} layers, width {arguments.width}"
    kind = f"GPT-2 architecture, {sizes}, bytes as tokens"
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = f"{arguments.batch} x {arguments.tokens} tokens"
    machine = f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    return f"{kind}: {num_parameters / 1e6:.1f} M parameters, {shape}, {machine}"
