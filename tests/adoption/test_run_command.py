"""`rockmate run`: a script behaves as without, and its models train inside a budget."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import FORKED

from rockmate.cli.main import main

NET = """
import importlib.util
import sys
assert importlib.util.find_spec("torch") is not None
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(4)
        )
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

torch.manual_seed(0)
net = Net()
"""
LOOP = """
for _ in range(4):
    batch = torch.randn(64, 32)
    loss = (net(batch) - batch).square().mean()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""
BEGIN = """
optimizer, backward = torch.optim.AdamW(net.parameters()), torch.Tensor.backward
"""
END = """
print(sys.argv[1:], __name__, __file__, type(net), net.state_dict()["blocks.3.3.bias"].sum().item())
if len(sys.argv) > 1:
    raise ValueError(sys.argv[1])
"""
PLAIN = NET + BEGIN + LOOP + END
GAN = """
other = Net()
first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other))
for _ in range(3):
    made = net(torch.randn(64, 32))
    for optimizer, batch in ((second, made.detach()), (first, made)):
        optimizer.zero_grad()
        loss = other(batch).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""
PENALTY = """
other = Net()
first, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, other))
for _ in range(3):
    (-other(net(torch.randn(64, 32))).mean()).backward()
    first.step()
    second.zero_grad()
    between = net(torch.randn(64, 32)).detach().requires_grad_()
    (slope,) = torch.autograd.grad(other(between).sum(), between, create_graph=True)
    loss = other(torch.randn(64, 32)).mean() + slope.square().mean()
    loss.backward()
    second.step()
    print(loss.item())
"""
RETURNED = (
    BEGIN
    + """
def backward(loss):
    parameters = list(net.parameters())
    for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        each.grad = gradient
"""
)
COMPILED = "net.compile(backend='aot_eager')" + BEGIN
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
backward = accelerator.backward
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, index):
        loss = (self(batch) - batch).square().mean()
        print(loss.item())
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, barebones=True)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(96, 32), batch_size=32))
"""
TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_layer=2, n_embd=32, n_head=2))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (8, 16))]
arguments = TrainingArguments("out", max_steps=3, save_strategy="no", logging_steps=1, use_cpu=True)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
print([each["loss"] for each in trainer.state.log_history if "loss" in each])
print(trainer.model is model, type(trainer.model), sum(p.sum().item() for p in model.parameters()))
"""
PLANNED = """
import gc, rockmate
for each in gc.get_objects():
    if isinstance(each, rockmate.RockmateModule):
        print("planned", each._plans.request.options.numerics)
"""
RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
sys.stdout = open("/dev/null", "w") if dist.get_rank() else sys.stdout
net = nn.parallel.DistributedDataParallel(net)
"""
# As pip writes it into a folder of commands.
COMMAND = """import sys
from rockmate.__main__ import run
sys.exit(run())
"""
SCRIPTS = [NET + GAN, NET + COMPILED + LOOP, NET + ACCELERATE + LOOP, NET + LIGHTNING, TRAINER]


def run(folder: Path, text: str, *options: str) -> list[str]:
    """Standard output, standard error and exit code; in eager without options.

    The process begins with PyTorch imported; `started` has one that does not.
    """
    (folder / "train.py").write_text(text)
    process = FORKED.Process(target=_enter, args=(folder, options))
    process.start()
    process.join()
    out, error = ((folder / name).read_text() for name in ("said", "error"))
    return [_without_times(out), error, str(process.exitcode)]


def _enter(folder: Path, options: tuple[str, ...]) -> None:
    os.chdir(folder)
    for number, name in enumerate(("said", "error"), 1):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.argv = ["train.py"]
    if options:
        sys.exit(main(["run", *options, "train.py"]))
    runpy.run_path(str(folder / "train.py"), run_name="__main__")


def _without_times(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if "train_runtime" not in line)


def started(folder: Path, text: str, *options: str, target: str = "train.py") -> list[str]:
    """As `run`, by a command line."""
    (folder / "train.py").write_text(text)
    (folder / "rockmate").write_text(COMMAND)
    command = ["-m", "rockmate", "run", *options] if options else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ROCKMATE_CACHE": "off"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *command, *target.split()],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [_without_times(done.stdout), done.stderr, str(done.returncode)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_trains_as_without_and_is_planned(tmp_path: Path, script: str) -> None:
    eager, ours = run(tmp_path, script), run(tmp_path, script, "--budget", "0.6")
    assert ours[0] == eager[0]
    assert ours[2] == eager[2] == "0", ours[1]
    assert "planned for this call, since" in ours[1]
    assert "train.py:" in ours[1]
    assert "as in eager" not in ours[1]
    assert "frames" not in ours[1]


def test_a_plan_of_a_script_has_the_options_of_the_command(tmp_path: Path) -> None:
    options = ["--budget", "400kB", "--weights", "all"]
    eager, refused = run(tmp_path, PLAIN), run(tmp_path, PLAIN, *options)
    assert "needs a home for them: --offload host or disk:FOLDER" in refused[1]
    options += ["--offload", f"disk:{tmp_path}", "--numerics", "bitwise"]
    ours = run(tmp_path, PLAIN + PLANNED, *options)
    assert ours[0] == f"{eager[0]}\nplanned bitwise"
    assert "as in eager" not in ours[1]


