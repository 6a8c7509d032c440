"""The peak and time of a sequence of `rotor`, step by step, in exact bytes.

It shares no code with the solver. It takes the steps in any order that can run, derives the live
interval of each storage from reads and writes alone, and adds up the live bytes at each step.
Counted are the boundaries except ``x_0``, the saved bytes of stages, the gradient in hand, and the
step's own peak, see ``rotor/chain.py``. The chain's output gradient is in hand from the start.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from rotor import Chain, Sequence


class Replay(NamedTuple):
    """The most bytes live at any step, beside the chain's input, and the time of all steps."""

    peak_bytes: int
    time_ms: float


def replay(chain: Chain, sequence: Sequence) -> Replay:
    """The peak and time of a sequence, which is to be valid."""
    growth = [0] * (len(sequence) + 1)
    for first_step, last_step, storage_bytes in _live_intervals(chain, sequence):
        growth[first_step] += storage_bytes
        growth[last_step + 1] -= storage_bytes
    in_hand_bytes = chain[-1].output_gradient_bytes
    peak_bytes, time_ms = 0, 0.0
    for step, beside_bytes in zip(sequence, accumulate(growth), strict=False):
        stage = chain[step.stage]
        if step.kind == "B":
            own_bytes = stage.backward_peak_bytes - stage.saved_bytes
            time_ms += stage.backward_ms
            in_hand_bytes = chain[step.stage - 1].output_gradient_bytes if step.stage else 0
        else:
            is_kept = step.kind == "K"
            own_bytes = stage.keep_peak_bytes if is_kept else stage.forward_peak_bytes
            own_bytes += in_hand_bytes
            time_ms += stage.forward_ms
        peak_bytes = max(peak_bytes, beside_bytes + own_bytes)
    return Replay(peak_bytes, time_ms)


def _live_intervals(chain: Chain, sequence: Sequence) -> list[tuple[int, int, int]]:
    """(first step, last step, bytes) of each storage that outlives the step that makes it.

    The first step is the one after the maker, whose own peak contains the storage. The last step is
    its last reader.
    """
    maker_of: dict[int, int] = {}
    last_reader: dict[int, int] = {}
    kept_at: dict[int, int] = {}
    intervals: list[tuple[int, int, int]] = []
    gradient_at = len(chain) - 1
    for index, step in enumerate(sequence):
        stage = step.stage
        if stage:
            last_reader[maker_of[stage]] = index
        if step.kind == "F":
            assert stage + 1 < len(chain)
            assert stage not in kept_at
            maker_of[stage + 1] = index
        elif step.kind == "K":
            assert stage not in kept_at
            kept_at[stage] = maker_of[stage + 1] = index
        else:
            assert stage == gradient_at
            maker = kept_at.pop(stage)
            intervals.append((maker + 1, index, chain[stage].saved_bytes))
            last_reader.pop(maker, None)
            if maker_of[stage + 1] == maker:
                del maker_of[stage + 1]
            gradient_at = stage - 1
    assert gradient_at == -1
    assert not kept_at
    for maker, reader in last_reader.items():
        step = sequence[maker]
        assert step.kind == "F"
        intervals.append((maker + 1, reader, chain[step.stage + 1].input_bytes))
    return intervals
