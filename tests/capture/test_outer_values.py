"""Which values outside of a forward are looked at."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from rockmate.capture.outer_values import values_read_by

SOURCE = """
from torch import nn

import {other}

scale = 2.0


class Net(nn.Module):
    def forward(self, x):
        return x * {other}.{name}.scale
"""
NAMES = "ours_first", "ours_second"


def scales_read_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those found for a network of two modules in a folder that import one another."""
    monkeypatch.syspath_prepend(folder)
    for name, other in (NAMES, NAMES[::-1]):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (folder / f"{name}.py").write_text(SOURCE.format(name=name, other=other))
    network = importlib.import_module(NAMES[0]).Net()
    return [place.value() for place in values_read_by(network, ()) if place.name == "scale"]


@pytest.mark.parametrize(("name", "found"), [("ours", [2.0, 2.0]), ("site-packages", [])])
def test_modules_that_import_one_another(
    name: str, found: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of packages are taken for constant, also of another prefix than the interpreter's."""
    (tmp_path / name).mkdir()
    assert scales_read_in(tmp_path / name, monkeypatch) == found


def test_globals_are_read_by_code_that_means_no_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours_alone", raising=False)
    source = """
from torch import nn

scale, layer = 2.0, 3.0


def act(x):
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x):
        return act(self.layer(x)) * scale
"""
    (tmp_path / "ours_alone.py").write_text(source)
    network = importlib.import_module("ours_alone").Net()
    found = sorted(place.name for place in values_read_by(network, ()))
    assert found == ["act", "scale"]  # a script may put another function there


def test_objects_that_are_called_and_configs_within_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours_called", raising=False)
    source = """
from functools import partial
from types import SimpleNamespace

from torch import nn


class Config:
    def __init__(self):
        self.depth, self.within = 2.0, SimpleNamespace(width=3.0)


config = Config()


class Loss:
    def __call__(self, x):
        return x * config.within.width


def loss(rate, x):
    return x * config.depth * rate


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Loss(), partial(loss, 2.0)

    def forward(self, x):
        return self.first(x) + self.second(x)
"""
    (tmp_path / "ours_called.py").write_text(source)
    network = importlib.import_module("ours_called").Net()
    found = {place.name for place in values_read_by(network, ())}
    assert {"config", "depth", "within", "width"} <= found
