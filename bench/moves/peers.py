"""Other ways to train with a disk, measured beside ours at their own peaks.

| peer | what it does |
|---|---|
| keep all | eager |
| save_on_cpu | every saved value goes to the disk, each copy waited for |
| in flight | the same, copies out and back beside the ops |
| checkpoints | one checkpoint around each layer, whose inputs go to the disk likewise |

Each is measured with the allocator's events, and ours is planned for the peak that it has, or for
our least where the peer's is below that. Both use the same disk at the same time, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from bench.command import Record
from bench.measure import Step, allocator_peak, same_bits, time_in_turn
from bench.models import Workload
from bench.moves import measured
from bench.moves.measured import gradients, step_of
from bench.moves.small_models import small_workload
from bench.peers import eager
from bench.peers.disk import offloaded_to_disk
from rockmate import Planner
from rockmate.offload.disk_tier import DiskTier

MODELS = ("gpt2", "llama", "vit", "resnet")
Lend = Callable[[Workload], AbstractContextManager[Any]]


def peers(folder: str) -> dict[str, Lend]:
    """The peers by name."""
    tier = DiskTier(folder)
    return {
        "keep all": eager,
        "save_on_cpu": partial(offloaded_to_disk, tier=tier, in_flight=0),
        "in flight": partial(offloaded_to_disk, tier=tier),
        "checkpoints": partial(offloaded_to_disk, tier=tier, checkpoints=True),
    }


def against_peers(name: str, folder: str) -> Iterator[Record]:
    """A record for each peer of one model."""
    workload = small_workload(name)
    planner = Planner(workload.model, workload.sample, offload=f"disk:{folder}", numerics="bitwise")
    reference = gradients(workload, workload.model)
    for peer, lend in peers(folder).items():
        theirs = _lent(workload, lend)
        with lend(workload) as model:
            is_same = same_bits(gradients(workload, model), reference)
        peer_bytes = allocator_peak(theirs)
        budget = min(max(peer_bytes, planner.minimum_peak_bytes), planner.baseline_peak_bytes)
        module = planner.module(budget, trial="never")
        ours = step_of(workload, module)
        is_bitwise = same_bits(gradients(workload, module), reference)
        own_bytes = allocator_peak(ours)
        steps = {"eager": step_of(workload, workload.model), "theirs": theirs, "ours": ours}
        times = time_in_turn(steps, measured.NUM_ROUNDS, is_wall=True)
        yield {
            "kind": "peer",
            "model": name,
            "peer": peer,
            "is_peer_bitwise": is_same,
            "is_bitwise": is_bitwise,
            "peer_bytes": peer_bytes,
            "own_bytes": own_bytes,
            "least_bytes": planner.minimum_peak_bytes,
            "num_moves": len(module.plan.schedule.moves),
            "num_recomputations": module.plan.schedule.num_recomputations(),
            "peer_ratio": times["theirs"].ratio,
            "ratio": times["ours"].ratio,
            "over_peer": times["ours"].over(times["theirs"]).ratio,
        }


def _lent(workload: Workload, lend: Lend) -> Step:
    def step() -> None:
        with lend(workload) as model:
            step_of(workload, model)()

    return step
