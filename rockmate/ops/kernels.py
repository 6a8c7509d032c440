"""Functions that replace ATen ops in a planned graph, each bitwise equal to the op on CPU.

An op is replaced for one of three reasons:

- it does two things that a schedule wants apart: dropout draws a mask and applies it;
- it cannot run twice: batch normalization in training updates running statistics;
- it needs memory that its mathematics does not: the gradient of cross entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from rockmate._torch.fake import is_fake
from rockmate.errors import UnsupportedModelError
from rockmate.ops.kernel_layouts import CHANNELS_LAST

_aten = torch.ops.aten
# Size of a chunk of dropout or of the cross-entropy gradient. It is large enough that calls cost
# little, and small beside the whole tensor.
CHUNK_BYTES = 1 << 20
# The same on a GPU, where a kernel on fewer bytes takes less time than its launch.
CUDA_CHUNK_BYTES = 1 << 25
# Mask elements drawn at a time. Their random numbers, eight bytes each, stay in the cache.
DRAW_CHUNK_NUMEL = 1 << 15
# Bits of a float64's fraction, the implicit one included.
_FRACTION_BITS = 53


def dropout_mask(
    size: list[int], stride: list[int], device: torch.device, probability: float
) -> torch.Tensor:
    """The mask that dropout draws on CPU, bitwise, made without dropout's input.

    Args:
        size: the input's shape.
        stride: the mask's strides, which fix the order of drawing.
        device: of the mask. The values equal eager's on CPU only.
        probability: that an element is dropped. At 1 no random number is drawn, as in eager.
    """
    mask = torch.empty_strided(size, stride, dtype=torch.bool, device=device)
    if probability >= 1.0:
        return mask.fill_(False)
    numel = mask.numel()
    is_small, is_dense = numel < 2 * DRAW_CHUNK_NUMEL, mask.untyped_storage().nbytes() == numel
    if is_small or is_fake(mask) or not is_dense or not _integer_draw_matches():
        return mask.bernoulli_(1.0 - probability)
    _draw_integers(mask.as_strided((numel,), (1,)), 1.0 - probability, None)
    return mask


def _draw_integers(
    mask: torch.Tensor, keep_probability: float, generator: torch.Generator | None
) -> None:
    """Draws what `mask.bernoulli_` draws for a mask of one dimension, in two thirds of the time.

    For each element PyTorch takes the 53 low bits of a 64-bit random number, divides them by 2^53
    and compares the fraction with the probability, one element at a time. Comparing the integers,
    many at a time, gives the same result.
    """
    # The number of fractions below `keep_probability`, exactly.
    limit = math.ceil(math.ldexp(keep_probability, _FRACTION_BITS))
    chunk_numel = min(mask.numel(), DRAW_CHUNK_NUMEL)
    numbers = torch.empty(chunk_numel, dtype=torch.int64, device=mask.device)
    flat = mask.view(torch.uint8)
    for start in range(0, mask.numel(), DRAW_CHUNK_NUMEL):
        chunk = flat[start : start + DRAW_CHUNK_NUMEL]
        drawn = numbers[: chunk.numel()].random_(-(1 << 63), None, generator=generator)
        chunk.copy_(drawn.bitwise_and_((1 << _FRACTION_BITS) - 1).lt_(limit))


@lru_cache(maxsize=1)
def _integer_draw_matches() -> bool:
    """Whether `_draw_integers` and PyTorch draw the same mask on this machine.

    On some processors PyTorch lets a library draw, from other numbers.
    """
    ours, theirs = (torch.Generator("cpu").manual_seed(1) for _ in range(2))
    mask, expected = (torch.empty(1000, dtype=torch.bool, device="cpu") for _ in range(2))
    _draw_integers(mask, 0.3, ours)
    expected.bernoulli_(0.3, generator=theirs)
    return torch.equal(mask, expected) and torch.equal(ours.get_state(), theirs.get_state())


def dropout_apply(
    values: torch.Tensor,
    mask: torch.Tensor,
    probability: float,
    memory_format: torch.memory_format | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Applies a dropout mask as eager does on CPU, bitwise. It serves for the gradient, too.

    Eager multiplies by a noise tensor whose entries are 0 or 1 / (1 - p), rounded to the input's
    dtype. Multiplying by the mask is exact. So multiplying by the rounded number afterwards gives
    the same result, also for signed zeros, infinities and NaN.

    The mask is read as 8-bit integers: ATen converts these to the input's dtype many at a time, and
    booleans one by one. If both tensors are contiguous, one chunk at a time is converted.

    Args:
        values: the input, or the gradient of the output.
        mask: True where values are kept.
        probability: of a value to be dropped.
        memory_format: of the result; None for what a product of the two has.
        out: takes the result.
    """
    if memory_format is not None and out is None:
        out = torch.empty_like(values, memory_format=memory_format)
    scale = keep_scale(probability, values.dtype)
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


