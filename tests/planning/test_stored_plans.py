"""A second start takes the plan of the first: nothing is measured or searched, bits are equal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_steps, train
from made_of import made_of
from torch import Tensor, nn

import rockmate.costs.measure
from rockmate import Plan, RockmateModule
from rockmate.planning import stored_plans


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


def start(budget: Any = 0.7, rows: int = 32, **options: Any) -> RockmateModule:
    """What a script does when it starts."""
    torch.manual_seed(0)
    return RockmateModule(models.Stack(2).train(), torch.randn(rows, 16), budget, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def refuse() -> None:
        def never(*args: Any, **options: Any) -> None:
            raise AssertionError("an op was measured")

        monkeypatch.setattr(rockmate.costs.measure._Call, "measure_time", never)
        monkeypatch.setattr(rockmate.costs.measure._Call, "measure_overhead", never)

    return refuse


# --- found again ----------------------------------------------------------------------------------


def loss_of(module: Any, step: int) -> tuple[Any, Tensor]:
    output = module(torch.randn(32, 16))
    return output, output.square().mean()


@pytest.mark.parametrize("numerics", ["any_order", "bitwise"])
def test_a_second_start_measures_nothing_and_trains_alike(
    numerics: str, nothing_measured: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    first = start(numerics=numerics)
    nothing_measured()
    with caplog.at_level(logging.INFO, "rockmate"):
        second = start(numerics=numerics)
    assert "the plan is that of an earlier start" in caplog.text
    for name in ("predicted_ms", "predicted_peak_bytes", "budget_bytes", "strategy", "options"):
        assert getattr(second.plan, name) == getattr(first.plan, name)
    assert second.plan.schedule == first.plan.schedule
    assert second.plan.lower_bound_ms <= first.plan.lower_bound_ms
    eager = models.Stack(2).train()
    eager.load_state_dict(second.state_dict())
    assert_same_steps(train(second, second, loss_of), train(eager, eager, loss_of))


def test_calls_of_other_sizes_find_their_plan(
    folder: Path, nothing_measured: Callable[[], None]
) -> None:
    def run() -> int:
        module = start("200KiB")
        module(torch.randn(48, 16)).sum().backward()
        return module.plan.predicted_peak_bytes

    peak_bytes = run()
    assert len(files(folder)) == 2
    nothing_measured()
    assert run() == peak_bytes


def test_a_memory_limit_takes_a_plan_that_fits_what_is_left_now(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [400_000]
    limit = "rockmate.memory_limit.MemoryLimit.activation_budget_bytes"
    monkeypatch.setattr(limit, lambda self, model, weights: left[0])
    budgets = []
    for number in (400_000, 420_000, 390_000, 200_000):
        left[0] = number
        module = start(None, memory_limit="1GiB", rows=128)
        assert module.plan.predicted_peak_bytes <= number
        budgets.append(module.plan.budget_bytes)
        assert len(files(folder)) == 1
    assert budgets[:2] == [400_000] * 2
    assert budgets[3] == 200_000


# --- told apart -----------------------------------------------------------------------------------


OTHERS: tuple[dict[str, Any], ...] = (
    {"budget": 0.8}, {"budget": "300KiB"}, {"rows": 33}, {"strategy": "none"},
    {"numerics": "bitwise"}, {"gap_tolerance": 0.5}, {"marks": {"layers.0.1": "recompute"}},
    {"machine": "cpu-avx2"}, {"in_flight": 2},
)  # fmt: skip


def test_what_a_plan_depends_on_tells_plans_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(1.0)
    texts = {each: each.read_text(encoding="utf-8") for each in files(folder)}
    for number, changed in enumerate(OTHERS, start=2):
        start(**{"budget": 1.0, **changed})
        assert len(files(folder)) == number, changed
    surroundings: tuple[tuple[Any, str, Any], ...] = (
        (torch, "get_num_threads", lambda: 3),
        (torch, "__version__", "2.99.0"),
        (torch.backends.mkldnn, "enabled", False),
        (stored_plans, "_code_digest", lambda: "other"),
    )
    for number, changed in enumerate(surroundings, start=2 + len(OTHERS)):
        with monkeypatch.context() as patch:
            patch.setattr(*changed)
            start(1.0)
        assert len(files(folder)) == number, changed
    start(1.0, progress=True)
    assert len(files(folder)) == number
    assert all(each.read_text(encoding="utf-8") == text for each, text in texts.items())


def test_the_precision_of_products_that_a_script_sets_tells_plans_apart(folder: Path) -> None:
    """`torch.get_float32_matmul_precision` cannot be read behind this."""
    products: Any = torch.backends.cuda.matmul
    start(1.0)
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        with pytest.raises(RuntimeError, match="legacy and new APIs"):
            torch.get_float32_matmul_precision()
        start(1.0)
    finally:
        products.fp32_precision = before
    assert len(files(folder)) == 2


# --- not stored -----------------------------------------------------------------------------------


@made_of(lambda: {"body": models.Stack(1), "router": nn.Linear(16, 16)})
class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.body(x))


@torch.library.custom_op("stored_plans_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda context, gradient: 2 * gradient)


@made_of(lambda: {"layer": nn.Linear(16, 16)})
class WithOwnOp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return twice(self.layer(x))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Opaque, {"untraced": ["router"]}),
        (WithOwnOp, {}),
        (models.Stack, {"cache": False}),
        (models.Stack, {"budget": 1024, "on_infeasible": "least"}),
    ],
)
def test_what_is_not_stored(model: Any, options: dict[str, Any], folder: Path) -> None:
    for _ in range(2):
        module = RockmateModule(model().train(), torch.randn(8, 16), **{"budget": 1.0, **options})
        module(torch.randn(8, 16)).sum().backward()
    assert not files(folder)


def test_the_variable_puts_it_off(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKMATE_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    start()
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("ROCKMATE_CACHE")
    start()
    assert len(files(tmp_path / "xdg" / "rockmate" / "plans")) == 1


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", '{"format": "rockmate plan", "version": 99}'])
def test_a_file_that_cannot_be_read_is_replaced_with_a_line(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peak_bytes = start().plan.predicted_peak_bytes
    (file,) = files(folder)
    file.write_text(text)
    start()
    assert "a stored plan cannot be used, and is replaced" in caplog.text
    assert Plan.load(file).predicted_peak_bytes == peak_bytes


def test_a_plan_of_another_step_is_refused_as_any_plan_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start()
    (file,) = files(folder)
    RockmateModule(models.Stack(3).train(), torch.randn(32, 16), 0.7)
    (other,) = {*files(folder)} - {file}
    other.replace(file)
    module = start()
    assert "the plan does not fit this model and sample" in caplog.text
    module(torch.randn(32, 16)).sum().backward()


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROCKMATE_CACHE", str(tmp_path / "file"))
    start()(torch.randn(32, 16)).sum().backward()


@pytest.mark.parametrize("limit", ["_MOST_PLANS", "_MOST_BYTES"])
def test_those_not_read_for_longest_go(
    limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(0.7)
    (first,) = files(folder)
    start(0.8)
    (second,) = {*files(folder)} - {first}
    for age, file in ((10, first), (20, second)):
        os.utime(file, (1e9 - age, 1e9 - age))
    start(0.8)  # read, so the first is now the one that was not read for longest
    size = sum(each.stat().st_size for each in files(folder))
    monkeypatch.setattr(stored_plans, limit, 2 if limit == "_MOST_PLANS" else size)
    start(0.9)
    assert first not in files(folder)
    assert second in files(folder)
    assert len(files(folder)) == 2
