"""QLoRA inside a budget: a Llama type with a base in NF4 and adapters, eager and planned in turn.

    python -m bench.qlora > bench/results/qlora_cpu_<yyyymm>.md

Needs bitsandbytes, which has kernels for a CPU. The base is quantized twice (double quantization),
PEFT adds the adapters. For each budget: the measured peak over eager's, the median over rounds of a
step's time over eager's in the same round, and whether losses and adapters' gradients of three
steps are eager's, bit for bit. One thread, no chunks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.machine import machine_record, machine_text
from bench.measure import allocator_peak, time_in_turn
from bench.pages import all_row, table, targets, worst_row
from rockmate import RockmateModule
from rockmate.hf.adapt import with_lora

SHARES = (1.0, 0.5, 0.25)
"""Budgets, as shares of eager's measured peak."""
MOST = 1.08
"""Target of the time over eager's at half of the peak."""
_ROWS, _LENGTH, _WORDS = 4, 256, 4096


def quantized_llama(num_layers: int, width: int) -> nn.Module:
    """The model: linear layers of its blocks in 4 bits, with adapters."""
    import bitsandbytes
    import transformers

    kinds: Any = bitsandbytes.nn
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_WORDS, hidden_size=width, intermediate_size=3 * width, bos_token_id=1,
        num_hidden_layers=num_layers, num_attention_heads=8, num_key_value_heads=4,
        eos_token_id=2, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                four = kinds.Linear4bit(
                    module.in_features, module.out_features, bias=False, quant_type="nf4",
                    compress_statistics=True, compute_dtype=torch.float32,
                )  # fmt: skip
                four.weight = kinds.Params4bit(
                    module.weight.data, requires_grad=False, quant_type="nf4",
                    compress_statistics=True,
                )  # fmt: skip
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, four.to("cpu"))
    return with_lora(model, rank=16).train()


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, _WORDS, (_ROWS, _LENGTH), generator=generator)
    return {"input_ids": words, "labels": words}


def _step_of(callee: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        torch.manual_seed(1)
        loss = callee(**batch).loss
        loss.backward()
        return loss.detach()

    return step


def _numbers(callee: nn.Module, model: nn.Module) -> list[Tensor]:
    """Losses and gradients of three steps."""
    found = []
    for seed in range(3):
        model.zero_grad(set_to_none=True)
        found.append(_step_of(callee, _batch(seed))().clone())
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return found


def measured(num_layers: int, width: int, rounds: int) -> list[tuple[float, float, float, bool]]:
    """For each budget: its share, the measured share, time over eager's, whether bits are equal."""
    model, batch = quantized_llama(num_layers, width), _batch(0)
    expected = _numbers(model, model)
    eager = _step_of(model, batch)
    eager_bytes = allocator_peak(eager)
    steps, peaks, equal = {"eager": eager}, {}, {}
    for share in SHARES:
        module = RockmateModule(
            model,
            batch,
            int(share * eager_bytes),
            outputs="loss",
            numerics="bitwise",
            trial="never",
        )
        found = _numbers(module, model)
        assert len(found) == len(expected)
        equal[share] = all(map(torch.equal, found, expected))
        steps[str(share)] = _step_of(module, batch)
        peaks[share] = allocator_peak(steps[str(share)]) / eager_bytes
    times = time_in_turn(steps, rounds, before=lambda: model.zero_grad(set_to_none=False))
    return [(share, peaks[share], times[str(share)].ratio, equal[share]) for share in SHARES]


def page(rows: Sequence[tuple[float, float, float, bool]], about: str) -> list[str]:
    """Targets and a table."""
    half = [(f"{share} of the peak", ratio) for share, _, ratio, _ in rows if share == 0.5]
    found = [
        worst_row("time over eager's at half of the peak", MOST, half),
        all_row("losses and gradients equal eager's, bitwise", sum(r[3] for r in rows), len(rows)),
        all_row("measured peak within the budget", sum(r[1] <= r[0] for r in rows), len(rows)),
    ]
    cells = [
        (f"{share:.2f}", f"{peak:.3f}", f"{ratio:.3f}", "equal" if same else "**differ**")
        for share, peak, ratio, same in rows
    ]
    columns = ("budget / eager's peak", "measured peak", "time / eager's", "bits")
    return ["# QLoRA inside a budget", "", about, "", *targets(found), "", *table(columns, cells)]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the page."""
    parser = argparse.ArgumentParser(description="QLoRA inside a budget.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    about = machine_text(machine_record("bench.qlora"))
    rows = measured(arguments.layers, arguments.width, arguments.rounds)
    sys.stdout.write("\n".join(page(rows, about)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
