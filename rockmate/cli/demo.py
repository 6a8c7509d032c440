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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rockmate import InfeasibleBudgetError, Plan, Planner, RockmateModule
from rockmate._torch.allocator import Timeline, timeline
from rockmate._util import end_stages, is_terminal, progress_bar
from rockmate.budget import size_text
from rockmate.cli.arguments import planning_options
from rockmate.errors import InvalidArgumentError
from rockmate.frames.report import FramesReport
from rockmate.hf.source_check import first_line

Batch = Mapping[str, torch.Tensor]

BACKWARD_MARK = "rockmate.demo::backward"
_NUM_LAYERS, _WIDTH, _HEAD_WIDTH = 12, 384, 64  # of the GPT-2 that is built
_NUM_BYTE_VALUES = 256
_BYTES_PER_TOKEN = 16  # more than any tokenizer needs on source text
_LEARNING_RATE = 1e-4
_NUM_RECORDED_STEPS = 3
_NUM_STEPS_OF_FRAMES = 4
"""Frames are chosen, measured and decided on within so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the two runs: loss and time of each step, and memory over one step."""

    losses: Sequence[float]
    times_ms: Sequence[float]
    memory: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Both runs, the plan and what it took to make it, or what frames did in their last step."""

    title: str
    eager: Run
    planned: Run
    plan: Plan | None
    planning_s: float
    stage_s: Mapping[str, float]
    equal_weights: bool
    frames: FramesReport | None = None

    @property
    def budget_bytes(self) -> int:
        """Of the plan, or of the frames."""
        promise = self.frames if self.plan is None else self.plan
        assert promise is not None
        return promise.budget_bytes

    @property
    def equal_losses(self) -> bool:
        """Whether each step's loss is the same number in both runs."""
        return self.eager.losses == self.planned.losses

    @property
    def fits(self) -> bool:
        """Whether the measured peak is inside the budget."""
        return self.planned.memory.peak_bytes <= self.budget_bytes

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
    import transformers

    def say(line: str) -> None:
        if not arguments.quiet:
            end_stages()
            sys.stderr.write(f"{line}\n")

    model, tokenize, kind = (_built if arguments.model is None else _loaded)(
        transformers, arguments
    )
    batches = _batches(tokenize, arguments)
    model.train()
    ours = copy.deepcopy(model)

    say("measuring eager's activation peak")
    eager_memory = _memory_of_step(model, model, batches[0])
    say(
        f"eager's peak is {size_text(eager_memory.peak_bytes)}; planning for {arguments.budget} of "
        "the peak without recomputation"
    )
    module, stage_s, planning_s = _wrap(ours, batches[0], arguments)
    planned_memory = _memory_of_step(module, ours, batches[0])

    eager_steps, planned_steps = _train_in_turn(
        model, (ours, module), batches, show=not arguments.quiet
    )
    return DemoResult(
        title=_title(kind, model, arguments),
        eager=Run(losses=eager_steps[0], times_ms=eager_steps[1], memory=eager_memory),
        planned=Run(losses=planned_steps[0], times_ms=planned_steps[1], memory=planned_memory),
        plan=module.plan if module.is_planned else None,
        planning_s=planning_s,
        stage_s=stage_s,
        frames=None if module.frames is None else module.frames.report(),
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
) -> tuple[RockmateModule, Mapping[str, float], float]:
    """The module, seconds of stages of its planning, and of all."""
    start, marks = time.perf_counter(), planning_options(arguments).changed
    progress = not arguments.quiet and is_terminal()
    stage_s: Mapping[str, float] = {}
    try:
        if arguments.mode == "plan":
            # The demo promises every bit.
            planner = Planner(model, batch, progress=progress, numerics="bitwise", **marks)
            module = planner.module(arguments.budget, trial="never")  # it compares by itself
            stage_s = dict(planner.timings)
        else:
            module = _framed(model, batch, arguments, marks)
    except InfeasibleBudgetError as error:
        # The fraction that was asked for tells what it is one of.
        share = arguments.budget * error.minimum_bytes / max(error.budget_bytes, 1)
        msg = f"{error} As a fraction: --budget {math.ceil(1000 * share) / 1000:.3f}."
        raise InvalidArgumentError(msg) from error
    return module, stage_s, time.perf_counter() - start


def _framed(
    model: nn.Module, batch: Batch, arguments: Namespace, marks: Mapping[str, Any]
) -> RockmateModule:
    """Frames that have been measured; with mode "auto" a plan where the model can be captured."""
    given = {**marks, "mode": arguments.mode, "trial": "never"}
    if arguments.mode == "auto":
        module = RockmateModule(model, batch, arguments.budget, numerics="bitwise", **given)
    else:
        module = RockmateModule(model, None, arguments.budget, **given)
    if module.frames is not None:
        for _ in range(_NUM_STEPS_OF_FRAMES):
            _step(module, batch, seed=0)
            module.frames.end_recording()
    return module


_Steps = tuple[list[float], list[float]]


