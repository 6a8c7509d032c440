"""Groups compiled for a GPU that is not there: Inductor's Triton code, down to the machine's code.

Nothing runs. Needs Triton and a PyTorch that is built for CUDA.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_blocks import Scored
from joint_graphs import captured_for

from rockmate._torch.inductor import Deadline, compile_graph, decomposed
from rockmate.fusion.groups import find_groups
from rockmate.fusion.in_place_form import writing
from rockmate.fusion.rewrite import _subgraphs
from rockmate.fusion.subgraph import Subgraph, takeable
from rockmate.graph.build import build_graph
from rockmate.graph.passes import REWRITES, run_passes

pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and torch.backends.cuda.is_built()),
    reason="needs Triton and a PyTorch for CUDA",
)

# As an H100 answers.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    warp_size=32,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
)
Source = tuple[str, str]


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Source]]:
    """The names and sources of the Triton kernels that Inductor writes, which are not loaded."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    found: list[Source] = []
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    interface: Any = importlib.import_module("torch._dynamo.device_interface").CudaInterface
    for name in ("device_count", "current_device", "get_device_properties"):
        monkeypatch.setattr(interface, name, staticmethod(answers[name]))

    def triton(_: object, name: str, source: str, *_given: object) -> object:
        found.append((name, source))
        return object()

    monkeypatch.setattr(AsyncCompile, "triton", triton)
    with fresh_cache():
        yield found


@pytest.fixture
def groups() -> list[tuple[Subgraph, list[int]]]:
    """Groups, with the positions that their in-place forms may take; captured on the CPU."""
    x = torch.randn(256, 64)
    graph = build_graph(run_passes(REWRITES, captured_for(Scored(), (x,))))
    found = _subgraphs(graph, find_groups(graph))
    return [(each, list(takeable(graph, each))) for each in found]


def test_groups_and_their_in_place_forms_compile_for_a_gpu(
    groups: list[tuple[Subgraph, list[int]]], sources: list[Source]
) -> None:
    deadline = Deadline.after(300)
    device = torch.device("cuda", 0)
    assert groups
    for subgraph, positions in groups:
        layouts = [(*layout[:3], device) for layout in subgraph.layouts]
        before = len(sources)
        traced, mode = decomposed(subgraph.module, layouts)
        forms = [traced, *(writing(traced, position) for position in positions[:1])]
        for form in forms:
            compile_graph(form, mode, layouts, deadline)
        assert len(sources) > before, subgraph.calls
    for name, source in sources:
        assert machine_code(name, source), name


def machine_code(name: str, source: str) -> bytes:
    """The cubin that Triton makes of a kernel of Inductor."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(PyCodeCache.load(source), name)
    meta = kernel._create_compile_meta(kernel.configs[0])
    asked = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    options = {"num_warps": meta["num_warps"], "num_stages": meta["num_stages"]}
    binary = triton.compile(asked, target=GPUTarget("cuda", 90, 32), options=options)
    return binary.asm["cubin"]