@pytest.mark.parametrize("script", [NET + PENALTY, NET + RETURNED + LOOP])
def test_gradients_that_no_plan_gives_have_frames(tmp_path: Path, script: str) -> None:
    eager, ours = run(tmp_path, script), run(tmp_path, script, "--budget", "0.6")
    assert ours[0] == eager[0]
    assert ours[2] == eager[2] == "0", ours[1]
    assert "the budget is kept by frames: a plan" in ours[1]


@pytest.mark.parametrize("command", ["-m rockmate", "./rockmate"])
def test_a_failing_script_fails_as_without(tmp_path: Path, command: str) -> None:
    eager = started(tmp_path, PLAIN, target="train.py boom")
    ours = started(tmp_path, PLAIN, target=f"{command} run --budget 0.6 train.py boom")
    assert ours[0] == eager[0]
    assert ours[2] == eager[2] == "1"
    assert eager[1].startswith("Traceback")
    assert ours[1].endswith(eager[1])
    assert "4 training calls, planned, shapes: 1" in ours[1]
    assert "rockmate/" not in ours[1]


def test_ranks_train_as_by_torchrun(tmp_path: Path) -> None:
    start = "-m torch.distributed.run --standalone --nproc-per-node 2"
    script, under = NET + RANKS + BEGIN + LOOP + "dist.destroy_process_group()", "--budget 0.6"
    eager = started(tmp_path, script, target=f"{start} train.py")
    assert (len(eager[0].split()), eager[2]) == (4, "0"), eager[1]
    for ours in (
        started(tmp_path, script, *under.split(), "--nproc-per-node", "2"),
        started(tmp_path, script, target=f"{start} ./rockmate run {under} train.py"),
    ):
        assert (ours[0], ours[2]) == (eager[0], "0"), ours[1]
        assert "Net, called at train.py:" in ours[1]
        assert "4 training calls, planned, shapes: 1" in ours[1]


def test_a_module_is_run_as_by_python(tmp_path: Path) -> None:
    eager = started(tmp_path, PLAIN, target="-m train")
    ours = started(tmp_path, PLAIN, "--budget", "0.6", target="-m train")
    assert ours[0] == eager[0]
    assert ours[2] == eager[2] == "0"


def test_models_share_bytes_by_what_they_take(tmp_path: Path) -> None:
    out, error, code = run(tmp_path, NET + GAN, "--budget", "300kB")
    assert (out, code) == (run(tmp_path, NET + GAN)[0], "0"), error
    assert "2 models share the budget" in error


FOLDS = """
for count in (1, 1, 3):
    nets = [Net() for _ in range(count)]
    for each in nets:
        each.itself = [each]
    optimizer = torch.optim.SGD([each for one in nets for each in one.parameters()], lr=0.1)
    for _ in range(5):
        batch = torch.randn(64, 32)
        loss = sum(each(batch).square().mean() for each in nets)
        loss.backward()
        optimizer.step()
        print(loss.item())
    del loss
"""


def test_models_that_have_ended_leave_their_share(tmp_path: Path) -> None:
    out, error, code = run(tmp_path, NET + FOLDS, "--budget", "600kB")
    assert (out, code) == (run(tmp_path, NET + FOLDS)[0], "0"), error
    assert [error.count(f"{number} models share") for number in (2, 3, 4)] == [1, 1, 0]
    assert error.count("5 training calls; it has ended") == 2
    assert error.count("5 training calls, planned, shapes: 1; budget 195.3 KiB") == 3


SKIPPING = """
def refuse(module, args, made):
    if len(made) == 7:
        raise ValueError("a batch of seven")
net.blocks[0].register_forward_hook(refuse)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for size in (64, 64, 7, 64, 64, 64):
    if size == 7:
        net.blocks[3] = nn.Linear(32, 32)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        loss = net(torch.randn(size, 32)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item())
    except ValueError as error:
        print(error)
"""


def test_a_script_that_catches_an_error_and_replaces_a_layer(tmp_path: Path) -> None:
    out, error, code = run(tmp_path, NET + SKIPPING, "--budget", "600kB")
    assert (out, code) == (run(tmp_path, NET + SKIPPING)[0], "0"), error
    assert "5 training calls, planned, shapes: 2" in error
    assert error.count("called at") == 2


def test_a_dry_run_ends_after_a_step_with_what_budgets_cost(tmp_path: Path) -> None:
    out, error, code = run(tmp_path, PLAIN, "--budget", "0.6", "--dry-run")
    assert (out, code) == ("", "0")
    assert "Recommended: " in error


def test_what_cannot_be_planned_runs_as_without(tmp_path: Path) -> None:
    out, error, code = run(tmp_path, PLAIN, "--memory", "auto")
    assert (out, code) == (run(tmp_path, PLAIN)[0], "0")
    assert "it runs as in eager, within no budget, since --memory auto is what a GPU has" in error
    out, error, code = run(tmp_path, PLAIN, "--memory", "auto", "--strict")
    assert code == "1"
    assert "RockmateError: --memory auto is what a GPU has" in error
