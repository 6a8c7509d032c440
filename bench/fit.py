"""The largest batch that `rockmate fit` predicts, and the largest that trains in a capped process.

    python -m bench.fit                              # writes bench/results/fit_cpu_<yyyymm>.*
    python -m bench.fit --model gpt2 --model bert    # a part; lines are added

For each model a memory is given, and the largest batch predicted from costs that are estimated for
a model on the meta device. The search then trains: each batch in a process of its own, which makes
the model, plans the smallest peak, and limits its data segment (`RLIMIT_DATA`) to what it holds and
the given memory, less its parameters. It takes two optimizer steps. The system ends an allocation
beyond the limit, and the batch does not fit. The search goes up from the prediction, or down, until
a batch and the next one differ.

What the process holds when the limit is set has room of its own: memory that planning has freed
would serve the step's small tensors beside the limit. So every tensor from 32 KiB on is mapped by
itself. What libraries take in a first step they have taken by then, in a step of another model. The
prediction sets 2 MiB aside, for the pages that mapped tensors begin and end in, 4 KiB a tensor, and
for Python's objects.

The process counts nothing that the prediction counts. It shares the planner's schedules with it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import command
from bench.command import Record
from bench.machine import machine_text
from bench.models.hf import TOKENS, hf, usual
from bench.pages import Column, all_row, records_table, targets
from rockmate.capture.options import Numerics

_MIB = 1 << 20
_RESERVE_BYTES = 2 * _MIB  # see above
_NUM_STEPS = 2
_DOES_NOT_FIT = 3
_MOST_RUNS = 12
_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its sample and a memory.

    Attributes:
        build: makes the model.
        sample: makes a sample of so many rows.
        memory_mib: the memory, libraries and interpreter aside.
        optimizer: "adamw" or "sgd".
        numerics: as for `Planner`.
    """

    build: Callable[[], nn.Module]
    sample: Callable[[int], Any]
    memory_mib: int
    optimizer: str = "adamw"
    numerics: Numerics = "bitwise"


def _words(num_rows: int, *, tokens: int = _TOKENS) -> dict[str, Tensor]:
    words = torch.arange(num_rows * tokens).view(num_rows, tokens) % 1000 + 5
    return {"input_ids": words, "labels": words.clone()}


def _classified(num_rows: int) -> dict[str, Tensor]:
    words = _words(num_rows, tokens=512)["input_ids"]
    return {"input_ids": words, "labels": torch.zeros(num_rows).long()}


def _images(num_rows: int) -> dict[str, Tensor]:
    labels = torch.zeros(num_rows).long()
    return {"pixel_values": torch.ones(num_rows, 3, 96, 96), "labels": labels}


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [256, 1024, 512, 1024, 512, 1024, 256]
        self.layers = nn.Sequential(
            *(
                layer
                for inner, outer in itertools.pairwise(widths)
                for layer in (nn.Linear(inner, outer), nn.GELU())
            )
        )

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values).square().mean()


def _lora() -> nn.Module:
    from rockmate.hf.adapt import with_lora

    return with_lora(_LLAMA(), rank=8)


