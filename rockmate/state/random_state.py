"""Random state of PyTorch on the CPU and on GPUs, of Python and of NumPy, at one time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class RandomState:
    """The states of the generators that programs share."""

    def __init__(
        self, devices: Iterable[torch.device] = (), *, of_pytorch_alone: bool = False
    ) -> None:
        """Takes the present states.

        Args:
            devices: those of tensors at hand; generators of GPUs among them count.
            of_pytorch_alone: without Python's and NumPy's, which take a tenth of a millisecond.
        """
        has_gpu = torch.cuda.is_available()  # fake tensors may be on one that is not there
        on_gpu = {each for each in devices if each.type == "cuda"} if has_gpu else set()
        self._devices = sorted(on_gpu, key=str)
        # No tensors: a budget may be short of their memory.
        self._torch = torch.get_rng_state().numpy().tobytes()
        self._cuda = [torch.cuda.get_rng_state(each).numpy().tobytes() for each in self._devices]
        self._foreign = None if of_pytorch_alone else ForeignState.now()

    @property
    def has_foreign(self) -> bool:
        """Whether Python's and NumPy's are among them."""
        return self._foreign is not None

    def restore(self) -> None:
        """Sets the states."""
        torch.set_rng_state(as_tensor(self._torch))
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(as_tensor(state), device)
        if self._foreign is not None:
            self._foreign.restore()

    def differences(self, other: RandomState) -> list[str]:
        """Whose states are other ones."""
        pairs: list[Any] = [("PyTorch on the CPU", self._torch, other._torch)]
        for device, one, two in zip(self._devices, self._cuda, other._cuda, strict=True):
            pairs.append((f"PyTorch on {device}", one, two))
        mine, theirs = self._foreign, other._foreign
        if mine is not None and theirs is not None:
            pairs.append(("Python", mine.python, theirs.python))
            pairs.append(("NumPy", mine.numpy, theirs.numpy))
        return [name for name, one, two in pairs if one != two]


class ForeignState(NamedTuple):
    """States of generators of Python and NumPy.

    Attributes:
        python: of the former.
        numpy: of the latter, its keys as bytes.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls) -> ForeignState:
        """The present states."""
        name, keys, *others = np.random.get_state(legacy=True)
        return cls(random.getstate(), (name, np.asarray(keys).tobytes(), *others))

    def restore(self) -> None:
        """Sets the states."""
        random.setstate(self.python)
        name, keys, *others = self.numpy
        state: Any = (name, np.frombuffer(keys, np.uint32), *others)
        np.random.set_state(state)


def as_tensor(state: bytes) -> torch.Tensor:
    """The state of a generator of PyTorch's as it takes it."""
    return torch.from_numpy(np.frombuffer(state, np.uint8).copy())


def all_gpus() -> list[torch.device]:
    """Those whose generators a collator, say, may draw from."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


@contextmanager
def random_state_kept(
    devices: Iterable[torch.device] = (), *, of_pytorch_alone: bool = False
) -> Iterator[RandomState]:
    """Puts the states back behind what runs within; yields how they were. See `RandomState`."""
    before = RandomState(devices, of_pytorch_alone=of_pytorch_alone)
    try:
        yield before
    finally:
        before.restore()
