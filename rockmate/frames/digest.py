"""A number for the bits of a tensor, to see whether a second run makes the same ones."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from rockmate.frames.storages import PLAIN


def digest_of(tensor: torch.Tensor) -> int | None:
    """Of a tensor on the CPU; None of others, whose kernels may differ in the last bit.

    Bytes are left out: workspaces of kernels consist of them, and not all of a workspace is
    written.
    """
    is_plain = type(tensor) in PLAIN and tensor.layout == torch.strided
    if tensor.device.type != "cpu" or not is_plain or tensor.dtype == torch.uint8:
        return None
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    tensor = tensor.detach()
    if _fills_storage(tensor):
        return _digest(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()), 0)
    found = 0
    for piece in [tensor] if tensor.dim() < 2 else tensor:
        found = _digest(piece.contiguous().flatten(), found)  # a piece: memory is short
    return found


def _digest(flat: torch.Tensor, before: int) -> int:
    bits: Any = flat.view(torch.uint8).numpy()
    return zlib.crc32(bits, before)


def _fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has all of its storage's elements, each once."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and _is_dense(tensor)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements follow each other, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True