def as_strided(
    tensor: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None
) -> torch.Tensor:
    """The view of a tensor that was captured as contiguous.

    Raises:
        UnsupportedModelError: it is not, so that the view would have other elements. A kernel then
            lays out its result in another way than PyTorch's description of it says.
    """
    if not tensor.is_contiguous():
        msg = (
            f"a view with strides {list(stride)} (as_strided) was captured of a contiguous tensor, "
            f"and its kernel returned strides {list(tensor.stride())}. Call .contiguous() on the "
            "tensor ahead of as_strided in the model's forward, or run its submodule as it is "
            "(untraced=)."
        )
        raise UnsupportedModelError(msg)
    return tensor.as_strided(size, stride, offset)


def fold(columns: torch.Tensor, *arguments: Sequence[int]) -> torch.Tensor:
    """`col2im` in memory of the image's size: PyTorch's kernel keeps that of the columns."""
    return _aten.col2im(columns, *arguments).clone()


def converted_numel(values: torch.Tensor, mask: torch.Tensor) -> int:
    """Number of mask elements that `dropout_apply` converts to the values' dtype at once.

    Chunks are of even size, instead of full ones and a remainder. The C library would put a short
    remainder on its heap, among blocks that live on, and not return it to the kernel as it does
    with larger blocks. If either tensor is not contiguous, there is one chunk.
    """
    numel = values.numel()
    if not (values.is_contiguous() and mask.is_contiguous()):
        return numel
    num_chunks = max(1, math.ceil(numel * values.element_size() / CHUNK_BYTES))
    return math.ceil(numel / num_chunks)


@lru_cache(maxsize=256)
def keep_scale(probability: float, dtype: torch.dtype) -> float:
    """The factor of elements that dropout keeps: 1 / (1 - p) rounded to `dtype`, 0 if p is 1."""
    keep_probability = 1.0 - probability
    return torch.ones((), dtype=dtype).div_(keep_probability).item() if keep_probability else 0.0


def recompute_batch_norm(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor | None, ...]:
    """Batch normalization in training, bitwise as in the first run, without running statistics.

    The first run alone returns updated running statistics. By now their previous values are gone;
    in training they do not enter the result. Arguments and results are those of
    `_native_batch_norm_legit_functional`, with None for the updated statistics.
    """
    assert training, "batch normalization in inference mode needs no separate recomputation"
    return (
        *_aten._native_batch_norm_legit.no_stats(values, weight, bias, training, momentum, eps),
        None,
        None,
    )


