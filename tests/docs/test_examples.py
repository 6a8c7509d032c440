"""Every example runs as its page says, on a small configuration, and learns."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "__main__" in path.read_text())
# for data_parallel.py
ONE_PROCESS = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer and of PEFT


def run_example(script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a script in this process as its command line would."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLES / script), *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for name, value in {
        "ACCELERATE_USE_CPU": "true",
        **(ONE_PROCESS if script == "data_parallel.py" else {}),
    }.items():
        monkeypatch.setenv(name, value)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def losses_of(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?:loss |'loss': ')([0-9.]+)", printed)]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("causal_lm.py", [], r"saved and loaded: [\d,]+ parameters"),
        ("causal_lm.py", ["--memory-limit", "64GiB", "--steps", "4"], r"recomputed +0 of"),
        ("lora.py", ["--steps", "24"], r"saved: adapters of [\d,]+ bytes"),
        ("accelerate_loop.py", ["--steps", "16"], r"loss "),
        ("lightning_trainer.py", ["--steps", "16"], r"loss "),
        ("sequence_classification.py", [], r"accuracy (0\.[89]\d|1\.00)"),
        ("image_classification.py", [], r"accuracy (0\.[6-9]\d|1\.00)"),
    ],
)
def test_example(
    script: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script == "lightning_trainer.py":
        pytest.importorskip("lightning")
    torch.manual_seed(0)
    run_example(script, arguments, monkeypatch)
    printed = capsys.readouterr().out
    assert re.search(expected, printed), printed
    assert re.search(r"predicted peak +[\d.]+ [KM]iB", printed)
    losses = losses_of(printed)
    assert len(losses) >= 4
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        ("causal_lm.py", ["--budget", "banana"], r"budget 'banana' cannot be read"),
        ("image_classification.py", ["--budget", "banana"], r"budget 'banana' cannot be read"),
        ("data_parallel.py", ["--budget", "1000"], r"the activation budget of 1,000 bytes"),
    ],
)
def test_an_error_is_its_text_alone_and_exit_status_2(
    script: str,
    arguments: list[str],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_example(script, arguments, monkeypatch)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert ended.value.code == 2
    assert re.match(
        rf"{script}: error: {expected}[^\n]*$", capsys.readouterr().err.splitlines()[-1]
    )


@pytest.mark.parametrize("script", ["data_parallel.py", "causal_lm.py"])
def test_by_torchrun(script: str) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / script),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    finished = subprocess.run(
        [*command, "--steps", "4"], capture_output=True, text=True, env=environment, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    losses = losses_of(finished.stdout)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert finished.stdout.count("predicted peak") == 1


def test_every_example_is_on_the_page_and_runs_as_the_others() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert len(SCRIPTS) == 7
    assert all(f"`{name}`" in page for name in SCRIPTS)
    # by which their errors are told
    assert all((EXAMPLES / name).read_text().endswith("    run(main)\n") for name in SCRIPTS)
