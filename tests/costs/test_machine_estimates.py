"""Planning for a machine that is not here.

Its description, the costs estimated from it, and a capture without the model's memory.
"""

from __future__ import annotations

import resource
import tomllib
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from fine_tuning import llama
from made_of import made_of
from schedules import verify
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from bench import plan_quality
from bench.machine import machine_record
from rockmate import InvalidSampleError, Plan, Planner, RockmateModule, UnsupportedModelError
from rockmate.costs.estimate import estimate_costs, num_flops
from rockmate.costs.machine import Machine, MachineError, known_machines, load_machine
from rockmate.costs.measure import measure_costs
from rockmate.errors import PlanMismatchError
from rockmate.graph.ir import Op
from rockmate.planning.step import capture_step

EXACT = """
device = "{device}"
launch_us = 7
bandwidth_gb_per_s = 2
allocation_bytes = 100
[peak_tflops]
float32 = 0.5
[efficiency]
matmul = 0.5
convolution = 0.25
attention = 1
memory = 0.5
[nanoseconds_per_element]
transcendental = 1000
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def exact(folder: Path, device: str = "cpu") -> Machine:
    return load_machine(write(folder, EXACT.format(device=device)))


def ops_of(model: nn.Module, sample: Any, machine: Machine | None = None) -> list[Op]:
    return list(capture_step(model, sample, machine=machine).graph.ops)


def call_names(ops: list[Op]) -> list[str]:
    return [str(getattr(op.node.target, "__name__", op.node.target)) for op in ops]


def tiny_llama(
    dtype: torch.dtype = torch.bfloat16, *, num_layers: int = 2, key_value_heads: int = 2
) -> nn.Module:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160}
    sizes |= {"num_hidden_layers": num_layers, "num_key_value_heads": key_value_heads}
    with torch.device("meta"):
        model = llama(vocab_size=512, max_position_embeddings=64, attention_dropout=0.0, **sizes)
    model.config.use_cache = False
    return model.to(dtype)


def words(device: str = "meta") -> dict[str, Tensor]:
    tokens = torch.zeros(2, 32, dtype=torch.long, device=device)
    return {"input_ids": tokens, "labels": tokens}


# --- descriptions ---------------------------------------------------------------------------------


def test_shipped_machines_load() -> None:
    assert {"a100", "h100", "cpu-avx2"} <= set(known_machines())
    a100, h100 = (load_machine(name).peak_tflops["bfloat16"] for name in ("a100", "h100"))
    assert h100 > a100 > 100
    for name in known_machines():
        machine = load_machine(name)
        assert machine.name == name
        assert machine.allocation_bytes == {"cuda": 512, "cpu": 1}[machine.device]


def test_descriptions_are_part_of_the_distribution() -> None:
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["rockmate"]
    declared = {path.stem for pattern in patterns for path in (root / "rockmate").glob(pattern)}
    assert set(known_machines()) <= declared


def test_own_description_is_read_from_a_path(tmp_path: Path) -> None:
    path = write(tmp_path, EXACT.format(device="cuda"))
    machine = load_machine(path)
    assert machine == load_machine(str(path)) == load_machine(machine)
    assert (machine.name, machine.device, machine.bandwidth_gb_per_s) == ("own", "cuda", 2)
    assert machine.efficiency == {"matmul": 0.5, "convolution": 0.25, "attention": 1, "memory": 0.5}


def test_unknown_machine_names_the_known_ones_and_how_to_write_one() -> None:
    with pytest.raises(MachineError) as caught:
        Planner(nn.Linear(3, 3), torch.zeros(2, 3), machine="h1000")
    for word in ("h1000", *known_machines(), ".toml", "bandwidth_gb_per_s", "[peak_tflops]"):
        assert word in str(caught.value)


@pytest.mark.parametrize("machine", [3, b"h100", ["h100"], torch.device("cpu")])
def test_what_is_no_machine_is_refused(machine: Any) -> None:
    with pytest.raises(
        MachineError, match=r"a name, a path or a rockmate\.Machine is needed"
    ) as caught:
        Planner(nn.Linear(3, 3), torch.zeros(2, 3), machine=machine)
    for word in (f"machine {machine!r} is of type {type(machine).__name__};", "h100", ".toml"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('device = "cpu"', 'device = "abacus"', "abacus"),
        ("launch_us = 7", "", "launch_us"),
        ("launch_us = 7", "launch_us = -7", "-7"),
        ("launch_us = 7", "launch_us = true", "launch_us"),
        ("launch_us = 7", 'launch_us = 7\ncolour = "red"', "colour"),
        ("allocation_bytes = 100", "allocation_bytes = 0.5", "0.5"),
        ("float32 = 0.5", "", "peak_tflops"),
        ("float32 = 0.5", "float33 = 0.5", "float33"),
        ("memory = 0.5", "memory = 1.5", "1.5"),
        ("convolution = 0.25", "", "convolution"),
        ("transcendental = 1000", "transcendent = 1000", "transcendent"),
        ("[efficiency]", "[efficiency", "TOML"),
    ],
)
def test_faulty_descriptions_are_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = EXACT.format(device="cpu")
    assert old in text
    with pytest.raises(MachineError, match=r"own\.toml") as caught:
        load_machine(write(tmp_path, text.replace(old, new)))
    assert named in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"no machine description .*absent\.toml"):
        load_machine(tmp_path / "absent.toml")


def test_a_complex_product_takes_the_time_of_four() -> None:
    time_of = load_machine("cpu-avx2").compute_ms
    assert time_of(1e9, torch.complex64, "matmul") == time_of(4e9, torch.float32, "matmul")


def test_a_dtype_without_peak_is_told(tmp_path: Path) -> None:
    model, x = nn.Linear(3, 3).bfloat16(), torch.zeros(2, 3, dtype=torch.bfloat16)
    with pytest.raises(MachineError, match="bfloat16"):
        Planner(model, x, machine=exact(tmp_path))


# --- costs ----------------------------------------------------------------------------------------


def test_times_are_the_roofline(tmp_path: Path) -> None:
    """Worked by hand: 7 us a launch, 0.25 TFLOP/s in products, 1 GB/s, 1 us a transcendental
    element."""
    model = nn.Sequential(nn.Linear(100, 200), nn.GELU(), nn.ReLU())
    step = capture_step(model, torch.randn(50, 100), machine=exact(tmp_path))
    estimated = estimate_costs(step.graph, exact(tmp_path)).recompute
    costs = dict(zip(call_names(list(step.graph.ops)), estimated, strict=True))
    product_bytes = 4 * (50 * 100 + 100 * 200 + 200 + 50 * 200)
    assert costs["addmm.default"].time_ms == pytest.approx(7e-3 + product_bytes / 1e6)
    assert costs["gelu.default"].time_ms == pytest.approx(7e-3 + 50 * 200 / 1e3)
    assert costs["relu.default"].time_ms == pytest.approx(7e-3 + 2 * 4 * 50 * 200 / 1e6)
    large = nn.Linear(2000, 2000, bias=False)
    step = capture_step(large, torch.randn(2000, 2000), machine=exact(tmp_path))
    forward, *_ = estimate_costs(step.graph, exact(tmp_path)).recompute
    assert forward.time_ms == pytest.approx(7e-3 + 2 * 2000**3 / 0.25e9)


def test_adding_a_gradient_counts_at_the_first_run_alone(tmp_path: Path) -> None:
    layer = nn.Linear(100, 200, bias=False)
    step = capture_step(layer, torch.randn(50, 100), machine=exact(tmp_path))
    costs = estimate_costs(step.graph, exact(tmp_path))
    (product,) = (op.index for op in step.graph.ops if op.final_gradients)
    added = costs.first[product].time_ms - costs.recompute[product].time_ms
    assert added == pytest.approx(7e-3 + 3 * 4 * 100 * 200 / 1e6)
    others = [index for index in range(len(step.graph.ops)) if index != product]
    assert all(costs.first[index] == costs.recompute[index] for index in others)


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "mlp"])
def test_operations_add_up_to_what_eager_runs(name: str) -> None:
    workload = models.tiny(name)
    batch = workload.make_batch(0)
    counter = FlopCounterMode(display=False)
    with counter:
        workload.loss(workload.model, batch)[1].backward()
    ours = sum(num_flops(op.node) for op in ops_of(workload.model, workload.sample))
    assert ours == counter.get_total_flops() > 0


def test_groups_of_a_convolution_are_apart() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 32, 3, groups=4, padding=1))
    ops = ops_of(model, torch.randn(2, 8, 10, 10))
    first, second = 2 * 200 * 16 * 8, 2 * 200 * 32 * 4 * 9
    counts = [count for op in ops if (count := num_flops(op.node))]
    assert counts == [first, second, second, second, first]


def test_a_causal_mask_halves_attention_on_a_gpu() -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor, is_causal: bool) -> Tensor:
            return functional.scaled_dot_product_attention(
                x, x, super().forward(x), is_causal=is_causal
            )

    machine, x = load_machine("a100"), torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16)
    counts = []
    for is_causal in (False, True):
        ops = ops_of(Attention(64, 64).bfloat16(), (x, is_causal), machine)
        counts.append([num_flops(op.node) for op in ops if "attention" in str(op.node.target)])
    full, causal = counts
    assert full == [4 * 2 * 4 * 256 * 256 * 64, 10 * 2 * 4 * 256 * 256 * 64]
    assert causal == [count / 2 for count in full]


def workspaces(model: nn.Module, sample: Any, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Estimated and measured bytes of the ops whose names begin so."""
    graph = capture_step(model, sample).graph
    estimated = estimate_costs(graph, load_machine("cpu-avx2")).first
    return [
        (ours.overhead_bytes, theirs.overhead_bytes)
        for op, ours, theirs in zip(graph.ops, estimated, measure_costs(graph).first, strict=True)
        if op.name.startswith(names)
    ]


