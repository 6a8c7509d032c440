"""Whether a schedule keeps the user's marks: a replay of its own, run by run.

It shares no code with liveness, the simulator or the search. It walks through the runs, remembers
in which half each value was made last, and looks at every read.
"""

from __future__ import annotations

from rockmate.graph.snapshot import StepSnapshot
from rockmate.schedule.schedule import Schedule


def broken_mark(snapshot: StepSnapshot, schedule: Schedule) -> str:
    """The first mark that a schedule does not keep, in words; empty if it keeps all.

    * The op of a saved value runs once, and if it is one of the forward, in the forward.
    * A value to be recomputed is read in the backward only after its op has run there.
    """
    marks = [storage.mark for storage in snapshot.storages]
    if not any(marks):
        return ""
    num_runs = [0] * len(snapshot.ops)
    made_in_forward = [False] * len(snapshot.storages)
    for position, index in enumerate(schedule.steps):
        op, is_forward = snapshot.ops[index], position < len(schedule.forward)
        step = f"step {position} of the schedule, {op.name},"
        if not is_forward:
            for storage in op.reads:
                if marks[storage] == "recompute" and made_in_forward[storage]:
                    return (
                        f"{step} reads {_text(snapshot, storage)} as the forward made it, and it "
                        "is marked to be recomputed"
                    )
        num_runs[index] += 1
        for storage in op.writes:
            made_in_forward[storage] = is_forward
            if marks[storage] == "save" and num_runs[index] > 1:
                return f"{step} runs again, and {_text(snapshot, storage)} is marked to be saved"
            if marks[storage] == "save" and op.phase == "forward" and not is_forward:
                return f"{step} runs in the backward, and what it makes is marked to be saved"
    return ""


def _text(snapshot: StepSnapshot, storage: int) -> str:
    described = snapshot.storages[storage]
    sources = ", ".join(map(repr, described.mark_sources))
    return f"{described.name} ({sources})" if sources else described.name
