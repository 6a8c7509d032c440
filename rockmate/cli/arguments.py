"""Arguments that several commands take, and how their values are read."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rockmate.capture.options import choices_of
from rockmate.errors import InvalidArgumentError, MarkError
from rockmate.planning.options import PlanOptions

if TYPE_CHECKING:
    from rockmate.hf.model_source import SourcedModel

DTYPES = ("float32", "bfloat16", "float16")
MODEL_HELP = (
    "a Hugging Face config.json, a folder with one, or a model's name (random weights; only a "
    "configuration is ever fetched); or "
    "package.module:function, which returns (model, sample_input)"
)


def add_model_arguments(command: argparse.ArgumentParser) -> None:
    """Adds what tells the model, its sample, and how it is captured."""
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument(
        "--batch",
        type=positive,
        help="sequences or images of a configuration's sample (default: 2)",
    )
    command.add_argument(
        "--tokens",
        type=at_least_two,
        help="in a sequence (default: 256, or as many as the model takes)",
    )
    command.add_argument(
        "--image-size",
        type=positive,
        help="pixels along an image's side (default: as in the configuration)",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, help="of a configuration's weights (default: float32)"
    )
    command.add_argument(
        "--device",
        default="cpu",
        help="where a configuration's model is built and measured (default: cpu)",
    )
    for name in ("numerics", "kernels", "untraced", "machine", "in_flight"):
        add_option(command, name)
    for word, what in (("save", "saves"), ("recompute", "recomputes")):
        command.add_argument(
            f"--{word}",
            type=names,
            action="extend",
            default=[],
            metavar="PATTERN,PATTERN",
            help=f"what every plan {what}: paths of submodules as encoder.*.mlp, ops as aten.mm, "
            "or names that rockmate.name gave",
        )
    add_option(command, "existing_checkpoints")
    add_run_arguments(command)


def add_run_arguments(command: argparse.ArgumentParser) -> None:
    """Adds how the command runs: threads, and what it shows."""
    text = "threads of an op (default: PyTorch's choice)"
    command.add_argument("--threads", type=positive, help=text)
    command.add_argument("--quiet", action="store_true", help="no progress, only the table")


def add_measure_arguments(command: argparse.ArgumentParser, where: str) -> None:
    """Adds whether steps are measured, and how many."""
    command.add_argument("--measure", action="store_true", help=f"train a few steps {where}")
    text = "steps that --measure takes (default: 5)"
    command.add_argument("--steps", dest="num_steps", type=positive, default=5, help=text)


def add_option(command: argparse.ArgumentParser, name: str) -> None:
    """Adds an option of `PlanOptions`, with its values and its default there."""
    default = next(each.default for each in fields(PlanOptions) if each.name == name)
    text, metavar, read = _OPTIONS[name]
    command.add_argument(
        f"--{name.removesuffix('_s').replace('_', '-')}",
        dest=name,
        default=default,
        choices=choices_of(PlanOptions).get(name),
        help=f"{text} (default: {default})" if default else text,
        metavar=metavar,
        type=read,
    )


def add_budget_arguments(command: argparse.ArgumentParser) -> None:
    """Adds what plans for a budget take: when a search ends, where values may move, ranks."""
    for name in ("gap_tolerance", "time_limit_s", "offload", "host_budget", "mesh"):
        add_option(command, name)


def planning_options(arguments: argparse.Namespace) -> PlanOptions:
    """The options of planning that were given.

    Raises:
        MarkError: a pattern is to be saved and to be recomputed.
    """
    both = [pattern for pattern in arguments.save if pattern in arguments.recompute]
    if both:
        raise MarkError(f"--save and --recompute both name {both[0]!r}. Leave one of them out.")
    words = {"save": arguments.save, "recompute": arguments.recompute}
    marks = {pattern: word for word, patterns in words.items() for pattern in patterns}
    return PlanOptions(**fields_of(PlanOptions, arguments), marks=marks or None)


def fields_of(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given for the fields of a dataclass of options, by name."""
    names = {each.name for each in fields(options)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def write_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file, or raises an `InvalidArgumentError` that says why it cannot be written."""
    try:
        write(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"cannot write {path}: {reason}. Give another file or folder."
        raise InvalidArgumentError(msg) from error


def source_of(arguments: argparse.Namespace) -> SourcedModel:
    """The model that was named, with its sample; without --batch one of two rows.

    Two is the smallest batch that a symbol can stand for. Where the length varies, one will do.
    """
    from rockmate.hf.model_source import load_model
    from rockmate.hf.synthetic_sample import SampleShape

    is_one = getattr(arguments, "longest", False) and ":" not in arguments.model
    shape = SampleShape(
        batch_size=arguments.batch or (1 if is_one else 2),
        num_tokens=arguments.tokens,
        image_size=arguments.image_size,
    )
    device = "meta" if arguments.machine is not None else arguments.device
    return load_model(arguments.model, shape, device=device, dtype=arguments.dtype)


@contextmanager
def only_errors_logged(*loggers: str) -> Iterator[None]:
    """Leaves out what these loggers tell below errors: a table, or an error, says what is wrong."""
    levels = {logger: logger.level for logger in map(logging.getLogger, loggers)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


# --- values ---------------------------------------------------------------------------------------


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them, each once."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def fraction(text: str) -> float:
    """A number in (0, 1]."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def above_zero(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def mesh_sizes(text: str) -> tuple[int, ...]:
    """Sizes of a mesh of one or two dimensions, as "8" or "2x8"."""
    sizes = tuple(positive(size) for size in text.split("x"))
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text} has {len(sizes)} dimensions; give N or MxN")
    return sizes


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return at_least(text, 1)


