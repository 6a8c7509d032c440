"""Calls that stand in for ATen ops in a planned graph, each bitwise equal to what it stands for.

They exist where an op as ATen has it ties together what the planner wants apart (drawing a dropout mask and applying it), cannot run
twice (batch normalisation that updates statistics), or needs memory that its mathematics does not (the gradient of cross entropy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from rockmate._torch.fake import is_fake

_aten = torch.ops.aten
CHUNK_BYTES = (
    1 << 20
)  # of a piece of the cross entropy's gradient or of dropout: large enough to hide the calls, small beside the whole
DRAWN_AT_ONCE = (
    1 << 15
)  # elements of a mask: their random numbers, eight bytes each, stay in the cache
_FRACTION_BITS = 53  # of a float64


def dropout_mask(
    size: list[int], stride: list[int], device: torch.device, probability: float
) -> torch.Tensor:
    """The mask that dropout draws on CPU, bitwise, without its input.

    Args:
        size: the input's shape.
        stride: the mask's strides, which fix the order of drawing.
        device: where; the values are those of eager on CPU only.
        probability: that an element is dropped; at 1 nothing is drawn, as in eager.
    """
    mask = torch.empty_strided(size, stride, dtype=torch.bool, device=device)
    if probability >= 1.0:
        return mask.fill_(False)
    num_elements = mask.numel()
    is_small = num_elements < 2 * DRAWN_AT_ONCE
    if (
        is_small
        or is_fake(mask)
        or mask.untyped_storage().nbytes() != num_elements
        or not _draws_whole_numbers()
    ):
        return mask.bernoulli_(1.0 - probability)
    _draw(mask.as_strided((num_elements,), (1,)), 1.0 - probability, None)
    return mask


def _draw(mask: torch.Tensor, kept: float, generator: torch.Generator | None) -> None:
    """What `mask.bernoulli_(kept, generator=generator)` draws, in two thirds of the time, for a mask of one dim.

    PyTorch takes the 53 low bits of a random number of 64 bits for each element, makes them a fraction of 2^53 and compares that with the
    probability, one element at a time. Whole numbers compared many at a time give the same.
    """
    limit = math.ceil(math.ldexp(kept, _FRACTION_BITS))  # of the fractions below `kept`; exact
    numbers = torch.empty(min(mask.numel(), DRAWN_AT_ONCE), dtype=torch.int64, device=mask.device)
    flat = mask.view(torch.uint8)
    for start in range(0, mask.numel(), DRAWN_AT_ONCE):
        piece = flat[start : start + DRAWN_AT_ONCE]
        drawn = numbers[: piece.numel()].random_(-(1 << 63), None, generator=generator)
        piece.copy_(drawn.bitwise_and_((1 << _FRACTION_BITS) - 1).lt_(limit))


@lru_cache(maxsize=1)
def _draws_whole_numbers() -> bool:
    """Whether `_draw` does on this machine what PyTorch does: with some processors PyTorch has a library draw, by other numbers."""
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    mask, expected = (torch.empty(1000, dtype=torch.bool, device="cpu") for _ in range(2))
    _draw(mask, 0.3, ours)
    expected.bernoulli_(0.3, generator=theirs)
    return torch.equal(mask, expected) and torch.equal(ours.get_state(), theirs.get_state())


def dropout_apply(
    values: torch.Tensor, mask: torch.Tensor, probability: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What dropout makes of its input and its mask on CPU, bitwise; of its gradient, too.

    Eager multiplies by a noise tensor whose entries are 0 or 1 / (1 - p) rounded to the input's dtype. Multiplying by the mask is
    exact, so multiplying by that rounded number afterwards gives the same: also the sign of a zero, infinities and what is no number.
    The mask is read as small integers, which ATen converts to the input's dtype many at a time, and truth values one by one; what
    is converted is never more than a piece of it where both lie in the order of their dimensions.
    """
    scale = _scale_of_kept(probability, values.dtype)
    numbers = mask.view(torch.uint8)
    numel = converted_numel(values, mask)
    if numel == values.numel():
        return torch.mul(values, numbers, out=out).mul_(scale)
    result = torch.empty_like(values, memory_format=torch.contiguous_format) if out is None else out
    flat = [tensor.view(-1) for tensor in (values, numbers, result)]
    for start in range(0, values.numel(), numel):
        value, number, target = (tensor[start : start + numel] for tensor in flat)
        torch.mul(value, number, out=target).mul_(scale)
    return result


