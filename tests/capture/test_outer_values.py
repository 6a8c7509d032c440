"""Which values outside of a forward are looked at."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

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


def network_of(sources: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The network of the first of some modules in a folder."""
    monkeypatch.syspath_prepend(folder)
    for name, source in sources.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (folder / f"{name}.py").write_text(source)
    return importlib.import_module(next(iter(sources))).Net()


@pytest.mark.parametrize(("name", "found"), [("ours", [2.0, 2.0]), ("site-packages", [])])
def test_modules_that_import_one_another(
    name: str, found: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of packages are taken for constant, also of another prefix than the interpreter's."""
    (tmp_path / name).mkdir()
    pairs = (NAMES, NAMES[::-1])
    sources = {each: SOURCE.format(name=each, other=other) for each, other in pairs}
    network = network_of(sources, tmp_path / name, monkeypatch)
    places = values_read_by(network, ())
    assert [place.value() for place in places if place.name == "scale"] == found


def test_globals_are_read_by_code_that_means_no_attribute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    network = network_of({"ours_alone": source}, tmp_path, monkeypatch)
    names = sorted(place.name for place in values_read_by(network, ()))
    assert names == ["act", "scale"]  # a script may put another function there


def test_objects_that_are_called_and_configs_within_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    network = network_of({"ours_called": source}, tmp_path, monkeypatch)
    names = sorted(place.name for place in values_read_by(network, ()))
    assert {"config", "depth", "within", "width"} <= {*names}
