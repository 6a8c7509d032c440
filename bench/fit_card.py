"""How long `rockmate fit` takes for a Llama-3-8B with LoRA on a card of 24 GiB that is elsewhere.

    python -m bench.fit_card > bench/results/fit_card_cpu_<yyyymm>.md

Runs the command as a user types it, in a process of its own, from a configuration that is written
here. The page has its seconds, interpreter and imports included, and what it printed. Beside the
page, the command's picture.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.machine import machine_record, machine_text
from bench.pages import targets, worst_row

MOST_S = 90.0
"""Seconds that the command may take."""

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_OPTIONS = (
    "--memory", "24GiB", "--lora", "--machine", "rtx4090", "--tokens", "4096",
    "--dtype", "bfloat16", "--plot", "fit.png",
)  # fmt: skip
_RESULTS = Path(__file__).parent / "results"


def fitted(num_layers: int, folder: Path) -> tuple[float, str]:
    """Seconds of the command, and what it printed; its picture lies in the folder."""
    config = LLAMA_3_8B | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "rockmate", "fit", "config.json", *_OPTIONS]
    begin = time.perf_counter()
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if finished.returncode != 0:
        raise RuntimeError(f"rockmate fit failed:\n{finished.stderr[-3000:]}")
    return seconds, finished.stdout


def page(seconds: float, printed: str, picture: str, about: str) -> list[str]:
    """The target, what the command printed, and its picture."""
    row = worst_row("`rockmate fit`, seconds", MOST_S, [("Llama-3-8B, LoRA, 24 GiB", seconds)])
    return [
        "# The largest batch of a Llama-3-8B with LoRA on 24 GiB", "", about, "", *targets([row]),
        "", "```", f"$ rockmate fit config.json {' '.join(_OPTIONS)}", *printed.splitlines(),
        "```", "", f"![Memory by part and samples a second at each batch]({picture})",
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the page; exit code 1 if the command took too long."""
    parser = argparse.ArgumentParser(description="How long a fit for a large model takes.")
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B["num_hidden_layers"])
    parser.add_argument(
        "--picture", type=Path, metavar="FILE",
        default=_RESULTS / f"fit_card_cpu_{datetime.now(UTC):%Y%m}.png",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    about = machine_text(machine_record("bench.fit_card"))
    with tempfile.TemporaryDirectory() as name:
        seconds, printed = fitted(arguments.layers, Path(name))
        shutil.copyfile(Path(name) / "fit.png", arguments.picture)
    lines = page(seconds, printed, arguments.picture.name, about)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if seconds <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
