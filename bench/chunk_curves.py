"""Predicted time over memory with and without chunks, for kinds of language models.

    python -m bench.chunk_curves           # writes bench/results/chunk_curves_cpu_<yyyymm>.*

The models are Hugging Face architectures with two layers and a large vocabulary, which sets their
peak as it does at full size. They return only their loss (`outputs="loss"`). Op times are estimated
for one CPU, so both curves have the same ones. Peak is that of the schedule without recomputation
and without chunks; shares and time ratios are relative to that schedule.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from bench import command
from bench.command import Record
from bench.models import batches
from bench.models.hf import TOKENS, halves, hf, usual
from bench.pages import INK, OURS_COLOR, Column, Line, about, picture, records_table
from rockmate import InfeasibleBudgetError, Planner

_WORDS, _SHAPE, _MACHINE, _POSITIONS, _SHARES = 8192, (2, 256), "cpu-avx2", 64, (0.5, 0.25)
_DECODER = usual(2, 128, 4, 352, _WORDS) | {"num_key_value_heads": 4, "head_dim": 32}
_WHISPER = halves(2, 128, 4) | TOKENS | {"max_source_positions": _POSITIONS}
_MODELS = {
    "GPT-2": partial(hf, "GPT2LMHeadModel", n_layer=2, n_embd=128, n_head=4, vocab_size=_WORDS),
    "Llama": partial(hf, "LlamaForCausalLM", **_DECODER),
    "Qwen3": partial(hf, "Qwen3ForCausalLM", **_DECODER),
    "Gemma 2": partial(hf, "Gemma2ForCausalLM", **_DECODER, final_logit_softcapping=30.0),
    "Mistral": partial(hf, "MistralForCausalLM", **_DECODER),
    "OPT": partial(
        hf, "OPTForCausalLM", hidden_size=128, ffn_dim=512, num_hidden_layers=2,
        num_attention_heads=4, word_embed_proj_dim=128, vocab_size=_WORDS,
    ),
    "BERT": partial(hf, "BertForMaskedLM", **usual(2, 128, 4, 512, _WORDS)),
    "T5": partial(
        hf, "T5ForConditionalGeneration", d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4,
        vocab_size=_WORDS, decoder_start_token_id=0,
    ),
    "Whisper": partial(
        hf, "WhisperForConditionalGeneration", **_WHISPER, vocab_size=_WORDS,
        decoder_start_token_id=1,
    ),
}  # fmt: skip


def measured(name: str) -> Record:
    """Both curves of one model, as peaks in bytes and times in ms, and times at `_SHARES`."""
    torch.manual_seed(0)
    model, draw = _MODELS[name](), torch.Generator().manual_seed(1)
    batch = batches.causal(_SHAPE, _WORDS)(draw)
    if name == "T5":
        batch = batches.translated(_SHAPE, _SHAPE, _WORDS)(draw)
    if name == "Whisper":
        del batch["input_ids"]
        batch["input_features"] = batches.normal(_SHAPE[0], 80, 2 * _POSITIONS)(draw)
    command.say(name)
    plain, chunked = (
        Planner(model, batch, outputs="loss", machine=_MACHINE, numerics=numerics)
        for numerics in ("bitwise", "any_order")
    )
    return {
        "model": name,
        "peak_bytes": plain.baseline_peak_bytes,
        "ms": plain.baseline_ms,
        "curves": [
            [(p.predicted_peak_bytes, p.predicted_ms) for p in planner.frontier()]
            for planner in (plain, chunked)
        ],
        "ratios": [
            [_ratio(planner, int(share * plain.baseline_peak_bytes), plain) for share in _SHARES]
            for planner in (plain, chunked)
        ],
    }


def _ratio(planner: Planner, budget_bytes: int, plain: Planner) -> float | None:
    try:
        return planner.plan(budget_bytes).predicted_ms / plain.baseline_ms
    except InfeasibleBudgetError:
        return None


_Pair = tuple[Record, bool]


def _least(record: Record, may_chunk: bool) -> float:
    return record["curves"][may_chunk][0][0] / record["peak_bytes"]


def _time_column(place: int) -> Column:
    def cell(pair: _Pair) -> str:
        ratio = pair[0]["ratios"][pair[1]][place]
        return "infeasible" if ratio is None else f"{ratio:.3f}"

    return f"time at {_SHARES[place]:g} of it", cell


_COLUMNS: tuple[Column, ...] = (
    ("model", lambda pair: pair[0]["model"]),
    ("peak MB", lambda pair: f"{pair[0]['peak_bytes'] / 1e6:.1f}"),
    ("chunks", lambda pair: "yes" if pair[1] else "no"),
    ("least peak", lambda pair: f"{_least(*pair):.3f}"),
    *map(_time_column, range(len(_SHARES))),
)


def page(records: Sequence[Record]) -> list[str]:
    """The table, with the least peaks as its headline."""
    newest = command.newest(records, "model")
    least = [_least(record, True) for record in newest]
    pairs = [(record, may_chunk) for record in newest for may_chunk in (False, True)]
    return [
        "# Curves with and without chunks",
        "",
        f"**With chunks, the least peak of {len(newest)} language models is {min(least):.2f} to "
        f"{max(least):.2f} of the peak without recomputation and without chunks.**",
        "",
        *records_table(_COLUMNS, pairs),
        "",
        *about(newest, __doc__),
    ]


def _panel(record: Record) -> tuple[str, list[Line]]:
    lines = []
    for curve, color, label in zip(
        record["curves"], (INK, OURS_COLOR), ("without chunks", "with chunks"), strict=True
    ):
        points = [(b / record["peak_bytes"], ms / record["ms"]) for b, ms in curve]
        style = {"color": color, "marker": ".", "label": label}
        lines.append(Line([*points, (1.05, points[-1][1])], style, step="post"))
    return f"{record['model']}: {record['peak_bytes'] / 1e6:.3g} MB", lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, and writes page and picture."""
    parser = command.parser("chunk_curves", __doc__, models=_MODELS, stem="chunk_curves_cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    status = command.run("chunk_curves", options, map(measured, options.model or _MODELS), page)
    newest = command.newest(command.read(command.lines_of(options)), "model")
    if status:
        return status
    picture(
        Path(f"{options.output}.png"),
        dict(map(_panel, newest)),
        across="peak, as a share of the baseline's",
        up="predicted time over the baseline's",
        limits=(0.9, 2.5),
        columns=3,
        size=(4, 3),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
