"""Several processes of one gloo group, each running the same check."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

Check = Callable[..., None]


def run_on_ranks(check: Check, num_ranks: int, *args: Any) -> None:
    """Runs a function of a test module, with a mesh of all ranks, on each of them.

    Args:
        check: takes the mesh, then `args`.
        num_ranks: number of processes.
        *args: further arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", num_ranks, check, args)
        torch.multiprocessing.spawn(_enter, given, nprocs=num_ranks)


def _enter(rank: int, store: str, num_ranks: int, check: Check, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks
    )
    check(init_device_mesh("cpu", (num_ranks,)), *args)
    distributed.barrier()
    # Gloo and the legacy profiler together: PyTorch aborts in about one teardown of fifty.
    os._exit(0)
