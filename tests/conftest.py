"""Tiers, threads and the option that rewrites golden texts.

| tier | tests |
|---|---|
| `unit` | of algorithms and of the source tree: no torch model |
| `model` | all others that are quick; the default |
| `integration` | of commands, guides, scripts, processes, other libraries, memory elsewhere |
| `slow` | listed in `slow.txt`: further cases of properties that a quick case covers |
| `bench` | of the benchmarks, and those that measure time |
| `cuda` | that need a CUDA device |

`make test` runs `unit` and `model`, `.ci/run` `integration` too, `make test-all` all but `cuda`.
"""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

# Workers share the cores, so each runs single-threaded; subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ROCKMATE_CACHE"] = "off"  # plans are made, and the user's are left alone

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]
UNIT = (
    "tests/rotor/",
    "tests/checkmate/",
    "tests/test_layers.py",
    "tests/test_limits.py",
    "tests/test_names_in_text.py",
    "tests/test_private_names.py",
)
INTEGRATION = (
    "tests/adoption/",
    "tests/checks/",
    "tests/cli/",
    "tests/curves/",
    "tests/docs/",
    "tests/dynamo/",
    "tests/fusion/",
    "tests/hf/",
    "tests/offload/",
    "tests/scripts/",
    "tests/test_packaging.py",
    # Whole models of other libraries, several processes, and searches that are compared by time.
    "tests/entry/test_quantized.py",
    "tests/entry/test_shapes.py::test_smaller_shapes_take_over_the_schedule_and_equal_eager[gpt2]",
    "tests/entry/test_step_functions.py::test_derivatives_by_functions",
    "tests/frames/test_quantized.py",
    "tests/frames/test_sharded.py::test_two_processes",
    "tests/interiors/test_planned_frames.py::test_a_decoder_of_transformers_with_layerdrop",
    "tests/planning/test_plans_together.py::test_they_are_about_as_fast_as_plans_made_one_by_one",
    "tests/runtime/test_distributed.py::test_two_processes",
    "tests/runtime/test_fake_cuda.py",
    "tests/runtime/test_fully_shard.py::test_processes",
)
QUICK_BENCH = ("tests/bench/test_frames_page.py", "tests/bench/test_zoo.py")
BENCH = ("tests/bench/",)
CUDA = ("tests/cuda/",)
TIERS = ("unit", "integration", "slow", "bench", "cuda")
SLOW = tuple(
    line
    for line in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


# Their tests compare bits, often with measured times, which must not decide whether those are kept.
_BITS = "capture docs dynamo entry frames graph hf interiors offload ops runtime scripts trial"
BITS = tuple(f"tests/{part}/" for part in _BITS.split())


# Their tests judge plans, or name seeds whose plans do what is rare.
SEARCHES = (
    "tests/bound/",
    "tests/curves/",
    "tests/entry/test_planner.py",
    "tests/offload/test_bound.py",
    "tests/offload/test_plans.py",
    "tests/planning/",
    "tests/runtime/test_random_graphs.py",
)


@pytest.fixture(autouse=True, scope="module")
def long_lived_objects_frozen() -> None:
    """Collections pass over what imports and earlier files have left for good.

    Frames begin a recording with a full one, which takes 0.2 s with all of PyTorch in memory.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def plain_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of short searches, and where bits are compared, in chunks only if nothing else fits.

    `tests/planning/test_chunked_plans.py` has the rule by which chunks are chosen elsewhere.
    """
    from rockmate.planning import chunkable_blocks, local_search

    if request.node.nodeid.startswith(BITS):
        monkeypatch.setattr(chunkable_blocks, "_MIN_BUDGET_SHARE", math.inf)
    if not request.node.nodeid.startswith(SEARCHES):
        monkeypatch.setattr(local_search, "_STALL_ROUNDS", 4)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden/*.txt instead of comparing"
    )


def tier_of(item: pytest.Item, slow: frozenset[str]) -> str:
    if item.nodeid in slow:
        return "slow"
    for tier in TIERS:
        if item.get_closest_marker(tier):
            return tier
    places = {
        "unit": UNIT, "integration": INTEGRATION, "model": QUICK_BENCH, "bench": BENCH, "cuda": CUDA
    }  # fmt: skip
    found = (tier for tier, place in places.items() if item.nodeid.startswith(place))
    return next(found, "model")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = frozenset(SLOW)
    for item in items:
        item.add_marker(tier_of(item, slow))
        if item.nodeid in slow and item.get_closest_marker("model"):
            msg = f"{item.nodeid} is in tests/slow.txt and marked as quick"
            raise pytest.UsageError(msg)
    files = {item.nodeid.split("::")[0] for item in items}
    is_whole = not config.option.keyword and all("::" not in str(arg) for arg in config.args)
    known = {item.nodeid for item in items}
    stale = [line for line in SLOW if line.split("::")[0] in files and line not in known]
    if is_whole and stale:
        msg = f"tests/slow.txt lists tests that do not exist: {', '.join(stale)}"
        raise pytest.UsageError(msg)
