"""An independent check of a sequence: replay it step by step, in exact bytes.

It shares no code with the solver and does not know how the sequence was found. It takes the steps
in any order that can run, derives the live interval of each storage from reads and writes alone,
and adds up the live bytes at each step. Counted are the boundaries except ``x_0``, the saved bytes
of stages, the gradient in hand, and the step's own peak. The chain's output gradient is in hand
from the start. ``chain.py`` defines what a step's own peak
contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rotor.chain import Backward, Chain, ForwardKeep, ForwardOnly, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The cost of a sequence.

    Attributes:
        peak_bytes: The most bytes live at any step, beside the chain's input.
        time_ms: The sum of the times of all steps.
    """

    peak_bytes: int
    time_ms: float


def replay(chain: Chain, sequence: Sequence) -> Replay:
    """Return the exact peak and time of ``sequence`` on ``chain``.

    Args:
        chain: The stages that the steps name.
        sequence: The steps, from the first forward to the last backward.

    Returns:
        The peak in bytes and the time in milliseconds.

    Raises:
        ValueError: A step reads a value that is not live, makes one that is live already, or names
            a stage that the chain does not have; or the backward is out of order or
            incomplete.
    """
    steps = sequence.steps
    growth = [0] * (len(steps) + 1)
    for first_step, last_step, storage_bytes in _live_intervals(chain, sequence):
        growth[first_step] += storage_bytes
        growth[last_step + 1] -= storage_bytes
    in_hand_bytes = chain.stages[-1].output_gradient_bytes
    peak_bytes, time_ms = 0, 0.0
    for step, beside_bytes in zip(steps, accumulate(growth), strict=False):
        stage = chain.stages[step.stage]
        if isinstance(step, Backward):
            peak_bytes = max(
                peak_bytes, beside_bytes - stage.saved_bytes + stage.backward_peak_bytes
            )
            time_ms += stage.backward_ms
            earlier = chain.stages[step.stage - 1] if step.stage else None
            in_hand_bytes = earlier.output_gradient_bytes if earlier else 0
            continue
        is_kept = isinstance(step, ForwardKeep)
        own_bytes = stage.keep_peak_bytes if is_kept else stage.forward_peak_bytes
        peak_bytes = max(peak_bytes, beside_bytes + in_hand_bytes + own_bytes)
        time_ms += stage.forward_ms
    return Replay(peak_bytes=peak_bytes, time_ms=time_ms)


def _live_intervals(chain: Chain, sequence: Sequence) -> list[tuple[int, int, int]]:
    """Return (first step, last step, bytes) of each storage that outlives the step that makes it.

    The first step is the one after the maker, whose own peak contains the storage. The last step is
    its last reader.
    """
    maker_of: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    kept_at: dict[int, int] = {}
    live_intervals: list[tuple[int, int, int]] = []
    num_stages = len(chain.stages)
    gradient_at = num_stages - 1

    for index, step in enumerate(sequence.steps):
        where, stage = f"step {index}, {step}", step.stage
        if not 0 <= stage < num_stages:
            raise ValueError(f"{where}: the chain has {num_stages} stages")
        if stage != 0 and stage not in maker_of:
            raise ValueError(f"{where}: boundary {stage} is not there to be read")
        if stage != 0:
            last_reader[maker_of[stage]] = index
        if isinstance(step, ForwardOnly):
            if stage + 1 == num_stages:
                raise ValueError(
                    f"{where}: stage must be 0 to {num_stages - 2}, as a later one reads its output"
                )
            if stage in kept_at:
                raise ValueError(f"{where}: boundary {stage + 1} is already there")
            maker_of[stage + 1] = index
        elif isinstance(step, ForwardKeep):
            if stage in kept_at:
                raise ValueError(f"{where}: the stage is already kept")
            kept_at[stage] = maker_of[stage + 1] = index
        else:
            if stage not in kept_at:
                raise ValueError(f"{where}: nothing is kept for it")
            if stage != gradient_at:
                raise ValueError(f"{where}: the gradient in hand is that of stage {gradient_at}")
            maker = kept_at.pop(stage)
            live_intervals.append((maker + 1, index, chain.stages[stage].saved_bytes))
            last_reader.pop(maker, None)
            if maker_of[stage + 1] == maker:
                del maker_of[stage + 1]
            gradient_at = stage - 1
    if gradient_at != -1:
        raise ValueError(f"the sequence ends before the backward of stage {gradient_at}")
    if kept_at:
        stages = ", ".join(f"B{stage}" for stage in kept_at)
        raise ValueError(f"the sequence ends before {stages}, whose values are still kept")

    for maker, reader in last_reader.items():
        step = sequence.steps[maker]
        assert isinstance(step, ForwardOnly)
        live_intervals.append((maker + 1, reader, chain.stages[step.stage + 1].input_bytes))
    return live_intervals