def converted_numel(values: torch.Tensor, mask: torch.Tensor) -> int:
    """How many elements of its mask `dropout_apply` holds at once as numbers of the values' dtype.

    Pieces are as even as can be, not full ones and a rest: a short rest would lie on the C library's heap, among blocks that stay, and
    not go back to the kernel as larger blocks do. Where either is not in the order of its dimensions, there is one piece.
    """
    numel = values.numel()
    if not (values.is_contiguous() and mask.is_contiguous()):
        return numel
    num_pieces = max(1, math.ceil(numel * values.element_size() / CHUNK_BYTES))
    return math.ceil(numel / num_pieces)


@lru_cache(maxsize=256)
def _scale_of_kept(probability: float, dtype: torch.dtype) -> float:
    """What dropout multiplies an element that stays by: 1 / (1 - p) rounded to `dtype`, 0 if none stays."""
    kept = 1.0 - probability
    return torch.ones((), dtype=dtype).div_(kept).item() if kept else 0.0


def batch_norm_again(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Batch normalisation in training, bitwise as at the first run, without touching the running statistics.

    The running statistics are outputs of the first run only, and their old values are gone by now; in training they do not enter
    the result. Takes the arguments of `_native_batch_norm_legit_functional` and returns
    what it returns, less the new statistics.
    """
    assert training, (
        "batch normalisation in inference mode updates nothing and is recomputed as it is"
    )
    return (
        *_aten._native_batch_norm_legit.no_stats(values, weight, bias, training, momentum, eps),
        None,
        None,
    )


def normalize_again(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Batch normalisation in training with the statistics of its first run, bitwise as at that run, on CPU.

    Taking the statistics is most of the work: with them at hand it is one pass over the values, a tenth of the time. PyTorch computes
    x a + (b - m a) with a = r w, where m and r are the statistics in training, and the running mean and 1 / sqrt(variance + eps) in
    inference. So inference with weight r w, mean m, variance 1 and eps 0 runs the same arithmetic on the same numbers.

    Args:
        values: (batch, channels, ...) of float32 or float64, dense in the order of its dimensions or with channels last.
        weight: (channels,) of the same dtype, or None.
        bias: likewise.
        mean: (channels,), the second result of the first run.
        inverse_deviation: (channels,), its third.

    Returns:
        What the first run returned, less the running statistics.
    """
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    result = _aten._native_batch_norm_legit_no_training(
        values, scale, bias, mean, torch.ones_like(mean), 0.0, 0.0
    )[0]
    return result, mean.clone(), inverse_deviation.clone(), None, None


def statistics_to_keep(results: Sequence[torch.Tensor], *_arguments: object) -> torch.Tensor:
    """What `normalize_again` needs of the first run, (2, channels): mean and inverse deviation."""
    return torch.stack(list(results))


def can_normalize_again(*tensors: torch.Tensor | None) -> bool:
    """Whether `normalize_again` gives the same bits for tensors laid out like these, of which the first holds the values."""
    values, *vectors = [tensor for tensor in tensors if tensor is not None]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_dense = values.is_contiguous() or values.is_contiguous(
        memory_format=layouts.get(values.ndim, torch.contiguous_format)
    )
    is_full = values.dtype in (torch.float32, torch.float64) and values.device.type == "cpu"
    return (
        is_dense
        and is_full
        and all(vector.dtype == values.dtype and vector.is_contiguous() for vector in vectors)
    )


_OFFSET = torch.int16


def pool_again(
    values: torch.Tensor,
    offsets: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Max-pooling where it is known which value of each window is the largest, bitwise as at the first run.

    Finding the largest is all of the work, and slow on CPU, which guesses wrong at every other comparison. The arguments are those of
    `max_pool2d_with_indices` with what `offsets_to_keep` made of its first run in between; the returned indices are of the dtype of
    PyTorch's whatever that of the offsets.

    Args:
        values: (..., height, width), contiguous.
        offsets: (1, ..., rows, columns) or without the first dim, of the largest value behind the first of its window.
        kernel: of two dims, or one for both; likewise what follows.
        stride: the kernel if empty.
        padding: on each side.
        dilation: from one value of a window to the next.
    """
    indices = offsets + _first_in_window(
        offsets, values.shape[-1], stride or kernel, padding, dilation
    )
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape), indices


def offsets_to_keep(
    results: Sequence[torch.Tensor],
    values: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> torch.Tensor:
    """What `pool_again` needs of the first run, (1, ..., rows, columns): its indices less the first of each window, a quarter as large."""
    (indices,) = results
    offsets = torch.empty((1, *indices.shape), dtype=_OFFSET, device=indices.device)
    torch.sub(
        indices,
        _first_in_window(indices, values.shape[-1], stride or kernel, padding, dilation),
        out=offsets[0],
    )
    return offsets


def _first_in_window(
    pooled: torch.Tensor,
    width: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """(rows, columns): the flat index of the first value in each window that is no padding."""
    firsts = []
    for dim in (-2, -1):
        places = (
            torch.arange(pooled.shape[dim], device=pooled.device) * stride[dim % len(stride)]
            - padding[dim % len(padding)]
        )
        firsts.append(places.where(places >= 0, places % dilation[dim % len(dilation)]))
    return firsts[0].unsqueeze(1) * width + firsts[1]


def can_pool_again(
    values: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> bool:
    """Whether `pool_again` serves for values laid out like these; arguments as of `max_pool2d_with_indices`."""
    largest = (kernel[0] - 1) * dilation[0] * values.shape[-1] + (kernel[-1] - 1) * dilation[-1]
    return (
        values.device.type == "cpu"
        and values.is_contiguous()
        and largest <= torch.iinfo(_OFFSET).max
    )


def cross_entropy_backward(
    gradient: torch.Tensor,
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of `nll_loss(log_softmax(x, 1), target)` for x, a few rows at a time.

    ATen makes the gradient for the log-probabilities first, a matrix of the logits' size that is zero but for one entry a row, and
    then that for the logits. Rows do not depend on each other, so both steps are taken on slices and the first matrix never exists
    as a whole. The same kernels run on each row, so the result is bitwise the same.

    Args:
        gradient: of the loss; a scalar, or one a row where the loss is not reduced.
        log_probabilities: (rows, classes).
        target: (rows,) class indices.
        weight: (classes,) or None.
        reduction: ATen's number for it (0 none, 1 mean, 2 sum).
        ignore_index: target that counts for nothing.
        total_weight: what the forward returned beside the loss.
        out: where to put the result; may be `log_probabilities` itself.
    """
    num_rows = log_probabilities.shape[0]
    result = torch.empty_like(log_probabilities) if out is None else out
    row_bytes = max(1, log_probabilities.shape[1] * log_probabilities.element_size())
    step = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        scores = log_probabilities[rows]
        row_gradient = gradient[rows] if gradient.ndim else gradient
        piece = _aten.nll_loss_backward(
            row_gradient, scores, target[rows], weight, reduction, ignore_index, total_weight
        )
        _aten._log_softmax_backward_data.out(piece, scores, 1, scores.dtype, out=result[rows])
    return result


def target_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """What `nll_loss` divides by in its mean: how many targets count, or the sum of their classes' weights.

    Args:
        target: (rows,) class indices.
        weight: (classes,) or None.
        ignore_index: target that counts for nothing.
        dtype: of the result, a scalar.
    """
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    return (weight[target.masked_fill(~counts, 0)] * counts).sum().to(dtype)
