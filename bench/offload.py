"""Moves to another memory tier: simulated for GPUs, and measured with a disk on this machine.

    python -m bench.offload --simulated --output FILE.jsonl
    python -m bench.offload --measured FOLDER --output FILE.jsonl   # lines are added
    python -m bench.offload --page FILE.jsonl > bench/results/offload_<yyyymm>.md

*Simulated.* Layers of Llama-8B at 8,192 tokens in bfloat16, loss only, planned for a machine's
description. Each budget is planned with recomputation alone and with moves. Beside them stands what
moving everything does, one copy at a time and each waited for, as
`torch.autograd.graph.save_on_cpu` does: it is not planned, so it has one point.

*Measured.* Small models with one thread, moves to a folder. Peaks come from the allocator's events,
gradients are compared with eager's bit for bit, and times are medians in turn with the plan that
moves and recomputes nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bench.machine import machine_record
from bench.measure import allocator_peak
from bench.offload_page import TIGHT, Record, page
from rockmate.offload.disk_tier import DiskTier
from rockmate.offload.request import OffloadRequest
from rockmate.offload.tiers import forget_tiers, tier_of

MACHINES = ("rtx4090", "h100")
NUM_LAYERS, NUM_TOKENS = 8, 8192
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
"""Simulated budgets, as shares of the peak without recomputation."""
MEASURED_SHARES = (0.8, 0.6, 0.4, 0.2, 0.05)
"""Measured budgets: shares of the way from the smallest peak to that without recomputation."""
NUM_STEPS = 5

# --- simulated ------------------------------------------------------------------------------------


def llama(num_layers: int, num_tokens: int) -> tuple[nn.Module, dict[str, Any]]:
    """Layers of Llama-8B on the meta device, and a sample."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=num_tokens,
    )
    with torch.device("meta"):
        model = cast("nn.Module", LlamaForCausalLM(config)).to(torch.bfloat16)
        words = torch.zeros(1, num_tokens, dtype=torch.int64)
    return model.train(), {"input_ids": words, "labels": words}


def simulated(machine: str, *, num_layers: int, num_tokens: int) -> Iterator[Record]:
    """A record for each budget, and one for moving everything."""
    from rockmate import Planner

    model, sample = llama(num_layers, num_tokens)
    options: dict[str, Any] = {"machine": machine, "outputs": "loss", "numerics": "bitwise"}
    begin = time.process_time()
    plain = Planner(model, sample, **options)
    plain_s = time.process_time() - begin
    begin = time.process_time()
    planner = Planner(model, sample, offload="host", **options)
    moving_s = time.process_time() - begin
    peak = plain.baseline_peak_bytes
    common = {
        "kind": "simulated",
        "machine_name": machine,
        "num_layers": num_layers,
        "num_tokens": num_tokens,
        "peak_bytes": peak,
        "baseline_ms": plain.baseline_ms,
        "least_share": plain.minimum_peak_bytes / peak,
        "least_with_moves_share": planner.minimum_peak_bytes / peak,
        "prepare_s": plain_s,
        "prepare_with_moves_s": moving_s,
    }
    least = plain.minimum_peak_bytes
    for budget in (*(int(share * peak) for share in SHARES), int(TIGHT * least)):
        yield {**common, **_planned(plain, planner, budget)}
    yield {**common, **_everything(plain, planner)}


def _planned(plain: Any, planner: Any, budget: int) -> Record:
    begin = time.process_time()
    without = _ratio(plain, budget)
    middle = time.process_time()
    plan = planner.plan(budget)
    end = time.process_time()
    plan.schedule.verify(plan.graph)
    lanes = plan.simulation.lanes
    return {
        "share": budget / plain.baseline_peak_bytes,
        "recompute_ratio": without,
        "ratio": plan.predicted_ratio,
        "bound_ratio": plan.lower_bound_ms / plain.baseline_ms,
        "host_bytes": plan.simulation.host_bytes,
        "num_moves": len(plan.schedule.moves),
        "num_recomputations": plan.schedule.num_recomputations(),
        "waits_ratio": 0.0 if lanes is None else lanes.waited_ms / plain.baseline_ms,
        "plan_s": middle - begin,
        "plan_with_moves_s": end - middle,
    }


def _ratio(planner: Any, budget: int) -> float | None:
    from rockmate import InfeasibleBudgetError

    try:
        return planner.plan(budget).predicted_ratio
    except InfeasibleBudgetError:
        return None


def _everything(plain: Any, planner: Any) -> Record:
    """All values that cross the border move, each copy waited for; and our plan within its peak."""
    from rockmate.schedule.move import Move
    from rockmate.schedule.schedule import with_moves
    from rockmate.schedule.simulate import simulate

    plan = planner.plan(planner.baseline_peak_bytes)
    residency, graph = plan.residency, plan.graph
    num_forward = len(plan.schedule.forward)
    moves = []
    for storage, intervals in residency.intervals.items():
        if not plan.snapshot.storages[storage].kind.is_movable:
            continue
        for interval in intervals:
            events = [interval.first, *interval.reads]
            before = [event for event in events if event < num_forward]
            behind = [event for event in events if event >= num_forward]
            if before and behind and storage not in plan.snapshot.updates:
                gone, back = before[-1] + 1, behind[0]
                moves.append(Move(storage=storage, send=gone, sent=gone, fetch=back, fetched=back))
    schedule = with_moves(graph, plan.schedule, moves)
    schedule.verify(graph)
    found = simulate(graph, schedule, plan.costs)
    # Where it needs a little less, since it moves the smallest values as well: the least of ours.
    ours = planner.plan(max(found.peak_bytes, planner.minimum_peak_bytes))
    return {
        "everything": True,
        "share": found.peak_bytes / plain.baseline_peak_bytes,
        "everything_ratio": found.time_ms / plain.baseline_ms,
        "host_bytes": found.host_bytes,
        "ratio": ours.predicted_ratio,
    }


