"""Processes that begin with PyTorch imported, and groups of them that each run the same check."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from rockmate.planning import local_search

Check = Callable[..., None]
needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs gloo"
)

# What most checks import, and their first plans: seconds in a process that is not forked with it.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers"),
        *("torch._functorch.partitioners", "rockmate.adoption.session"),
        "rockmate.planning.strategies",
    ]
)


def run_processes(function: Callable[..., None], args: tuple[Any, ...], number: int) -> None:
    """Runs `function(rank, *args)` of a test module in processes of their own, and waits.

    They are forked from one that has only imported, so they share no state with the tests.
    """
    torch.multiprocessing.start_processes(
        function, args, nprocs=number, start_method=FORKED.get_start_method()
    )


def run_on_ranks(check: Check, num_ranks: int, *args: Any) -> None:
    """Runs a function of a test module, with a mesh of all ranks, on each of them.

    Args:
        check: takes the mesh, then `args`.
        num_ranks: number of processes.
        *args: further arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_processes(_enter, (f"{folder}/store", num_ranks, check, args), num_ranks)


def _enter(rank: int, store: str, num_ranks: int, check: Check, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    local_search._STALL_ROUNDS = 4  # as in the other tests that judge no plan
    warnings.filterwarnings("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
    )
    check(init_device_mesh("cpu", (num_ranks,)), *args)
    distributed.barrier()
    # Gloo and the legacy profiler together: PyTorch aborts in about one teardown of fifty.
    os._exit(0)
