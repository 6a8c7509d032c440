"""The numbers of a tensor in a few bytes: to see whether another run makes the same ones."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from rockmate._torch.subclasses import is_wrapper
from rockmate.state.tensors import PLAIN, parts_of

_NUM_SAMPLES = 4096
_NUM_COLUMNS = 1024
_MOST_CONVERTED = 1 << 20
"""Elements that are converted at a time, for a sum or digest: memory may be short."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether a plain real tensor has all of its storage's elements, each once."""
    return (
        type(tensor) in PLAIN
        and tensor.layout == torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.numel() > 0
        and tensor.nbytes == tensor.untyped_storage().nbytes()
        and _is_dense(tensor)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements follow each other, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True


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
    if fills_storage(tensor):
        tensor = tensor.detach()
        flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        return _crc(flat, 0)
    return bits_of(tensor)


def bits_of(tensor: torch.Tensor) -> int:
    """A number for shape and bits, equal for tensors of equal values in any layout."""
    tensor = tensor.detach()
    if tensor.layout != torch.strided or is_wrapper(tensor):
        return hash(tuple(map(bits_of, _inner(tensor))))
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    on_cpu = tensor.device.type == "cpu"
    found = 0
    for piece in _pieces(tensor):
        found = _crc(piece, found) if on_cpu else hash((found, *_sums(piece)))
    return hash((tuple(tensor.shape), found))


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.strided:
        return [part.detach() for part in parts_of(tensor)]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor.to_dense()]


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The elements in their order, flat, as few as are to be copied at a time."""
    if tensor.is_contiguous() or tensor.numel() <= _MOST_CONVERTED or tensor.dim() < 2:
        return [tensor.contiguous().flatten()]
    return [piece for each in tensor for piece in _pieces(each)]


def _crc(flat: torch.Tensor, before: int) -> int:
    bits: Any = flat.view(torch.uint8).numpy()
    return zlib.crc32(bits, before)


def _sums(flat: torch.Tensor) -> list[int]:
    """Sums of the bits as integers: of all, and by place. They are exact in any order."""
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    numbers = flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
    whole = len(numbers) // _NUM_COLUMNS * _NUM_COLUMNS
    columns = numbers[:whole].view(-1, _NUM_COLUMNS).sum(0, dtype=torch.int64)
    rows = numbers[:whole].view(-1, _NUM_COLUMNS).sum(1, dtype=torch.int64)
    rest = numbers[whole:].to(torch.int64)
    weighted = [
        (each * torch.arange(1, len(each) + 1, device=each.device)).sum()
        for each in (columns, rows, rest)
    ]
    return torch.stack(weighted).tolist()


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The numbers of a tensor in a few bytes.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        bits: see `bits_of`.
        sample: some elements, evenly spaced, of a tensor of floating point numbers.
        total: their sum over all elements.
        size: the sum of their magnitudes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    sample: torch.Tensor | None = None
    total: float = 0.0
    size: float = 0.0

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_exact: bool) -> Fingerprint:
        """That of a tensor; with `is_exact`, small ones alone have a sample."""
        tensor = tensor.detach()
        shape, bits = tuple(tensor.shape), bits_of(tensor)
        has_sample = tensor.is_floating_point() and tensor.layout == torch.strided
        if not has_sample or is_wrapper(tensor) or (is_exact and tensor.numel() > _NUM_SAMPLES):
            return cls(shape, tensor.dtype, bits)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)
        step = max(1, len(flat) // _NUM_SAMPLES)
        sample = flat[::step].to("cpu", torch.float64, copy=True)
        total = float(flat.sum(dtype=torch.float64))
        size = float(torch.linalg.vector_norm(flat, 1, dtype=torch.float64)) if len(flat) else 0.0
        return cls(shape, tensor.dtype, bits, sample, total, size)

    def difference(self, other: Fingerprint, tolerance: float) -> str:
        """In words what differs beyond a tolerance, in units of the size of elements; else empty.

        Args:
            other: what is held against this one.
            tolerance: 0 for none.
        """
        if self.shape != other.shape or self.dtype != other.dtype:
            mine, theirs = (
                f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}"
                for each in (self, other)
            )
            return f"is {theirs} and not {mine}"
        if self.bits == other.bits:
            return ""
        if self.sample is None or other.sample is None:
            return "differs"
        gaps = (self.sample - other.sample).abs()
        gaps = torch.where(self.sample == other.sample, 0.0, gaps)  # infinite ones
        both_nan = self.sample.isnan() & other.sample.isnan()
        gaps = torch.where(both_nan, 0.0, gaps).nan_to_num(torch.inf)
        gap = float(gaps.max()) if len(gaps) else 0.0
        scale = max(1, len(self.sample)) ** -1 * float(self.sample.nan_to_num(0.0).abs().sum())
        of_total = abs(self.total - other.total)
        if tolerance and gap <= tolerance * _largest(self) and of_total <= tolerance * self.size:
            return ""
        if len(self.sample) == 1:
            return f"is {other.sample.item():.9g} and not {self.sample.item():.9g}"
        return f"differs by up to {gap:.3g}, where elements are {scale:.3g} in size"


def _largest(found: Fingerprint) -> float:
    assert found.sample is not None
    finite = found.sample[found.sample.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0