def recompute_normalization(
    values: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Batch normalization with the statistics of its first run, bitwise as in that run on CPU.

    Most of the work is to compute the statistics. With them, one pass over the values is left, a
    tenth of the time. PyTorch computes x a + (b - m a) with a = r w. In training m and r are the
    batch statistics; in inference they are the running mean and 1 / sqrt(variance + eps). So
    inference with weight r w, mean m, variance 1 and eps 0 does the same arithmetic on the same
    numbers.

    Args:
        values: (batch, channels, ...) of float32 or float64, contiguous or channels last.
        weight: (channels,) of the same dtype, or None.
        bias: likewise.
        mean: (channels,), the second result of the first run.
        inverse_deviation: (channels,), the third result of the first run.

    Returns:
        The results of the first run, with None for the running statistics.
    """
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    result = _aten._native_batch_norm_legit_no_training(
        values, scale, bias, mean, torch.ones_like(mean), 0.0, 0.0
    )[0]
    return result, mean.clone(), inverse_deviation.clone(), None, None


def saved_statistics(results: Sequence[torch.Tensor], *_arguments: object) -> torch.Tensor:
    """(2, channels): mean and inverse deviation of the first run, for `recompute_normalization`."""
    return torch.stack(list(results))


def can_recompute_normalization(*tensors: torch.Tensor | None) -> bool:
    """Whether `recompute_normalization` is bitwise for values and vectors in these layouts."""
    values, *vectors = [tensor for tensor in tensors if tensor is not None]
    channels_last = CHANNELS_LAST.get(values.ndim, torch.contiguous_format)
    is_dense = values.is_contiguous() or values.is_contiguous(memory_format=channels_last)
    is_served = values.dtype in (torch.float32, torch.float64) and values.device.type == "cpu"
    are_alike = all(vector.dtype == values.dtype and vector.is_contiguous() for vector in vectors)
    return is_dense and is_served and are_alike


# Dtype of saved max-pooling offsets. Decision 16 has the cost in memory.
_OFFSET_DTYPE = torch.int16


def recompute_max_pool(
    values: torch.Tensor, offsets: torch.Tensor, *window: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Max-pooling with known positions of the maxima, bitwise as in the first run.

    Finding the maxima is all of the work. On CPU it is slow, since the branch predictor fails at
    every other comparison. The arguments are those of `max_pool2d_with_indices`, with the result of
    `saved_offsets` after the first. The returned indices have PyTorch's dtype.

    Args:
        values: (..., height, width), contiguous.
        offsets: (1, ..., rows, columns) or without the first dimension; the flat offset of each
            maximum from the first value of its window.
        window: kernel, stride, padding and dilation, each for two dimensions or for both.
    """
    firsts = _first_in_window(offsets, values.shape[-1], *window)
    indices = offsets + firsts
    return values.flatten(-2).gather(-1, indices.flatten(-2)).view(indices.shape), indices


def saved_offsets(
    results: Sequence[torch.Tensor], values: torch.Tensor, *window: Sequence[int]
) -> torch.Tensor:
    """(1, ..., rows, columns): offsets of the first run's maxima, for `recompute_max_pool`.

    An offset is the maximum's index less that of the first value of its window. Offsets take a
    quarter of the indices' bytes.
    """
    (indices,) = results
    offsets = torch.empty((1, *indices.shape), dtype=_OFFSET_DTYPE, device=indices.device)
    firsts = _first_in_window(indices, values.shape[-1], *window)
    torch.sub(indices, firsts, out=offsets[0])
    return offsets


def _first_in_window(
    pooled: torch.Tensor,
    width: int,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> torch.Tensor:
    """(rows, columns): the flat index of each window's first value that is not padding."""
    firsts, stride = [], stride or kernel
    for dim in (-2, -1):
        windows = torch.arange(pooled.shape[dim], device=pooled.device)
        starts = windows * stride[dim % len(stride)] - padding[dim % len(padding)]
        firsts.append(starts.where(starts >= 0, starts % dilation[dim % len(dilation)]))
    return firsts[0].unsqueeze(1) * width + firsts[1]


def can_recompute_max_pool(
    values: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> bool:
    """Whether `recompute_max_pool` serves for these arguments of `max_pool2d_with_indices`."""
    largest = (kernel[0] - 1) * dilation[0] * values.shape[-1] + (kernel[-1] - 1) * dilation[-1]
    fits = largest <= torch.iinfo(_OFFSET_DTYPE).max
    return values.device.type == "cpu" and values.is_contiguous() and fits


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
    """Gradient of `nll_loss(log_softmax(x, 1), target)` with respect to x, a few rows at a time.

    ATen first computes the gradient of the log-probabilities, a matrix of the logits' size with one
    nonzero entry a row, and then the gradient of the logits. Rows are independent. So both steps
    run on slices, and the first matrix never exists as a whole. The same kernels run on each row,
    so the result is bitwise equal.

    Args:
        gradient: of the loss; a scalar, or one number a row if the loss is not reduced.
        log_probabilities: (rows, classes).
        target: (rows,) class indices.
        weight: (classes,) or None.
        reduction: ATen's number for it: 0 none, 1 mean, 2 sum.
        ignore_index: class of targets that do not count.
        total_weight: the forward's second result.
        out: receives the result; may be `log_probabilities` itself.
    """
    num_rows = log_probabilities.shape[0]
    result = torch.empty_like(log_probabilities) if out is None else out
    step = chunk_rows(log_probabilities)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        scores = log_probabilities[rows]
        row_gradient = gradient[rows] if gradient.ndim else gradient
        score_gradient = _aten.nll_loss_backward(
            row_gradient, scores, target[rows], weight, reduction, ignore_index, total_weight
        )
        _aten._log_softmax_backward_data.out(
            score_gradient, scores, 1, scores.dtype, out=result[rows]
        )
    return result


def scatter_slice(
    base: torch.Tensor, part: torch.Tensor, *cut: int | None, out: torch.Tensor
) -> torch.Tensor:
    """`slice_scatter(base, part, *cut)` in the memory of `out`, which is `base`."""
    _aten.slice.Tensor(out, *cut).copy_(part)
    return out


def chunk_rows(scores: torch.Tensor) -> int:
    """Number of rows that `cross_entropy_backward` computes at a time, by metadata of `scores`."""
    chunk_bytes = CUDA_CHUNK_BYTES if scores.device.type == "cuda" else CHUNK_BYTES
    return max(1, chunk_bytes // max(1, scores.shape[1] * scores.element_size()))


def target_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """The divisor of `nll_loss` in its mean: number of targets that count, or sum of their weights.

    A scalar of the dtype. The other arguments are those of `cross_entropy_backward`.
    """
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    return (weight[target.masked_fill(~counts, 0)] * counts).sum().to(dtype)