# --- measured -------------------------------------------------------------------------------------


def small_models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models that a step of takes some tenths of a second, and their samples."""
    import transformers

    def words(batch: int, length: int) -> dict[str, Any]:
        drawn = torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
        return {"input_ids": drawn, "labels": drawn}

    def gpt2() -> tuple[nn.Module, Any]:
        config = transformers.GPT2Config(
            n_layer=4, n_embd=384, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config), words(4, 256)

    def small_llama() -> tuple[nn.Module, Any]:
        config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
        )
        return transformers.LlamaForCausalLM(config), words(4, 256)

    def resnet() -> tuple[nn.Module, Any]:
        config = transformers.ResNetConfig(
            depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic"
        )
        config.num_labels = 10
        images = torch.randn(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(4) % 10
        sample = {"pixel_values": images, "labels": labels}
        return transformers.ResNetForImageClassification(config), sample

    return {"gpt2": gpt2, "llama": small_llama, "resnet": resnet}


def measured(name: str, folder: str) -> Iterator[Record]:
    """A record for each budget of one model."""
    from rockmate import Planner

    torch.manual_seed(0)
    model, sample = small_models()[name]()
    model.train()
    eager = copy.deepcopy(model)
    planner = Planner(model, sample, offload=f"disk:{folder}", numerics="bitwise")
    link = planner.plan(1.0).costs.link
    assert link is not None
    least, peak = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    base = planner.module(1.0)
    for share in MEASURED_SHARES:
        budget = int(least + share * (peak - least))
        module = planner.module(budget)
        plan = module.plan
        disk = _new_disk(model, folder)
        is_bitwise = _is_bitwise(module, eager, sample)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        own_peak = allocator_peak(lambda module=module: _step(module, sample))
        times = _in_turn([base, module], sample)
        yield {
            "kind": "measured",
            "model": name,
            "share": budget / peak,
            "budget_bytes": budget,
            "is_bitwise": is_bitwise,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "measured_peak_bytes": own_peak,
            "predicted_host_bytes": plan.simulation.host_bytes,
            "measured_host_bytes": disk.num_bytes,
            "num_moves": len(plan.schedule.moves),
            "num_recomputations": plan.schedule.num_recomputations(),
            "predicted_ratio": plan.predicted_ms / base.plan.predicted_ms,
            "measured_ratio": times[1] / times[0],
            "predicted_ms": plan.predicted_ms,
            "measured_ms": times[1],
            "out_gb_per_s": link.out_gb_per_s,
            "in_gb_per_s": link.in_gb_per_s,
            "slowdown": link.slowdown,
        }


def _new_disk(model: nn.Module, folder: str) -> DiskTier:
    """A tier without files for the steps of a model, so that it has those of one plan alone."""
    request = OffloadRequest("disk", folder)
    forget_tiers(model)
    disk = tier_of(model, request)
    assert isinstance(disk, DiskTier)
    return disk


def _step(module: nn.Module, sample: Mapping[str, Any]) -> None:
    module(**sample).loss.backward()


def _is_bitwise(module: nn.Module, eager: nn.Module, sample: Mapping[str, Any]) -> bool:
    for callee in (module, eager):
        torch.manual_seed(1)
        callee.zero_grad()
        _step(callee, sample)
    pairs = zip(module.parameters(), eager.parameters(), strict=True)
    for ours, theirs in pairs:
        if ours.grad is None or theirs.grad is None:
            if ours.grad is not theirs.grad:
                return False
        elif not torch.equal(ours.grad, theirs.grad):
            return False
    return True


def _in_turn(modules: Sequence[nn.Module], sample: Mapping[str, Any]) -> list[float]:
    """The median time of a step of each, in milliseconds, measured in turn."""
    times: list[list[float]] = [[] for _ in modules]
    for number in range(NUM_STEPS + 1):
        for module, own in zip(modules, times, strict=True):
            begin = time.perf_counter()
            _step(module, sample)
            if number:
                own.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(own) for own in times]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0 if all that was measured kept its promise."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="plan for machines")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--measured", metavar="FOLDER", help="train with moves to a folder")
    parser.add_argument("--models", nargs="*", help="of the measured ones (default: all)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where lines are added")
    parser.add_argument("--page", type=Path, metavar="FILE", help="of which the page is printed")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.page:
        text = arguments.page.read_text(encoding="utf-8")
        sys.stdout.write("\n".join(page([json.loads(line) for line in text.splitlines()])) + "\n")
        return 0
    head = machine_record("bench.offload")
    records: list[Record] = []
    for record in _records(arguments):
        records.append({**head, **record})
        if arguments.output:
            with arguments.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(records[-1]) + "\n")
    if not arguments.output:
        sys.stdout.write("\n".join(page(records)) + "\n")
    return 0 if all(record.get("is_bitwise", True) for record in records) else 1


def _records(arguments: argparse.Namespace) -> Iterator[Record]:
    if arguments.simulated:
        for machine in MACHINES:
            yield from simulated(machine, num_layers=arguments.layers, num_tokens=arguments.tokens)
    if arguments.measured:
        for name in arguments.models or small_models():
            yield from measured(name, arguments.measured)


if __name__ == "__main__":
    sys.exit(main())
