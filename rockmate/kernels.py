"""Calls that stand in for ATen ops in a planned graph, each bitwise equal to what it stands for.

They exist where an op as ATen has it ties together what the planner wants apart (drawing a dropout mask and applying it), cannot run
twice (batch normalisation that updates statistics), or needs memory that its mathematics does not (the gradient of cross entropy).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

_aten = torch.ops.aten
_CHUNK_BYTES = 1 << 20  # of each piece of the cross entropy's gradient: large enough to hide the calls, small beside the logits


def dropout_mask(size: list[int], stride: list[int], device: torch.device, probability: float) -> torch.Tensor:
    """The mask that dropout draws on CPU, bitwise, without its input.

    Args:
        size: the input's shape.
        stride: the mask's strides, which fix the order of drawing.
        device: where; the values are those of eager on CPU only.
        probability: that an element is dropped; at 1 nothing is drawn, as in eager.
    """
    mask = torch.empty_strided(size, stride, dtype=torch.bool, device=device)
    return mask.fill_(False) if probability >= 1.0 else mask.bernoulli_(1.0 - probability)


def dropout_apply(
    values: torch.Tensor, mask: torch.Tensor, probability: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What dropout makes of its input and its mask on CPU, bitwise; of its gradient, too.

    Eager multiplies by a noise tensor whose entries are 0 or 1 / (1 - p) rounded to the input's dtype. Multiplying by the mask is
    exact, so multiplying by that rounded number afterwards gives the same.
    """
    return torch.mul(values, mask, out=out).mul_(_scale_of_kept(probability, values.dtype))


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
    assert training, "batch normalisation in inference mode updates nothing and is recomputed as it is"
    return *_aten._native_batch_norm_legit.no_stats(values, weight, bias, training, momentum, eps), None, None


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
    result = _aten._native_batch_norm_legit_no_training(values, scale, bias, mean, torch.ones_like(mean), 0.0, 0.0)[0]
    return result, mean.clone(), inverse_deviation.clone(), None, None


def statistics_to_keep(results: Sequence[torch.Tensor], *_arguments: object) -> torch.Tensor:
    """What `normalize_again` needs of the first run, (2, channels): mean and inverse deviation."""
    return torch.stack(list(results))


def can_normalize_again(*tensors: torch.Tensor | None) -> bool:
    """Whether `normalize_again` gives the same bits for tensors laid out like these, of which the first holds the values."""
    values, *vectors = [tensor for tensor in tensors if tensor is not None]
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_dense = values.is_contiguous() or values.is_contiguous(memory_format=layouts.get(values.ndim, torch.contiguous_format))
    is_full = values.dtype in (torch.float32, torch.float64) and values.device.type == "cpu"
    return is_dense and is_full and all(vector.dtype == values.dtype and vector.is_contiguous() for vector in vectors)


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
    indices = offsets + _first_in_window(offsets, values.shape[-1], stride or kernel, padding, dilation)
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
    torch.sub(indices, _first_in_window(indices, values.shape[-1], stride or kernel, padding, dilation), out=offsets[0])
    return offsets


def _first_in_window(
    pooled: torch.Tensor, width: int, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """(rows, columns): the flat index of the first value in each window that is no padding."""
    firsts = []
    for dim in (-2, -1):
        places = torch.arange(pooled.shape[dim], device=pooled.device) * stride[dim % len(stride)] - padding[dim % len(padding)]
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
    return values.device.type == "cpu" and values.is_contiguous() and largest <= torch.iinfo(_OFFSET).max


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
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        scores = log_probabilities[rows]
        row_gradient = gradient[rows] if gradient.ndim else gradient
        piece = _aten.nll_loss_backward(row_gradient, scores, target[rows], weight, reduction, ignore_index, total_weight)
        _aten._log_softmax_backward_data.out(piece, scores, 1, scores.dtype, out=result[rows])
    return result


def target_weight(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
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