def _train_in_turn(
    model: nn.Module,
    planned: tuple[nn.Module, Callable[..., Any]],
    batches: Sequence[Batch],
    *,
    show: bool,
) -> tuple[_Steps, _Steps]:
    """Losses and times in ms of the eager run and of the planned one."""
    lanes = ((model, model), planned)
    optimizers = [torch.optim.AdamW(owner.parameters(), lr=_LEARNING_RATE) for owner, _ in lanes]
    steps: tuple[_Steps, _Steps] = (([], []), ([], []))
    bar = progress_bar(
        batches, desc="training, eager and planned in turn", unit="step", disable=not show
    )
    for index, batch in enumerate(bar):
        for (owner, call), optimizer, (losses, times_ms) in zip(
            lanes, optimizers, steps, strict=True
        ):
            start = time.perf_counter()
            loss = _step(call, batch, seed=index + 1)
            times_ms.append((time.perf_counter() - start) * 1e3)
            losses.append(loss)
            optimizer.step()
            owner.zero_grad(set_to_none=False)
        bar.set_postfix_str(" | ".join(f"loss {losses[-1]:.4f}" for losses, _ in steps))
    return steps


# --- model and text -------------------------------------------------------------------------------

_Tokenize = Callable[[bytes, int], list[int]]


def _built(transformers: Any, arguments: Namespace) -> tuple[nn.Module, _Tokenize, str]:
    """A GPT-2 over bytes, from its configuration: nothing is downloaded."""
    num_layers, width = arguments.layers or _NUM_LAYERS, arguments.width or _WIDTH
    config = transformers.GPT2Config(
        vocab_size=_NUM_BYTE_VALUES,
        n_positions=max(arguments.tokens, 2),
        n_layer=num_layers,
        n_head=max(1, width // _HEAD_WIDTH),
        n_embd=width,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    if width % config.n_head:
        raise InvalidArgumentError(
            f"--width {width} does not divide into heads of {_HEAD_WIDTH}. Take a multiple "
            f"of {_HEAD_WIDTH}."
        )
    torch.manual_seed(0)
    kind = f"GPT-2 architecture, {num_layers} layers, width {width}, bytes as tokens"
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # it would be taken anyway, but with a warning
    return model, lambda text, length: list(text[:length]), kind


def _loaded(transformers: Any, arguments: Namespace) -> tuple[nn.Module, _Tokenize, str]:
    """The user's model and tokenizer, from a folder or from the local cache."""
    if arguments.quiet:
        transformers.utils.logging.disable_progress_bar()
    try:
        config, tokenizer = (
            each.from_pretrained(arguments.model, local_files_only=True)
            for each in (transformers.AutoConfig, transformers.AutoTokenizer)
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.model, config=config, dtype=torch.float32, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidArgumentError(
            f"cannot load {arguments.model!r} as a causal language model from this machine: "
            f"{first_line(error)} Give a folder "
            "that holds a configuration, weights and a tokenizer, or the name of a model that has "
            "been downloaded before."
        ) from error
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and arguments.tokens > longest:
        raise InvalidArgumentError(
            f"--tokens {arguments.tokens} is more than the positions of {arguments.model!r}. "
            f"Take {longest} or fewer."
        )

    def tokenize(text: bytes, length: int) -> list[int]:
        return tokenizer(text.decode(errors="ignore"), truncation=True, max_length=length)[
            "input_ids"
        ]

    return model, tokenize, f"{arguments.model} ({type(model).__name__})"


def _batches(tokenize: _Tokenize, arguments: Namespace) -> list[Batch]:
    """One batch a step.

    Each sequence of a batch advances through a part of the text of its own.
    """
    text, length = standard_library_text(), arguments.tokens
    excerpt_bytes = length * _BYTES_PER_TOKEN
    stretch_bytes = len(text) // arguments.batch
    if stretch_bytes < arguments.steps * excerpt_bytes:
        raise InvalidArgumentError(
            f"the sources of Python's standard library hold {len(text):,} bytes, too few for "
            f"{arguments.steps} steps of "
            f"{arguments.batch} x {length} tokens. Take fewer --steps, --batch or --tokens."
        )
    batches = []
    for step in range(arguments.steps):
        starts = [
            sequence * stretch_bytes + step * excerpt_bytes for sequence in range(arguments.batch)
        ]
        sequences = [tokenize(text[start : start + excerpt_bytes], length) for start in starts]
        if any(len(sequence) != length for sequence in sequences):
            raise InvalidArgumentError(
                f"{arguments.model!r} makes fewer than {length} tokens of {excerpt_bytes:,} bytes. "
                "Take fewer --tokens."
            )
        tokens = torch.tensor(sequences)
        batches.append({"input_ids": tokens, "labels": tokens})
    return batches


def standard_library_text() -> bytes:
    """The sources of the standard library's public top-level modules, by name."""
    folder = Path(os.__file__).parent
    return b"".join(path.read_bytes() for path in sorted(folder.glob("[!_]*.py")))


def _title(kind: str, model: nn.Module, arguments: Namespace) -> str:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    shape = f"{arguments.batch} x {arguments.tokens} tokens"
    machine = f"{torch.get_num_threads()} threads, PyTorch {torch.__version__}"
    return f"{kind}: {num_parameters / 1e6:.1f} M parameters, {shape}, {machine}"
