"""Predicted time against memory with and without chunks, for kinds of language models.

    taskset -c 1 python -m bench.chunk_curves --output bench/results/chunk_curves_cpu_202611

Models are small, with a vocabulary that sets their peak as the full one does at full size, and
return their loss alone. Writes STEM.md and STEM.png. Op times are estimated from the description of
a CPU, so that both curves rest on the same ones; `bench.loss_block` measures peaks and times of
whole steps.
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
        name: of the model.
        peak_bytes: with nothing recomputed and nothing in chunks.
        time_ms: likewise.
        points: without and with chunks: (peak in bytes, time in ms), growing peaks.
        ratios: without and with chunks: predicted time over `time_ms` at `_SHARES` of `peak_bytes`;
            None where nothing fits.
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


_MODELS = {
    "GPT-2": partial(
        _model, "GPT2", "LMHeadModel", n_layer=2, n_embd=128, n_head=4, vocab_size=_VOCABULARY
    ),
    "Llama": partial(_model, "Llama", "ForCausalLM", **_DECODER),
    "Qwen3": partial(_model, "Qwen3", "ForCausalLM", **_DECODER),
    "Gemma 2": partial(_model, "Gemma2", "ForCausalLM", **_DECODER, final_logit_softcapping=30.0),
    "Mistral": partial(_model, "Mistral", "ForCausalLM", **_DECODER),
    "OPT": partial(
        _model,
        "OPT",
        "ForCausalLM",
        hidden_size=128,
        ffn_dim=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=128,
        vocab_size=_VOCABULARY,
    ),
    "BERT": partial(
        _model,
        "Bert",
        "ForMaskedLM",
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=_VOCABULARY,
    ),
    "T5": partial(
        _model,
        "T5",
        "ForConditionalGeneration",
        d_model=128,
        d_kv=32,
        d_ff=512,
        num_layers=2,
        num_heads=4,
        vocab_size=_VOCABULARY,
        decoder_start_token_id=0,
    ),
    "Whisper": partial(
        _model,
        "Whisper",
        "ForConditionalGeneration",
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=_WHISPER_POSITIONS,
        vocab_size=_VOCABULARY,
        **_SPECIAL,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans, and writes page and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chunk_curves", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--model", action="append", choices=list(_MODELS), help="repeatable; all if left out"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="STEM", help="where STEM.md and STEM.png go"
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
        Planner(model, batch, outputs="loss", machine=_MACHINE, allow_chunking=may_chunk)
        for may_chunk in (False, True)
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
    machine = machine_record("bench.chunk_curves")
    heads = [f"time at {share:g} of it" for share in _SHARES]
    lines = [
        "# Curves with and without chunks",
        "",
        f"Op times are those of `{_MACHINE}`, estimated. PyTorch {machine['torch']}, transformers "
        f"{machine['transformers']}. "
        f"Commit {machine['commit']}. Command: `python -m bench.chunk_curves --output STEM`; "
        "models of two layers, see there.",
        "",
        'Peaks and times are predicted; the models return their loss alone (`outputs="loss"`). '
        '"Peak" is that with nothing recomputed and '
        "nothing in chunks, and what shares and time ratios are of.",
        "",
        "| model | peak MB | chunks | least peak | " + " | ".join(heads) + " |",
        "|---|---|---|---|---|---|",
    ]
    for curve in curves:
        for may_chunk in (False, True):
            least = curve.points[may_chunk][0][0] / curve.peak_bytes
            cells = [
                f"{ratio:.3f}" if ratio is not None else "infeasible"
                for ratio in curve.ratios[may_chunk]
            ]
            words = [
                curve.name,
                f"{curve.peak_bytes / 1e6:.1f}",
                "yes" if may_chunk else "no",
                f"{least:.3f}",
                *cells,
            ]
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines) + "\n"


def _save(curves: Sequence[Curve], path: Path) -> None:
    """One panel a model; needs matplotlib."""
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
    figure.supxlabel("peak, as a share of that with nothing recomputed")
    figure.supylabel("predicted time, likewise")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
