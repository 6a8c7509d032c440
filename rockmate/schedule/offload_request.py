"""What a user asks for with `offload` and `host_budget`, as values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from rockmate.budget import is_share, parse_budget
from rockmate.errors import InvalidArgumentError, OffloadError

_FORMS = 'choose None, "host" or "disk:FOLDER"'


@dataclass(frozen=True, slots=True)
class OffloadRequest:
    """Where values may move, and how many bytes of it they may take.

    Attributes:
        kind: "host" for pinned host memory, "disk" for a file.
        folder: of the file; empty for host memory.
        host_bytes: most bytes that the moved values of all pending steps take there; None for no
            limit.
        with_trained: whether trained weights may be at home there, and gradients and optimizer's
            states of them are.
    """

    kind: Literal["host", "disk"]
    folder: str = ""
    host_bytes: int | None = None
    with_trained: bool = False

    @staticmethod
    def parse(offload: str | None, host_budget: int | str | None = None) -> OffloadRequest | None:
        """The request that two arguments of `Planner` stand for; None if nothing may move.

        Raises:
            InvalidArgumentError: `offload` is none of its values, or `host_budget` is given without
                it.
            InvalidBudgetError: `host_budget` cannot be read as a number of bytes.
            OffloadError: the folder does not exist, or this system has no such tier.
        """
        if offload is None:
            if host_budget is not None:
                msg = f"host_budget={host_budget!r} bounds what moves, and nothing does: {_FORMS}"
                raise InvalidArgumentError(f"{msg} for offload.")
            return None
        if is_share(host_budget):
            msg = f'host_budget is {host_budget!r}; write bytes as an int, or a size as "32GiB"'
            raise InvalidArgumentError(msg)
        limit = None if host_budget is None else parse_budget(host_budget, 1)
        kind, _, folder = str(offload).partition(":")
        if kind == "host" and not folder:
            return OffloadRequest("host", host_bytes=limit)
        if kind != "disk" or not folder:
            msg = f"offload is {offload!r}; {_FORMS}"
            raise InvalidArgumentError(msg)
        if not sys.platform.startswith("linux"):
            msg = f"offload={offload!r} needs Linux; leave offload out on {sys.platform}"
            raise OffloadError(msg)
        return OffloadRequest("disk", str(Path(folder).expanduser()), limit)

    @property
    def device_type(self) -> str:
        """The type of the devices whose values move there."""
        return "cuda" if self.kind == "host" else "cpu"

    def check_device(self, device: torch.device) -> None:
        """Raises `OffloadError` for a step on a device whose values cannot move there."""
        if device.type == self.device_type:
            return
        if self.kind == "host":
            msg = (
                f"offload='host' moves values from a GPU to the host's memory, and this model is "
                f"on {device.type}, which is there already. Use offload='disk:FOLDER'."
            )
        else:
            msg = (
                f"offload={self.text!r} moves values from the machine's memory to a disk, and this "
                f"model is on {device.type}. Use offload='host'."
            )
        raise OffloadError(msg)

    @property
    def text(self) -> str:
        """The `offload` argument that it stands for."""
        return f"disk:{self.folder}" if self.kind == "disk" else self.kind
