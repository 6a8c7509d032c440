"""Differences of any kind, planted in capture, frames and runtime, are found within four steps.

No guard knows of any of them: what watches the model is switched off where it would see one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from made_of import made_of
from torch import Tensor, nn
from trial_net import BATCHES, Counting, Net

from rockmate import RockmateModule, TrialError, UnsupportedModelError
from rockmate.capture.forward_attributes import ForwardAttributes
from rockmate.capture.model_signature import ModelWatch
from rockmate.frames.call import Call
from rockmate.runtime.autograd import Runner
from rockmate.runtime.results import Results

Patch = pytest.MonkeyPatch


def around_forward(patch: Patch, change: Callable[..., Any]) -> None:
    """Has the planned forward be `change(forward, inputs)`."""
    run = Runner.run

    def changed(self: Runner, inputs: Any, **options: Any) -> Any:
        return change(lambda values=inputs: run(self, values, **options), inputs)

    patch.setattr(Runner, "run", changed)


# --- planted before the module is made, or before a step ------------------------------------------


def frozen_attribute(patch: Patch, model: Any) -> Any:
    patch.setattr(ModelWatch, "has_changed", lambda _: False)
    return lambda step: setattr(model, "scale", 1.0 + step)


def attribute_of_parameter(_: Patch, model: Any) -> None:
    class Marked(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            weight: Any = self.norm.weight
            weight.uses = getattr(weight, "uses", 0) + 1
            return super().forward(x)

    model.__class__ = Marked


def parameter_replaced(_: Patch, model: Any) -> None:
    class Replaced(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.norm.weight = nn.Parameter(self.norm.weight.detach().clone())
            return super().forward(x)

    model.__class__ = Replaced


def hook_not_called(_: Patch, model: Any) -> None:
    model.norm.register_forward_hook(lambda _, x, y, calls=[]: calls.append(1))


def buffers_not_updated(patch: Patch, _: Any) -> None:
    patch.setattr(Results, "write_updates", lambda *_: None)


def buffers_updated_twice(patch: Patch, _: Any) -> None:
    write = Results.write_updates

    def twice(self: Results, values: Any, inputs: Any, binding: Any) -> None:
        write(self, values, inputs, binding)
        for place in self._updates:
            binding[self.roles[place].name].data.add_(1)

    patch.setattr(Results, "write_updates", twice)


def attributes_not_delivered(patch: Patch, _: Any) -> None:
    patch.setattr(ForwardAttributes, "deliver", lambda *_: None)


def old_attribute_delivered(patch: Patch, _: Any) -> None:
    deliver, known = ForwardAttributes.deliver, []

    def old(self: Any, outputs: list[Tensor]) -> None:
        known.append([each.detach().clone() for each in outputs])
        deliver(self, known[0])

    patch.setattr(ForwardAttributes, "deliver", old)


def dropout_draws_others(patch: Patch, _: Any) -> None:
    around_forward(patch, lambda run, _: (torch.rand(1), run())[1])


def dropout_draws_more(patch: Patch, _: Any) -> None:
    around_forward(patch, lambda run, _: (run(), torch.rand(1))[0])


def random_numbers_of_python(patch: Patch, _: Any) -> None:
    around_forward(patch, lambda run, _: (run(), random.random())[0])


def output_is_an_alias(patch: Patch, model: Any) -> None:
    def shared(run: Any, inputs: Any) -> Any:
        outputs = list(run())
        inputs[0].detach().copy_(outputs[1])
        outputs[1] = inputs[0]
        return outputs

    around_forward(patch, shared)


def input_changed(patch: Patch, _: Any) -> None:
    def change(run: Any, inputs: Any) -> Any:
        outputs = run()
        inputs[0].add_(1.0)
        return outputs

    around_forward(patch, change)


def one_element_differs(patch: Patch, _: Any) -> None:
    def change(run: Any, inputs: Any) -> Any:
        outputs = list(run())
        features = outputs[1].detach().clone()
        features.view(-1)[77] += 1e-6 + features.view(-1)[77].abs() * 1e-6
        return [outputs[0], features, *outputs[2:]]

    around_forward(patch, change)


PLANTED = (
    frozen_attribute, attribute_of_parameter, parameter_replaced, hook_not_called,
    buffers_not_updated, buffers_updated_twice, attributes_not_delivered, old_attribute_delivered,
    dropout_draws_others, dropout_draws_more, random_numbers_of_python, output_is_an_alias,
    input_changed, one_element_differs,
)  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda each: each.__name__)
def test_planted_difference_is_found_within_four_steps(
    plant: Callable[..., Any], monkeypatch: Patch
) -> None:
    model = Net()
    before_step = plant(monkeypatch, model) or (lambda _: None)
    module = RockmateModule(model, BATCHES[0], 0.9, numerics="bitwise", trial="log")
    torch.manual_seed(1)
    with pytest.raises(TrialError, match="not what the plain model does"):
        _train(module, before_step)


def _train(module: Any, before_step: Callable[[int], None]) -> None:
    for step, batch in enumerate(BATCHES):
        before_step(step)
        module(batch.clone() if not vars(batch) else batch)["loss"].backward()


def test_what_no_trace_sees_is_refused() -> None:
    class Assigned(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.norm.weight.data = self.norm.weight.data * 0.9
            return super().forward(x)

    with pytest.raises(UnsupportedModelError, match="assigns to"):
        RockmateModule(Assigned(), BATCHES[0], 0.9, trial="never")


def test_nothing_is_found_where_nothing_is_planted() -> None:
    module = RockmateModule(Net(), BATCHES[0], 0.9, numerics="bitwise", trial="always")
    _train(module, lambda _: None)


# --- frames ---------------------------------------------------------------------------------------


def around_frames(patch: Patch, change: Callable[[Callable[[], Any], Any], Any]) -> None:
    """Has the first run of each frame be `change(run, module)`."""
    run = Call.run

    def changed(self: Call) -> Any:
        return change(lambda: run(self), self._submodules[0])

    patch.setattr(Call, "run", changed)


def frame_runs_twice(patch: Patch) -> None:
    def twice(run: Any, module: Any) -> Any:
        output = run()
        type(module).forward(module, output.detach())
        return output

    around_frames(patch, twice)


def random_state_put_back(patch: Patch) -> None:
    def put_back(run: Any, _: Any) -> Any:
        state = torch.get_rng_state()
        output = run()
        torch.set_rng_state(state)
        return output

    around_frames(patch, put_back)


def counter_put_back(patch: Patch) -> None:
    def put_back(run: Any, module: Any) -> Any:
        calls, output = module.calls, run()
        module.calls = calls
        return output

    around_frames(patch, put_back)


def statistics_put_back(patch: Patch) -> None:
    def put_back(run: Any, module: Any) -> Any:
        mean = module.norm.running_mean.clone()
        output = run()
        module.norm.running_mean.data.copy_(mean)
        return output

    around_frames(patch, put_back)


def output_rounded(patch: Patch) -> None:
    around_frames(patch, lambda run, _: run().bfloat16().float())


def count_of_runs(patch: Patch) -> None:
    forward = Counting.forward
    patch.setenv("RUNS", "0")  # which a trial does not put back

    def counted(self: Counting, x: Tensor) -> Tensor:
        os.environ["RUNS"] = str(int(os.environ["RUNS"]) + 1)
        vars(self)["run"] = int(os.environ["RUNS"])
        return forward(self, x)

    patch.setattr(Counting, "forward", counted)


FRAMES = (
    frame_runs_twice, random_state_put_back, counter_put_back, statistics_put_back, output_rounded,
    count_of_runs,
)  # fmt: skip


def _framed(plant: Callable[..., Any], patch: Patch) -> RockmateModule:
    model = nn.Sequential(*(Counting() for _ in range(6)))
    plant(patch)
    torch.manual_seed(1)
    return RockmateModule(model, None, 0.7, mode="frames", plan_frames=False, trial="log")


@pytest.mark.parametrize("plant", FRAMES, ids=lambda each: each.__name__)
def test_difference_planted_in_frames(plant: Callable[..., Any], monkeypatch: Patch) -> None:
    module = _framed(plant, monkeypatch)
    with pytest.raises(TrialError, match="the step in frames is not what the plain model does"):
        _train_blocks(module)


def test_in_auto_eager_goes_on(monkeypatch: Patch, caplog: pytest.LogCaptureFixture) -> None:
    module = _framed(count_of_runs, monkeypatch)
    module._ends_in_eager = True
    _train_blocks(module)
    assert "eager runs" in caplog.text


@made_of(lambda: {"stats": {"ms": []}, "by_id": {}})
class Timed(Counting):
    """What it reads of a clock, and of memory, is other in each run of eager, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.began, self.by_id = time.perf_counter(), {id(x): len(x)}
        x = super().forward(x)
        self.stats["ms"].append(time.perf_counter() - self.began)
        self.last = torch.tensor(time.perf_counter())
        return x


def test_nothing_is_found_in_frames_where_nothing_is_planted() -> None:
    model = nn.Sequential(*(Timed() for _ in range(6)))
    _train_blocks(RockmateModule(model, None, 0.7, mode="frames", trial="always"))


def _train_blocks(module: nn.Module) -> None:
    for batch in BATCHES:
        module(batch.clone()).square().mean().backward()
