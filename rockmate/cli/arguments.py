"""Arguments that several commands take, and how their values are read."""

from __future__ import annotations

import argparse
from typing import Any

# As in `rockmate.hf.model_source`, which imports torch.
DTYPES = ("float32", "bfloat16", "float16")
# As in `rockmate.planning.stopping_rule`, which imports more than an argument needs.
GAP_TOLERANCE = 1e-3
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
    _add_planning_arguments(command)
    command.add_argument(
        "--threads", type=positive, help="threads of an op (default: PyTorch's choice)"
    )


def _add_planning_arguments(command: argparse.ArgumentParser) -> None:
    """How the step is captured, and what every plan of it keeps."""
    command.add_argument(
        "--numerics",
        choices=("any_order", "bitwise"),
        default="any_order",
        help="whether plans may run in chunks, which add the same numbers in another order, where "
        "that is faster; bitwise keeps the bits of every gradient (default: any_order)",
    )
    command.add_argument(
        "--kernels",
        choices=("eager", "fused", "auto"),
        default="eager",
        help="fuse groups of ops into compiled kernels, or where that is faster (default: eager)",
    )
    command.add_argument(
        "--untraced",
        type=names,
        default=(),
        metavar="PATH,PATH",
        help="submodules that run as they are, since they cannot be captured",
    )
    command.add_argument(
        "--machine",
        help="estimate times for it instead of measuring them here: h100, l4, ..., or the path "
        "of a .toml",
    )
    add_mark_arguments(command)
    command.add_argument(
        "--in-flight",
        type=positive,
        default=1,
        metavar="K",
        help="forwards that run before the backward of the first (default: 1)",
    )


def add_mark_arguments(command: argparse.ArgumentParser) -> None:
    """Adds what every plan must save or recompute."""
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
    command.add_argument(
        "--existing-checkpoints",
        choices=("lift", "honour"),
        default="lift",
        help="undo checkpointed calls in the model's code, or keep them as marks (default: lift)",
    )


def add_mesh_argument(command: argparse.ArgumentParser) -> None:
    """Adds the ranks of a cluster that need not be there."""
    command.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="N",
        help="plan one rank of a cluster of --machine, with parameters sharded over N ranks, or "
        "over N ranks in each of M replicas as MxN",
    )


def mesh_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The mesh that was given, as an option of `Planner`."""
    return {} if arguments.mesh is None else {"mesh": arguments.mesh}


def add_offload_arguments(command: argparse.ArgumentParser) -> None:
    """Adds where values may move."""
    command.add_argument(
        "--offload",
        metavar="TIER",
        help="let values move to another memory tier and back: host, or disk:FOLDER",
    )
    command.add_argument(
        "--host-budget",
        metavar="SIZE",
        help="most that they take there, as 32GiB (default: no limit)",
    )


def offload_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where values may move, as options of `Planner`."""
    given = {"offload": arguments.offload, "host_budget": arguments.host_budget}
    return {name: value for name, value in given.items() if value is not None}


def mark_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The marks that were given, as options of `Planner`.

    Raises:
        MarkError: a pattern is to be saved and to be recomputed.
    """
    from rockmate.errors import MarkError

    both = [pattern for pattern in arguments.save if pattern in arguments.recompute]
    if both:
        raise MarkError(f"--save and --recompute both name {both[0]!r}. Leave one of them out.")
    words = {"save": arguments.save, "recompute": arguments.recompute}
    marks = {pattern: word for word, patterns in words.items() for pattern in patterns}
    options: dict[str, Any] = {"marks": marks} if marks else {}
    if arguments.existing_checkpoints != "lift":
        options["existing_checkpoints"] = arguments.existing_checkpoints
    return options


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


def add_search_arguments(command: argparse.ArgumentParser) -> None:
    """Adds what tells when the search for a plan ends."""
    command.add_argument(
        "--gap-tolerance",
        type=above_zero,
        default=GAP_TOLERANCE,
        metavar="FRACTION",
        help="end a search this near to the lower bound, as a fraction of the time without "
        "recomputation (default: %(default)s)",
    )
    command.add_argument(
        "--time-limit",
        type=above_zero,
        default=30.0,
        metavar="SECONDS",
        help="end the search for one plan after so many seconds (default: %(default)s)",
    )


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
