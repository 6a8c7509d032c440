"""Compilers that hang or fail: the groups stay unfused and are named, and training goes on.

Each case is a process of its own, since Inductor keeps what it has found out about a compiler.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rockmate._torch.compiler_process import Deadline, compilers_end_by, watch_compilers

ROOT = Path(__file__).resolve().parents[2]
# Answers to questions, such as for its version, as the real one; compiles as the rest says.
COMPILER = """#!/bin/sh
case "$*" in
  *.cpp*|*.h*) {compiles} ;;
  *) exec {compiler} "$@" ;;
esac
"""
SCRIPT = """
import json, sys, time
import torch
from fused_blocks import Scored
from rockmate import Planner

torch.manual_seed(5)
model, x = Scored(), torch.randn(256, 64)
begin = time.monotonic()
planner = Planner(model, (x,), kernels="fused", compile_limit_s=float(sys.argv[1]))
seconds = time.monotonic() - begin
is_eager = torch.equal(planner.module(1.0)(x), model(x))
groups = [[group.refusal, group.num_places] for group in planner.fusion.groups]
summary = planner.fusion.summary()
print(json.dumps([seconds, is_eager, planner.fusion.num_places, groups, summary]))
"""


def fused_with(compiles: str, limit_s: float, folder: Path) -> list[Any]:
    """What `SCRIPT` prints with a compiler that does this, and with empty caches."""
    real = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    assert real is not None
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(compiles=compiles, compiler=real))
    compiler.chmod(0o755)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(limit_s)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "CXX": str(compiler),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        },
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def num_running(directory: Path) -> int:
    """The number of processes that were started with a path in a directory."""
    found = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += str(directory).encode() in process.read_bytes()
    return found


def test_a_compiler_that_hangs_is_stopped_at_the_limit(tmp_path: Path) -> None:
    seconds, is_eager, num_places, groups, summary = fused_with("sleep 1000", 2, tmp_path)
    assert seconds < 120
    assert is_eager  # every op runs by itself
    assert num_places == 0
    assert groups
    for refusal, places in groups:
        assert refusal == "it cannot be compiled: compiling takes longer than 2 s"
        assert places > 0
    assert f"{sum(places for _, places in groups)} groups stay unfused" in summary
    assert not num_running(tmp_path)


def test_a_compiler_that_fails_leaves_its_groups_unfused(tmp_path: Path) -> None:
    _, is_eager, num_places, groups, _ = fused_with("echo no space >&2; exit 3", 60, tmp_path)
    assert is_eager
    assert num_places == 0
    assert groups
    assert all("it cannot be compiled: " in refusal for refusal, _ in groups)


def test_a_process_ends_with_its_children() -> None:
    module: Any = SimpleNamespace(subprocess=None)
    watch_compilers(module)
    command = ["sh", "-c", "sleep 1000 & sleep 1000"]
    begin = time.monotonic()
    with pytest.raises(module.subprocess.TimeoutExpired), compilers_end_by(Deadline.after(0.2)):
        module.subprocess.check_output(command)  # the child holds the pipe
    assert time.monotonic() - begin < 30
    assert module.subprocess.check_output(["echo", "one"]) == b"one\n"
    with compilers_end_by(Deadline.after(30)):
        assert module.subprocess.check_output(["echo", "two"]) == b"two\n"
        assert module.subprocess.check_call(["true"]) == 0
        with pytest.raises(module.subprocess.CalledProcessError):
            module.subprocess.check_call(["false"])
