"""The command `rockmate`: `rockmate demo` trains a model eager and inside a budget, and compares.

Exit codes: 0 done; 1 it ran, but a promise did not hold (losses, weights, peak); 2 it could not run as asked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rockmate.demo import DemoOptions

_PLOT_NAME = "memory.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and give the exit code."""
    arguments = _parser().parse_args(argv)
    from rockmate.errors import RockmateError  # after parsing: `--help` needs no torch

    try:
        return _demo(arguments)
    except RockmateError as error:
        sys.stderr.write(f"rockmate demo: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("rockmate demo: interrupted\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rockmate", description="Train a PyTorch model inside an activation budget.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a language model eager and inside a budget, and compare",
        description=(
            "Train one language model twice on the sources of Python's standard library, eager and inside an activation budget, "
            "from the same weights on the same batches; print one table and plot the memory over a step. Nothing is downloaded."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--model", help="folder, or cached name, of a Hugging Face causal model (default: a built GPT-2)")
    demo.add_argument("--budget", type=_fraction, default=0.4, help="fraction of eager's measured activation peak")
    demo.add_argument("--steps", type=_positive, default=6, help="training steps of each run")
    demo.add_argument("--batch", type=_positive, default=4, help="sequences in a batch")
    demo.add_argument("--tokens", type=_at_least_two, default=256, help="tokens in a sequence")
    demo.add_argument("--layers", type=_positive, help="layers of the built GPT-2 (default: 12)")
    demo.add_argument("--width", type=_positive, help="hidden size of the built GPT-2 (default: 384)")
    demo.add_argument("--threads", type=_positive, help="threads of an op (default: PyTorch's choice)")
    demo.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="where the plot goes")
    demo.add_argument("--quiet", action="store_true", help="no progress, only the table")
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads or num_threads)
    try:
        return _run_demo(arguments)
    finally:
        torch.set_num_threads(num_threads)


def _run_demo(arguments: argparse.Namespace) -> int:
    from rockmate import demo, plot

    options = _demo_options(arguments)
    demo.require("matplotlib.figure", extra="plot")  # now rather than after the training
    _make_folder(arguments.out)
    result = demo.run(options)
    sys.stdout.write(demo.report(result))
    path = arguments.out / _PLOT_NAME
    plot.save_memory_plot(result, path, backward_mark=demo.BACKWARD_MARK)
    sys.stdout.write(f"Plot: {path}\n")
    return 0 if result.succeeded else 1


def _demo_options(arguments: argparse.Namespace) -> DemoOptions:
    from rockmate.demo import DemoError, DemoOptions

    size = {"num_layers": arguments.layers, "width": arguments.width}
    size = {name: value for name, value in size.items() if value is not None}
    if arguments.model is not None and size:
        msg = "--layers and --width are for the GPT-2 that is built without --model. Leave them out."
        raise DemoError(msg)
    return DemoOptions(
        model=arguments.model,
        budget=arguments.budget,
        num_steps=arguments.steps,
        batch_size=arguments.batch,
        sequence_length=arguments.tokens,
        quiet=arguments.quiet,
        **size,
    )


def _make_folder(path: Path) -> None:
    from rockmate.demo import DemoError

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"cannot make the folder {path}: {error.strerror}. Give another --out."
        raise DemoError(msg) from error


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _at_least_two(text: str) -> int:
    return _at_least(text, 2)  # a language model predicts the second token from the first


def _at_least(text: str, smallest: int) -> int:
    value = int(text)
    if value < smallest:
        raise argparse.ArgumentTypeError(f"{text} is below {smallest}")
    return value


if __name__ == "__main__":
    sys.exit(main())
