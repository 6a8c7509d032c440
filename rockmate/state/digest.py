"""The numbers of a tensor in a few bytes: to see whether another run makes the same ones."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from rockmate._torch.subclasses import is_wrapper
from rockmate.state.tensors import parts_of

_NUM_SAMPLES = 4096
_NUM_COLUMNS = 1024
_MOST_CONVERTED = 1 << 20
"""Elements that are converted at a time, for a sum or digest: memory may be short."""
_OF_NUMPY = frozenset((
    torch.float16, torch.float32, torch.float64, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64,
))  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> int:
    """A number for shape and bits, equal for tensors of equal values in any layout.

    On the CPU it takes no memory of PyTorch's, which a budget may be short of.
    """
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_nested or is_wrapper(tensor):
        return hash(tuple(map(bits_of, _inner(tensor))))
    tensor = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    if tensor.device.type == "cpu":
        is_known = tensor.is_complex() or tensor.dtype in _OF_NUMPY  # else as integers
        known = tensor if is_known else tensor.view(_INTEGERS[tensor.element_size()])
        found = _crc(_array(known))
    else:
        found = hash(tuple(number for piece in _pieces(tensor) for number in _sums(piece)))
    return hash((tuple(tensor.shape), found))


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same memory as NumPy's. After `numpy()` nobody could resize it any more."""
    has_memory = tensor.data_ptr() != 0  # one of zeros alone, or of none, has none
    return np.from_dlpack(tensor) if has_memory else tensor.clone().numpy(force=True)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.layout == torch.strided:
        return [part.detach() for part in parts_of(tensor)]
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    return [tensor.to_dense()]


def _crc(array: np.ndarray[Any, Any], before: int = 0) -> int:
    if array.flags.c_contiguous:
        return zlib.crc32(array.reshape(-1).view(np.uint8).data, before)
    if array.size <= _MOST_CONVERTED:
        return zlib.crc32(array.tobytes(), before)
    for each in array:
        before = _crc(each, before)
    return before


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The elements in their order, flat, as few as are to be copied at a time."""
    if tensor.is_contiguous() or tensor.numel() <= _MOST_CONVERTED or tensor.dim() < 2:
        return [tensor.contiguous().flatten()]
    return [piece for each in tensor for piece in _pieces(each)]


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


class Fingerprint(NamedTuple):
    """The numbers of a tensor in a few bytes.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        bits: see `bits_of`.
        sample: some elements, evenly spaced, of a tensor of floating point numbers.
        total: their sum over all elements; 0 where bits are compared.
        size: the sum of their magnitudes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int
    sample: np.ndarray[Any, Any] | None = None
    total: float = 0.0
    size: float = 0.0

    @classmethod
    def of(cls, tensor: torch.Tensor, *, is_exact: bool) -> Fingerprint:
        """That of a tensor; with `is_exact`, small ones alone have a sample."""
        tensor = tensor.detach()
        shape, bits = () if tensor.is_nested else tuple(tensor.shape), bits_of(tensor)
        is_plain = tensor.layout == torch.strided and not tensor.is_nested
        has_sample = tensor.is_floating_point() and is_plain
        if not has_sample or is_wrapper(tensor) or (is_exact and tensor.numel() > _NUM_SAMPLES):
            return cls(shape, tensor.dtype, bits)
        pieces = [piece for each in _pieces(tensor) for piece in each.split(_MOST_CONVERTED)]
        step = max(1, tensor.numel() // _NUM_SAMPLES)
        samples, total, size = [], 0.0, 0.0
        for piece in pieces:
            samples.append(_doubles(piece[::step]))
            if not is_exact:
                numbers = _doubles(piece)
                with np.errstate(invalid="ignore", over="ignore"):  # of gradients without bounds
                    total, size = total + float(numbers.sum()), size + float(np.abs(numbers).sum())
        return cls(shape, tensor.dtype, bits, np.concatenate(samples), total, size)

    @property
    def largest(self) -> float:
        """The largest finite magnitude of the sample; 0 without one."""
        sample = () if self.sample is None else np.abs(self.sample[np.isfinite(self.sample)])
        return float(np.max(sample, initial=0.0))

    def difference(self, other: Fingerprint, tolerance: float, least: float = 0.0) -> str:
        """In words what differs beyond a tolerance, in units of the size of elements; else empty.

        Args:
            other: what is held against this one.
            tolerance: 0 for none.
            least: size that elements count as at least.
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
        with np.errstate(invalid="ignore"):
            is_same = (self.sample == other.sample) | (
                np.isnan(self.sample) & np.isnan(other.sample)
            )
            gaps = np.where(is_same, 0.0, np.abs(self.sample - other.sample))
            gap = float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0))
            finite = np.abs(self.sample[np.isfinite(self.sample)])
            of_total = abs(self.total - other.total)
        is_near = gap <= tolerance * max(self.largest, least)
        most = tolerance * max(self.size, least)
        if tolerance and is_near and (of_total <= most or of_total != of_total):
            return ""
        if len(self.sample) == 1:
            return f"is {other.sample.item():.9g} and not {self.sample.item():.9g}"
        return f"differs by up to {gap:.3g}, where elements are {finite.mean():.3g} in size"


def _doubles(flat: torch.Tensor) -> np.ndarray[Any, Any]:
    """Elements as NumPy's doubles, which are no memory of PyTorch's."""
    if flat.device.type != "cpu":
        return flat.to("cpu", torch.float32 if flat.element_size() < 4 else flat.dtype).numpy()
    if flat.dtype == torch.bfloat16:
        bits = _array(flat.view(torch.int16)).astype(np.uint16).astype(np.uint32)
        return (bits << 16).view(np.float32).astype(np.float64)
    if flat.dtype in _OF_NUMPY:
        return _array(flat).astype(np.float64)
    return flat.to(torch.float32).numpy().astype(np.float64)
