"""Predicted time over memory with and without chunks, for kinds of language models.

    python -m bench.chunk_curves --output bench/results/chunk_curves_cpu_202611

The models are Hugging Face architectures with two layers and a large vocabulary, which sets their
peak as it does at full size. They return only their loss. Writes STEM.md and STEM.png. Op times are
estimated for one CPU, so both curves have the same ones. `bench.loss_block` measures whole steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.machine import machine_record
from bench.pages import machine_section, table
from bench.panels import figure_of
from rockmate import InfeasibleBudgetError, Planner

_VOCABULARY = 8192
_TOKENS = (2, 256)
_MACHINE = "cpu-avx2"
_WHISPER_POSITIONS = 64
_SHARES = (0.5, 0.25)
_DECODER = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": _VOCABULARY,
    "pad_token_id": 0,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One model's curves.

    Attributes:
        name: Of the model.
        peak_bytes: Peak without recomputation and without chunks.
        time_ms: Time of the same schedule.
        points: Without and with chunks: peaks in bytes and times in ms, by growing peak.
        ratios: Without and with chunks: predicted time over `time_ms` at `_SHARES` of
            `peak_bytes`; None for an infeasible budget.
    """

    name: str
    peak_bytes: int
    time_ms: float
    points: tuple[list[tuple[int, float]], list[tuple[int, float]]]
    ratios: tuple[list[float | None], list[float | None]]


def _tokens(seed: int, shape: tuple[int, int] = _TOKENS) -> Tensor:
    return torch.randint(3, _VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def _model(kind: str, head: str, **configuration: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**configuration)
    return getattr(transformers, f"{kind}{head}")(config)


_GPT2 = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": _VOCABULARY}
_OPT = {
    "hidden_size": 128,
    "ffn_dim": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 128,
    "vocab_size": _VOCABULARY,
}
_BERT = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": _VOCABULARY,
}
_T5 = {
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": _VOCABULARY,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "d_model": 128,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
    "max_source_positions": _WHISPER_POSITIONS,
    "vocab_size": _VOCABULARY,
    **_SPECIAL,
}
_MODELS = {
    "GPT-2": partial(_model, "GPT2", "LMHeadModel", **_GPT2),
    "Llama": partial(_model, "Llama", "ForCausalLM", **_DECODER),
    "Qwen3": partial(_model, "Qwen3", "ForCausalLM", **_DECODER),
    "Gemma 2": partial(_model, "Gemma2", "ForCausalLM", **_DECODER, final_logit_softcapping=30.0),
    "Mistral": partial(_model, "Mistral", "ForCausalLM", **_DECODER),
    "OPT": partial(_model, "OPT", "ForCausalLM", **_OPT),
    "BERT": partial(_model, "Bert", "ForMaskedLM", **_BERT),
    "T5": partial(_model, "T5", "ForConditionalGeneration", **_T5),
    "Whisper": partial(_model, "Whisper", "ForConditionalGeneration", **_WHISPER),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, and writes page and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chunk_curves", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model", action="append", choices=list(_MODELS), help="repeatable; default: all"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="STEM", help="write STEM.md and STEM.png"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    curves = [curve_of(name) for name in options.model or _MODELS]
    Path(f"{options.output}.md").write_text(_page(curves))
    _save(curves, Path(f"{options.output}.png"))
    sys.stdout.write(_page(curves))
    return 0


def curve_of(name: str) -> Curve:
    """Both curves of one model."""
    torch.manual_seed(0)
    model = _MODELS[name]().train()
    batch = {"labels": _tokens(1)}
    batch |= (
        {"input_features": torch.randn(_TOKENS[0], 80, 2 * _WHISPER_POSITIONS)}
        if name == "Whisper"
        else {"input_ids": _tokens(1)}
    )
    if name == "T5":
        batch["labels"] = _tokens(2)
    sys.stderr.write(f"bench: {name}\n")
    planners = [
        Planner(model, batch, outputs="loss", machine=_MACHINE, numerics=numerics)
        for numerics in ("bitwise", "any_order")
    ]
    whole = planners[0]
    without, chunked = (
        [(p.predicted_peak_bytes, p.predicted_ms) for p in planner.frontier()]
        for planner in planners
    )
    return Curve(
        name=name,
        peak_bytes=whole.baseline_peak_bytes,
        time_ms=whole.baseline_ms,
        points=(without, chunked),
        ratios=(_ratios(planners[0], whole), _ratios(planners[1], whole)),
    )


def _ratios(planner: Planner, whole: Planner) -> list[float | None]:
    found: list[float | None] = []
    for share in _SHARES:
        try:
            found.append(
                planner.plan(int(share * whole.baseline_peak_bytes)).predicted_ms
                / whole.baseline_ms
            )
        except InfeasibleBudgetError:
            found.append(None)
    return found


def _page(curves: Sequence[Curve]) -> str:
    shares = [f"{share:g}" for share in _SHARES]
    columns = ("model", "peak MB", "chunks", "least peak", *(f"time at {s} of it" for s in shares))
    rows = [_row(curve, may_chunk) for curve in curves for may_chunk in (False, True)]
    least = [curve.points[True][0][0] / curve.peak_bytes for curve in curves]
    lines = [
        "# Curves with and without chunks",
        "",
        f"**With chunks, the least peak of {len(curves)} language models is {min(least):.2f} to "
        f"{max(least):.2f} of the peak without recomputation and without chunks.**",
        "",
        *table(columns, rows),
        "",
        *machine_section(machine_record("bench.chunk_curves")),
        "",
        "## How it was planned",
        "",
        f"Peaks and times are predicted, with op times estimated for `{_MACHINE}`. The models have "
        'two layers and return only their loss (`outputs="loss"`). Peak is that of the schedule '
        "without recomputation and without chunks; shares and time ratios are relative to that "
        "schedule.",
    ]
    return "\n".join(lines) + "\n"


def _row(curve: Curve, may_chunk: bool) -> list[str]:
    ratios = curve.ratios[may_chunk]
    return [
        *(curve.name, f"{curve.peak_bytes / 1e6:.1f}", "yes" if may_chunk else "no"),
        f"{curve.points[may_chunk][0][0] / curve.peak_bytes:.3f}",
        *(f"{ratio:.3f}" if ratio is not None else "infeasible" for ratio in ratios),
    ]


def _save(curves: Sequence[Curve], path: Path) -> None:
    """Draws one panel for each model; needs matplotlib."""
    figure, panels = figure_of(len(curves), columns=3, width=4, height=3)
    for curve, panel in zip(curves, panels, strict=True):
        for points, color, label in zip(
            curve.points, ("#2b2e33", "#1f6fb4"), ("without chunks", "with chunks"), strict=True
        ):
            shares, ratios = (
                [b / curve.peak_bytes for b, _ in points],
                [ms / curve.time_ms for _, ms in points],
            )
            panel.step(
                [*shares, 1.05],
                [*ratios, ratios[-1]],
                where="post",
                color=color,
                linewidth=1.4,
                label=label,
            )
            panel.plot(shares, ratios, ".", color=color, markersize=4)
        panel.set_title(f"{curve.name}: {curve.peak_bytes / 1e6:.3g} MB")
        panel.set_xlim(0, 1.05)
        panel.set_ylim(0.9, 2.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#e4e6ea", linewidth=0.8)
    panels[0].legend(frameon=False)
    figure.supxlabel("peak, as a share of the baseline's")
    figure.supylabel("predicted time over the baseline's")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