_SIZES = usual(3, 256, 4, 1024)
_GPT2 = partial(
    hf, "GPT2LMHeadModel", vocab_size=8192, n_layer=4, n_embd=256, n_head=4, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_LLAMA = partial(hf, "LlamaForCausalLM", vocab_size=4096, num_key_value_heads=2, **_SIZES, **TOKENS)
_QWEN2 = partial(hf, "Qwen2ForCausalLM", vocab_size=8192, num_key_value_heads=2, **_SIZES, **TOKENS)
_DISTILBERT = partial(
    hf, "DistilBertForSequenceClassification", vocab_size=2048, dim=256, n_layers=3, n_heads=4,
    hidden_dim=1024,
)  # fmt: skip
_VIT = partial(
    hf, "ViTForImageClassification", **usual(4, 256, 4, 1024), image_size=96, patch_size=4
)
CASES: Mapping[str, Case] = {
    "gpt2, in chunks": Case(build=_GPT2, sample=_words, memory_mib=300, numerics="any_order"),
    "gpt2": Case(build=_GPT2, sample=_words, memory_mib=300),
    "llama": Case(build=_LLAMA, sample=_words, memory_mib=260),
    "llama, LoRA": Case(build=_lora, sample=_words, memory_mib=200),
    "llama, SGD": Case(build=_LLAMA, sample=_words, memory_mib=200, optimizer="sgd"),
    "bert": Case(
        build=partial(hf, "BertForMaskedLM", vocab_size=8192, **_SIZES),
        sample=_words,
        memory_mib=300,
    ),
    "distilbert, classified": Case(build=_DISTILBERT, sample=_classified, memory_mib=130),
    "qwen2": Case(build=_QWEN2, sample=_words, memory_mib=320),
    "vit": Case(build=_VIT, sample=_images, memory_mib=160),
    "mlp": Case(
        build=_Mlp, sample=lambda num_rows: torch.ones(num_rows, 1024, 256), memory_mib=200
    ),
}


# --- the prediction -------------------------------------------------------------------------------


def predicted(case: Case) -> int:
    """The largest batch by `rockmate.fit`."""
    import rockmate

    with torch.device("meta"):
        model, sample = case.build(), case.sample(2)
    found = rockmate.fit(
        model,
        sample,
        case.memory_mib * _MIB,
        optimizer=case.optimizer,
        reserve=_RESERVE_BYTES,
        machine="cpu-avx2",
        numerics=case.numerics,
        sizes=[1],
    )
    return found.largest.batch_size


# --- the search -----------------------------------------------------------------------------------


def searched(name: str, first: int) -> tuple[int, int]:
    """The largest batch that trains in a capped process, and how many batches were tried."""
    fits: dict[int, bool] = {}
    size = first
    while len(fits) < _MOST_RUNS:
        fits[size] = size > 0 and _trains(name, size)
        if fits[size] and fits.get(size + 1) is False:
            return size, len(fits)
        if not fits[size] and (fits.get(size - 1) or size == 1):
            return size - 1, len(fits)
        size += 1 if fits[size] else -1
    raise RuntimeError(f"{name}: no end after {_MOST_RUNS} batches from {first}: {fits}")


def _trains(name: str, num_rows: int) -> bool:
    environment = {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "32768",  # what is free is given back at once
        "MALLOC_ARENA_MAX": "1",
    }
    finished = subprocess.run(
        [sys.executable, "-m", "bench.fit", "--child", name, str(num_rows)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if finished.returncode not in (0, _DOES_NOT_FIT):
        raise RuntimeError(f"{name} with {num_rows} rows failed:\n{finished.stderr[-3000:]}")
    return finished.returncode == 0


def train_capped(name: str, num_rows: int) -> int:
    """Trains in this process, limited; 0 if it fits, another code if not."""
    from rockmate import Planner

    case = CASES[name]
    model, sample = case.build(), case.sample(num_rows)
    planner = Planner(model, sample, machine="cpu-avx2", numerics=case.numerics)
    module = planner.module(1, on_infeasible="least", trial="never")
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = (
        torch.optim.AdamW(trained) if case.optimizer == "adamw" else torch.optim.SGD(trained)
    )
    _warm_up()
    held = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    inputs = sum(
        each.nbytes for each in (sample.values() if isinstance(sample, dict) else [sample])
    )
    limit = _data_bytes() - held - inputs + case.memory_mib * _MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        for _ in range(_NUM_STEPS):
            optimizer.zero_grad(set_to_none=False)
            # Outputs that live into the next step would take memory beside it.
            _loss(module, sample).backward()
            optimizer.step()
    except (RuntimeError, MemoryError) as error:
        if "memory" in str(error) or isinstance(error, MemoryError):
            return _DOES_NOT_FIT
        raise
    return 0


def _loss(module: nn.Module, sample: Any) -> Tensor:
    return module(**sample).loss if isinstance(sample, dict) else module(sample)


def _warm_up() -> None:
    """Threads and libraries that every step uses."""
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()


def _data_bytes() -> int:
    """The data segment of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


# --- the command ----------------------------------------------------------------------------------

MOST_BELOW = 1
"""How many rows a prediction may be below the largest batch that trains; it is never above."""


def measured(name: str) -> Record:
    """The prediction and the largest batch that trains."""
    case, begin = CASES[name], time.perf_counter()
    guess = predicted(case)
    predicted_s = time.perf_counter() - begin
    real, num_runs = searched(name, max(1, guess))
    command.say(f"{name}: {guess} predicted, {real} train")
    return {
        "command": f'python -m bench.fit --model "{name}"', "model": name,
        "memory_mib": case.memory_mib, "predicted": guess, "predicted_s": predicted_s,
        "trains": real, "num_runs": num_runs,
    }  # fmt: skip


def is_held(line: Record) -> bool:
    """Whether a prediction is within its target."""
    return 0 <= line["trains"] - line["predicted"] <= MOST_BELOW


_COLUMNS: tuple[Column, ...] = (
    ("model", "{model}"),
    ("memory", "{memory_mib} MiB"),
    ("predicted", "{predicted}"),
    ("trains", "{trains}"),
    ("batches tried", "{num_runs}"),
    ("prediction took", "{predicted_s:.0f} s"),
)


def page(lines: Sequence[Record]) -> list[str]:
    """The target, and a row for the newest line of each model."""
    newest = command.newest(lines, "model")
    what = f"predicted batch at most {MOST_BELOW} below the real one, never above"
    missing = [name for name in CASES if name not in {line["model"] for line in newest}]
    return [
        "# The largest batch, predicted and real",
        "",
        machine_text({**newest[-1], "command": "python -m bench.fit"}),
        "",
        *targets([all_row(what, sum(map(is_held, newest)), len(newest))]),
        "",
        "## Models",
        "",
        *records_table(_COLUMNS, newest),
        *(["", f"Not measured yet: {'; '.join(missing)}."] if missing else []),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes the page; exit code 1 if a prediction is above, or over one below."""
    parser = command.parser("fit", __doc__, models=sorted(CASES), stem="fit_cpu")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.child:
        return train_capped(options.child[0], int(options.child[1]))
    command.run("fit", options, map(measured, options.model or CASES), page)
    newest = command.newest(command.read(command.lines_of(options)), "model")
    return 0 if all(map(is_held, newest)) else 1


if __name__ == "__main__":
    sys.exit(main())