@pytest.mark.parametrize("num_rows", [16, 40, 96])
def test_workspaces_of_our_own_kernels_are_those_measured(num_rows: int) -> None:
    """40 rows of 32 KiB of logits are two pieces of the gradient of cross entropy and of what is
    dropped, 96 are three."""

    @made_of(lambda: {"linear": nn.Linear(8, 8192)})
    class Head(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(functional.dropout(self.linear(x)), labels)

    sample = torch.randn(num_rows, 8), torch.zeros(num_rows, dtype=torch.long)
    ours, theirs = zip(*workspaces(Head(), sample, ("cross_entropy", "dropout")), strict=True)
    assert ours == theirs
    assert sum(num_bytes > 0 for num_bytes in theirs) == 4


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("gradient_channels_last", [False, True])
def test_workspaces_of_group_norms_are_those_measured(
    channels_last: bool, gradient_channels_last: bool
) -> None:
    """Autograd or the kernel copies a gradient in another layout, by the version of PyTorch."""
    formats = (torch.contiguous_format, torch.channels_last)

    @made_of(lambda: {"scale": nn.Parameter(torch.ones(())), "norm": nn.GroupNorm(2, 8)})
    class Normalized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = (x * self.scale).contiguous(memory_format=formats[channels_last])
            y = self.norm(y).contiguous(memory_format=formats[gradient_channels_last])
            return (y * y).sum()

    found = workspaces(Normalized(), torch.randn(2, 8, 6, 6), ("native_group_norm",))
    ours, theirs = zip(*found, strict=True)
    assert len(ours) == 2
    assert ours[1] >= 2 * 4 * 2 * 8
    assert ours == theirs


def test_gradients_of_attention_take_float32_sums_on_a_gpu() -> None:
    step = capture_step(tiny_llama(), words(), machine=load_machine("h100"))
    costs = estimate_costs(step.graph, load_machine("h100")).first
    found = {
        costs[op.index].overhead_bytes
        for op in step.graph.ops
        if "attention_backward" in op.node.target.__name__
    }
    sums, row_sums, shared_heads = 4 * 2 * 4 * 128 * 32, 4 * 2 * 4 * 32, 2 * 2 * 4 * 32 * 16
    assert found == {sums + row_sums + 2 * shared_heads}


# --- capture for another device -------------------------------------------------------------------


def test_meta_and_cpu_models_give_the_same_plan_and_are_left_as_they_were() -> None:
    plans = []
    for device in ("meta", "cpu"):
        model = tiny_llama(num_layers=1)
        model = model.to_empty(device="cpu") if device == "cpu" else model
        before = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        planner = Planner(model, words(device), machine="h100")
        assert {id(tensor) for tensor in (*model.parameters(), *model.buffers())} == before
        assert {tensor.device.type for tensor in model.parameters()} == {device}
        plans.append(planner.plan(planner.minimum_peak_bytes))
    assert plans[0].snapshot == plans[1].snapshot
    assert plans[0].schedule == plans[1].schedule
    assert plans[0].costs == plans[1].costs
    assert "cuda" in plans[0].snapshot.call


def test_the_graph_is_the_gpu_s() -> None:
    gpt2 = models.tiny("gpt2")
    step = capture_step(gpt2.model, gpt2.sample, machine=load_machine("a100"))
    assert {op.device.type for op in step.graph.ops} == {"cuda"}
    assert all(storage.num_bytes % 512 == 0 for storage in step.graph.storages)
    assert not any(
        value == torch.device("cpu") for op in step.graph.ops for value in op.node.kwargs.values()
    )
    names = call_names(list(step.graph.ops))
    assert "native_dropout.default" in names
    assert "dropout_mask" not in names


def test_a_machine_of_the_model_s_own_kind_changes_no_op(tmp_path: Path) -> None:
    encoder = models.tiny("encoder")
    steps = [
        capture_step(encoder.model, encoder.sample, machine=machine)
        for machine in (None, load_machine("cpu-avx2"), exact(tmp_path))
    ]
    plain, estimated, coarse = (step.graph for step in steps)
    assert str(plain) == str(estimated)
    assert [s.num_bytes for s in coarse.storages] == [
        (s.num_bytes + 99) // 100 * 100 for s in plain.storages
    ]


@pytest.mark.parametrize(
    ("dtype", "width", "has_mask", "kernel"),
    [
        (torch.bfloat16, 16, False, "_scaled_dot_product_flash_attention"),
        (torch.float16, 16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 16, False, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 16, True, "_scaled_dot_product_efficient_attention"),
        (torch.bfloat16, 512, False, "_scaled_dot_product_efficient_attention"),
        (torch.float32, 6, False, "bmm"),
        (torch.float64, 16, False, "bmm"),
    ],
)
@pytest.mark.parametrize("shared_heads", [1, 2])
def test_attention_is_the_kernel_of_a_gpu(
    dtype: torch.dtype, width: int, has_mask: bool, kernel: str, shared_heads: int
) -> None:
    @made_of(lambda: {"scale": nn.Parameter(torch.ones(width, dtype=dtype, device="meta"))})
    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
            k = k * self.scale
            return functional.scaled_dot_product_attention(
                q * self.scale, k, k, attn_mask=mask, enable_gqa=shared_heads > 1
            )

    q, k = (
        torch.empty(2, heads, 24, width, dtype=dtype, device="meta")
        for heads in (4, 4 // shared_heads)
    )
    mask = torch.ones(1, 1, 24, 24, dtype=torch.bool, device="meta") if has_mask else None
    step = capture_step(Attention(), {"q": q, "k": k, "mask": mask}, machine=load_machine("h100"))
    names = {
        str(op.node.target).removeprefix("aten.").removesuffix(".default") for op in step.graph.ops
    }
    fused = {name for name in names if "dot_product" in name}
    assert fused == ({kernel, f"{kernel}_backward"} if kernel != "bmm" else set())
    assert kernel in names
    (result,) = (
        node.meta["val"] for node, role in step.graph.outputs if role.kind.value == "output"
    )
    assert (result.shape, result.dtype, result.device.type) == ((2, 4, 24, width), dtype, "cuda")


def test_a_model_that_is_not_there_is_planned_and_not_run() -> None:
    planner = Planner(tiny_llama(), words(), machine="h100")
    points = planner.frontier()
    assert [point.predicted_ms for point in points] == sorted(
        (point.predicted_ms for point in points), reverse=True
    )
    assert points[0].budget_bytes == planner.minimum_peak_bytes < planner.baseline_peak_bytes
    assert planner.plan("1GiB").predicted_ms == planner.baseline_ms
    plan = planner.plan((planner.minimum_peak_bytes + planner.baseline_peak_bytes) // 2)
    verify(plan.graph, plan.schedule)
    assert Plan.from_text(plan.to_text()).schedule == plan.schedule
    layer, x = nn.Linear(3, 3), torch.zeros(2, 3)
    for make in (planner.module, lambda budget: RockmateModule(layer, x, budget, machine="h100")):
        with pytest.raises(PlanMismatchError, match=r"cuda.*nothing to train with.*frontier"):
            make("1GiB")


def test_a_meta_model_without_a_machine_is_refused() -> None:
    with pytest.raises(InvalidSampleError, match=r"meta device.*machine="):
        Planner(nn.Linear(3, 3, device="meta"), torch.zeros(2, 3))
    with pytest.raises(InvalidSampleError, match=r"sample is on .*meta.* model on cpu"):
        Planner(nn.Linear(3, 3), torch.zeros(2, 3, device="meta"))


def test_autocast_for_a_gpu_that_is_not_here_is_refused() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UnsupportedModelError, match="autocast"),
    ):
        Planner(nn.Linear(3, 3), torch.zeros(2, 3), machine="h100")


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    before = {id(parameter) for parameter in model.parameters()}
    with pytest.raises(InvalidSampleError):
        Planner(model, {"pixels": torch.zeros(2, device="meta")}, machine="h100")
    assert {id(parameter) for parameter in model.parameters()} == before


def test_a_model_larger_than_the_machine_takes_no_memory() -> None:
    """Weights of some 60 GB, activations of some 20 GB."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**16, 2**16, bias=False) for _ in range(7))).bfloat16()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.empty(2**14, 2**16, dtype=torch.bfloat16, device="meta")
    planner = Planner(model, x, machine="h100")
    assert planner.baseline_peak_bytes > 12 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**19


def test_the_comparison_with_measured_costs_adds_up() -> None:
    found = plan_quality.priced("mlp", (0.7,), tiny=True)
    (price,) = found["prices"]
    assert min(price[which] for which in ("own", "real", "best")) >= 1.0
    assert 0 <= found["misplaced"] < 1
    text = plan_quality.page([machine_record("bench.plan_quality") | found])
    assert any(line.startswith("| mlp | ") for line in text)
    below = plan_quality.priced("gpt2-deep", (0.25,), tiny=True)
    assert not below["prices"], "in chunks alone, whose graph is another one"


def test_a_recomputation_with_saved_statistics_is_estimated_by_its_own_function() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    machine = load_machine("cpu-avx2")
    step = capture_step(model, torch.randn(4, 3, 32, 32), machine=machine)
    costs = estimate_costs(step.graph, machine)
    (op,) = (op for op in step.graph.ops if op.save_state)
    assert costs.recompute[op.index].time_ms < 0.9 * costs.first[op.index].time_ms