def at_least_two(text: str) -> int:
    """A whole number of at least 2."""
    return at_least(text, 2)  # a language model predicts the second token from the first


def at_least(text: str, smallest: int) -> int:
    """A whole number of at least `smallest`."""
    value = int(text)
    if value < smallest:
        raise argparse.ArgumentTypeError(f"{text} is below {smallest}")
    return value


# Of options of `PlanOptions`: what they do, what stands for their value, and how it is read.
_OPTIONS: dict[str, tuple[str, str | None, Callable[[str], Any]]] = {
    "numerics": (
        "whether plans may run in chunks, which add the same numbers in another order, where that "
        "is faster; bitwise keeps the bits of every gradient",
        None,
        str,
    ),
    "kernels": ("fuse groups of ops into compiled kernels, or where that is faster", None, str),
    "untraced": (
        "submodules that run as they are, since they cannot be captured", "PATH,PATH", names
    ),
    "machine": (
        "estimate times for it instead of measuring them here: h100, l4, ..., or the path of a "
        ".toml",
        "MACHINE",
        str,
    ),
    "outputs": ("loss releases all other outputs, such as logits", None, str),
    "in_flight": ("forwards that run before the backward of the first", "K", positive),
    "existing_checkpoints": (
        "undo checkpointed calls in the model's code, or keep them as marks", None, str
    ),
    "gap_tolerance": (
        "end a search this near to the lower bound, as a fraction of the time without "
        "recomputation",
        "FRACTION",
        above_zero,
    ),
    "time_limit_s": ("end the search for one plan after so many seconds", "SECONDS", above_zero),
    "offload": (
        "let values move to another memory tier and back: host, or disk:FOLDER", "TIER", str
    ),
    "host_budget": ("most that they take there, as 32GiB (default: no limit)", "SIZE", str),
    "weights": (
        "auto keeps frozen weights in that tier, too, where they do not fit beside activations; "
        "all also trained ones, with their gradients and optimizer's states",
        None,
        str,
    ),
    "mesh": (
        "plan one rank of a cluster of --machine, with parameters sharded over N ranks, or over N "
        "ranks in each of M replicas as MxN",
        "N",
        mesh_sizes,
    ),
}  # fmt: skip
