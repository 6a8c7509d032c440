"""An independent check of a sequence: replay it step by step, in exact bytes.

It shares no code with the solver and does not know how the sequence was found. It takes the steps
in any order that can run, derives the live interval of each storage from reads and writes alone,
and adds up the live bytes at each step. Counted are the boundaries except ``x_0``, the saved bytes
of options, the gradient in hand, the parameter gradients left behind, and the step's own peak. The
chain's output gradient is in hand from the start. ``chain.py`` defines what a step's own peak
contains.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rotor.chain import Chain, Option
from rotor.sequence import Backward, ForwardKeep, ForwardOnly, Sequence


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
        chain: The stages and options that the steps name.
        sequence: The steps, from the first forward to the last backward.

    Returns:
        The peak in bytes and the time in milliseconds.

    Raises:
        ValueError: A step reads a value that is not live, makes one that is live already, or names
            a stage, span or option that the chain does not have; or the backward is out of order or
            incomplete.
    """
    steps = sequence.steps
    growth = [0] * (len(steps) + 1)
    for first_step, last_step, storage_bytes in _live_intervals(chain, sequence):
        growth[first_step] += storage_bytes
        growth[last_step + 1] -= storage_bytes
    in_hand_bytes = chain.stages[-1].output_gradient_bytes
    left_behind_bytes = 0
    peak_bytes, time_ms = 0, 0.0
    for step, kept_bytes in zip(steps, accumulate(growth), strict=False):
        beside_bytes = kept_bytes + left_behind_bytes
        if isinstance(step, ForwardOnly):
            stage = chain.stages[step.stage]
            peak_bytes = max(peak_bytes, beside_bytes + in_hand_bytes + stage.forward_peak_bytes)
            time_ms += stage.forward_ms
        elif isinstance(step, ForwardKeep):
            option = _option(chain, step)
            peak_bytes = max(peak_bytes, beside_bytes + in_hand_bytes + option.forward_peak_bytes)
            time_ms += option.forward_ms
        else:
            option = _option(chain, step)
            peak_bytes = max(
                peak_bytes, beside_bytes - option.saved_bytes + option.backward_peak_bytes
            )
            time_ms += option.backward_ms
            in_hand_bytes = (
                chain.stages[step.first - 1].output_gradient_bytes if step.first > 0 else 0
            )
            left_behind_bytes += sum(
                s.parameter_gradient_bytes for s in chain.stages[step.first : step.last + 1]
            )
    return Replay(peak_bytes=peak_bytes, time_ms=time_ms)


def _live_intervals(chain: Chain, sequence: Sequence) -> list[tuple[int, int, int]]:
    """Return (first step, last step, bytes) of each storage that outlives the step that makes it.

    The first step is the one after the maker, whose own peak contains the storage. The last step is
    its last reader.
    """
    maker_of: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    kept_at: dict[Backward, int] = {}
    live_intervals: list[tuple[int, int, int]] = []
    gradient_at = len(chain.stages) - 1

    for index, step in enumerate(sequence.steps):
        where = f"step {index}, {step}"
        read = step.stage if isinstance(step, ForwardOnly) else step.first
        if read != 0 and read not in maker_of:
            raise ValueError(f"{where}: boundary {read} is not there to be read")
        if read != 0:
            last_reader[maker_of[read]] = index
        if isinstance(step, ForwardOnly):
            made = step.stage + 1
            if not 0 < made < len(chain.stages):
                raise ValueError(
                    f"{where}: stage must be 0 to {len(chain.stages) - 2}, "
                    "as a later one reads its output"
                )
            if any(kept.last + 1 == made for kept in kept_at):
                raise ValueError(f"{where}: boundary {made} is already there")
            maker_of[made] = index
        elif isinstance(step, ForwardKeep):
            _option(chain, step)
            backward = Backward(step.first, step.last, step.option)
            if any(kept.first <= step.last and step.first <= kept.last for kept in kept_at):
                raise ValueError(f"{where}: a stage of the span is already kept")
            kept_at[backward] = index
            maker_of[step.last + 1] = index
        else:
            if step not in kept_at:
                raise ValueError(f"{where}: nothing is kept for it")
            if step.last != gradient_at:
                raise ValueError(f"{where}: the gradient in hand is that of stage {gradient_at}")
            maker = kept_at.pop(step)
            live_intervals.append((maker + 1, index, _option(chain, step).saved_bytes))
            last_reader.pop(maker, None)
            if maker_of[step.last + 1] == maker:
                del maker_of[step.last + 1]
            gradient_at = step.first - 1
    if gradient_at != -1:
        raise ValueError(f"the sequence ends before the backward of stage {gradient_at}")

    if kept_at:
        raise ValueError(
            f"the sequence ends before {', '.join(map(str, kept_at))}, whose values are still kept"
        )

    for maker, reader in last_reader.items():
        step = sequence.steps[maker]
        assert isinstance(step, ForwardOnly)
        live_intervals.append((maker + 1, reader, chain.stages[step.stage + 1].input_bytes))
    return live_intervals


def _option(chain: Chain, step: ForwardKeep | Backward) -> Option:
    """Return the option that ``step`` names."""
    options = chain.spans.get((step.first, step.last), ())
    if not 0 <= step.option < len(options):
        raise ValueError(f"{step}: the span ({step.first}, {step.last}) has {len(options)} options")
    return options[step.option]
