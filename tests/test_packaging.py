"""What importing each package brings in, and what the distribution declares."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules_after(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after the statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    finished = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return set(finished.stdout.split())


@pytest.mark.parametrize(("package", "other"), [("rotor", "checkmate"), ("checkmate", "rotor")])
def test_algorithm_packages_know_no_tensors(package: str, other: str) -> None:
    modules = [path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__"]
    loaded = modules_after(
        "\n".join([f"import {package}", *(f"import {package}.{name}" for name in modules)])
    )
    assert package in loaded
    assert not loaded & {"torch", "transformers", "rockmate", other}


def test_rockmate_needs_no_extra_and_no_solver() -> None:
    none_of = "assert not {'highspy', 'rotor', 'checkmate'} & {*sys.modules}"
    loaded = modules_after(
        f"import sys, rockmate\n{none_of}\nimport rockmate.cli.demo, rockmate.cli.demo_report"
    )
    assert "torch" in loaded
    assert not loaded & {"transformers", "matplotlib"}


def test_command_line_starts_without_the_packages_of_the_extras() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "rockmate.cli.main", "demo", "--help"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    assert "--budget" in finished.stdout
    assert finished.stderr == ""


def test_distribution_holds_the_three_packages() -> None:
    """Every folder of theirs with Python files, and nothing else."""
    include = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in ("rockmate", "rotor", "checkmate")
        for path in (ROOT / name).rglob("*.py")
    }
    assert set(find_packages(str(ROOT), include=include)) == folders


def test_every_declared_requirement_is_pinned() -> None:
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    declared = [*PROJECT["project"]["dependencies"]]
    for requirements in PROJECT["project"]["optional-dependencies"].values():
        declared += requirements
    names = {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in declared} - {
        PROJECT["project"]["name"]
    }
    assert names <= pins.keys()


def test_the_backend_is_found_without_an_import(tmp_path: Path) -> None:
    """`torch.compile` reads the entry points of what is installed; here the metadata alone is."""
    points = PROJECT["project"]["entry-points"]["torch_dynamo_backends"]
    metadata = tmp_path / "rockmate_entry-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rockmate-entry\nVersion: 0\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]))
    program = (
        "import sys, torch; from torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))\n"
        "assert 'rockmate' in torch.compiler.list_backends()\n"
        "assert 'rockmate' not in sys.modules\n"
        "compiled = torch.compile(model, backend='rockmate', options={'budget': 1.0})\n"
        "compiled(torch.ones(4, 8)).sum().backward()\n"
        "import rockmate\n"
        "print(len(rockmate.planned_graphs()), model[0].weight.grad is not None)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        check=False,
        text=True,
    )
    assert finished.stdout.split() == ["1", "True"], finished.stderr


def test_the_solver_is_free_for_any_use() -> None:
    from importlib.metadata import metadata

    assert metadata("highspy").get("License-Expression") == "MIT"


def test_importing_the_module_class_loads_neither_capture_nor_search() -> None:
    """PyTorch itself apart, `from rockmate import RockmateModule` takes a few hundredths."""
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        "from rockmate import RockmateModule, RockmateError\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    found = loaded.stdout.split()
    assert "rockmate.entry.module" in found
    assert len(found) < 60, found
    slow = {"sympy", "highspy", "torch._dynamo", "torch.distributed.tensor"}
    assert not (slow | {"rockmate.entry.plan_cache"}) & {*found}


def test_the_version_stands_in_one_place() -> None:
    import rockmate

    attribute = {"attr": "rockmate._torch.version.PACKAGE_VERSION"}
    assert PROJECT["tool"]["setuptools"]["dynamic"] == {"version": attribute}
    assert f"version: {rockmate.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (ROOT / "rockmate" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["rockmate"]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in an interpreter where PyTorch cannot be imported."""
    program = (
        "import sys; sys.modules['torch'] = None; from rockmate.cli.main import main; "
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--help"], 0, "check"),
        (["--version"], 0, "torch 2."),
        (["fit", "--help"], 0, "--batch-axis"),
        (["fit"], 2, "required: MODEL, --memory"),
        (["demo", "--budget", "2.0"], 2, "2.0 is not in (0, 1]"),
        (["plan", "package:model", "--budget", "2.0"], 2, "budget 2.0 as a float is a fraction"),
        (["sweep", "package:model", "--budgets", "0.5,50.0"], 2, "budget 50.0 as a float"),
    ],
)
def test_help_and_errors_of_arguments_need_no_torch(
    arguments: list[str], code: int, expected: str
) -> None:
    finished = run_command(*arguments)
    assert finished.returncode == code
    assert expected in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr


def test_help_says_a_default_once() -> None:
    for command in ("demo", "sweep", "plan", "fit", "check"):
        text = " ".join(run_command(command, "--help").stdout.split())
        assert "usage:" in text
        assert not re.search(r"default: [^)]*\) \(default|\(default: None\)|batchs", text)


def test_ctrl_c_ends_a_command_quietly() -> None:
    """While the command loads, and while it runs."""
    for seconds in (0.5, 4):
        command = [sys.executable, "-m", "rockmate", "check", "--quiet"]
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells may ignore it
        )  # fmt: skip
        time.sleep(seconds)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
        assert running.returncode in (130, -signal.SIGINT)
        assert "Traceback" not in said
