"""Stand-ins for ATen ops and in-place forms, each against what it stands for, bit for bit.

Small pieces of the pipeline.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import same_bits
from made_of import made_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rockmate import Planner
from rockmate._torch.allocator import peak_beyond_result, timeline
from rockmate.budget import parse_budget
from rockmate.capture.structure import flatten
from rockmate.errors import InvalidBudgetError, UnsupportedModelError
from rockmate.graph.in_place import _FORMS
from rockmate.ops.kernels import (
    CHUNK_BYTES,
    DRAW_CHUNK_NUMEL,
    _draw_integers,
    _integer_draw_matches,
    can_recompute_max_pool,
    can_recompute_normalization,
    cross_entropy_backward,
    dropout_apply,
    dropout_mask,
    recompute_batch_norm,
    recompute_max_pool,
    recompute_normalization,
    saved_offsets,
)

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("probability", [0.0, 0.1, 0.3, 0.5, 0.75, 0.9, 1.0])
def test_dropout_in_two_parts_is_native_dropout(probability: float, dtype: torch.dtype) -> None:
    for layout in (
        torch.randn(7, 33),
        torch.randn(5, 6, 4).transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        values = layout.to(dtype)
        torch.manual_seed(3)
        output, mask = torch.native_dropout(values, probability, True)
        state = torch.get_rng_state()
        # Eager's dropout draws nothing where all is dropped, unlike the fused op of its capture.
        if probability == 1.0:
            torch.manual_seed(3)
            state = torch.get_rng_state()
        torch.manual_seed(3)
        our_mask = dropout_mask(list(mask.shape), list(mask.stride()), values.device, probability)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(our_mask, mask)
        assert our_mask.stride() == mask.stride()
        ours = dropout_apply(values, our_mask, probability)
        assert same_bits(ours, output)
        assert torch.equal(ours.signbit(), output.signbit())
        assert ours.stride() == output.stride()


def test_dropout_of_values_that_are_not_finite() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, -0.0] * 20)
    torch.manual_seed(3)
    output, mask = torch.native_dropout(values, 0.4, True)
    assert torch.equal(dropout_apply(values, mask, 0.4).nan_to_num(7.0), output.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "layout",  # no flat view covers the second one in order
    [lambda values: values, lambda values: values.t().contiguous().t()],
    ids=["in order", "spread out"],
)
def test_large_dropout_and_its_gradient_are_eager_s(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """More elements than are drawn or applied at once, and no multiple of either."""
    rows, columns, probability = 2 * CHUNK_BYTES // dtype.itemsize // 1001 + 3, 1001, 0.1
    torch.manual_seed(2)
    values, gradient = (layout(torch.randn(rows, columns).to(dtype)) for _ in range(2))
    values[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
    assert values.numel() > 2 * CHUNK_BYTES // dtype.itemsize > 4 * DRAW_CHUNK_NUMEL
    values.requires_grad_()
    torch.manual_seed(3)
    output = torch.nn.functional.dropout(values, probability)
    output.backward(gradient)
    state = torch.get_rng_state()

    torch.manual_seed(3)
    mask = dropout_mask(list(values.shape), list(values.stride()), values.device, probability)
    assert torch.equal(torch.get_rng_state(), state)
    for given, expected in ((values.detach(), output.detach()), (gradient, values.grad)):
        assert expected is not None
        for out in (None, given.clone()):
            ours = dropout_apply(given if out is None else out, mask, probability, out=out)
            assert ours.stride() == expected.stride()
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            assert torch.equal(ours.view(bits), expected.view(bits))
            assert out is None or ours is out


@pytest.mark.parametrize("expanded", [(1, 70_000), (3, 1)])
def test_dropout_of_a_gradient_that_is_expanded(expanded: tuple[int, int]) -> None:
    mask = torch.rand(3, 70_000) < 0.5
    gradient = torch.randn(expanded).expand(3, 70_000)
    assert same_bits(dropout_apply(gradient, mask, 0.5), gradient * (mask * 2.0))


@pytest.mark.parametrize("kept", [1.0, 1.0 - 2.0**-53, 0.9, 0.5, 1 / 3, 2.0**-17, 1e-300])
def test_masks_are_drawn_as_pytorch_draws_them(kept: float) -> None:
    """Thousands of draws, whatever this machine's PyTorch does.

    Where a library draws for it, ours are not used.
    """
    ours, theirs = (torch.zeros(100_003, dtype=torch.bool) for _ in range(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    _draw_integers(ours, kept, generators[0])
    theirs.bernoulli_(kept, generator=generators[1])
    is_same = torch.equal(ours, theirs) and torch.equal(
        generators[0].get_state(), generators[1].get_state()
    )
    assert is_same == _integer_draw_matches()


def test_a_mask_without_data_is_drawn_without_data() -> None:
    with FakeTensorMode():
        mask = dropout_mask([400, 400], [400, 1], torch.device("cpu"), 0.1)
    assert (mask.dtype, mask.shape, mask.stride()) == (torch.bool, (400, 400), (400, 1))


@pytest.mark.parametrize(
    ("numel", "sizes"),
    [(250_000, [1_000_000]), (524_288, [1 << 20] * 2), (524_289, [699_052, 699_052, 699_052])],
)
def test_dropout_converts_its_mask_in_even_pieces(numel: int, sizes: list[int]) -> None:
    """In bytes of float32; a short rest would lie on the C library's heap and fragment it."""
    values, mask = torch.randn(numel), torch.rand(numel) < 0.5
    dropout_apply(values, mask, 0.5)
    points = timeline(lambda: dropout_apply(values, mask, 0.5, out=values)).points
    allocated = [
        later - earlier
        for (_, earlier), (_, later) in itertools.pairwise(points)
        if later > earlier
    ]
    # beside numbers of no dim
    assert [num_bytes for num_bytes in allocated if num_bytes > 64] == sizes
    assert peak_beyond_result(lambda: dropout_apply(values, mask, 0.5), values.device) == max(sizes)


# --- cross entropy --------------------------------------------------------------------------------


@pytest.mark.parametrize("aliased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 7), (300, 2000), (3, 400_000)])
def test_cross_entropy_backward(
    rows: int, classes: int, reduction: int, weighted: bool, aliased: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    scores = torch.randn(rows, classes, generator=generator).log_softmax(1)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[::3] = -100
    weight = torch.rand(classes, generator=generator) if weighted else None
    _, total = aten.nll_loss_forward(scores, target, weight, reduction, -100)
    gradient = torch.randn(rows, generator=generator) if reduction == 0 else torch.tensor(1.7)
    first = aten.nll_loss_backward(gradient, scores, target, weight, reduction, -100, total)
    expected = aten._log_softmax_backward_data(first, scores, 1, scores.dtype)
    given = scores.clone()
    ours = cross_entropy_backward(
        gradient, given, target, weight, reduction, -100, total, out=given if aliased else None
    )
    assert (ours.data_ptr() == given.data_ptr()) is aliased
    # a mean over no target is not a number
    assert torch.equal(ours.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert aliased or same_bits(given, scores)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ignore_index", [0, 3, -1])
def test_cross_entropy_backward_of_other_types_and_ignored_targets(
    dtype: torch.dtype, ignore_index: int
) -> None:
    scores = torch.randn(50, 11).to(dtype).log_softmax(1)
    target = torch.randint(0, 11, (50,))
    target[:4] = ignore_index
    for reduction in (1, 2):
        _, total = aten.nll_loss_forward(scores, target, None, reduction, ignore_index)
        gradient = torch.ones((), dtype=dtype)
        first = aten.nll_loss_backward(
            gradient, scores, target, None, reduction, ignore_index, total
        )
        expected = aten._log_softmax_backward_data(first, scores, 1, dtype)
        assert same_bits(
            cross_entropy_backward(gradient, scores, target, None, reduction, ignore_index, total),
            expected,
        )


def test_cross_entropy_of_every_kind_through_a_plan() -> None:
    from helpers import check_against_eager
    from torch.nn import functional

    class Loss(torch.nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 9)
            self.register_buffer("weight", options.pop("weight", None))
            self.options = options

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return functional.cross_entropy(
                self.linear(x).tanh(), target, self.weight, **self.options
            ).sum()

    x, target = torch.randn(64, 16), torch.randint(0, 9, (64,))
    target[:5] = 4
    soft = torch.rand(64, 9).softmax(1)
    for options, wanted in (
        ({}, target),
        ({"reduction": "sum"}, target),
        ({"reduction": "none"}, target),
        ({"ignore_index": 4}, target),
        ({"weight": torch.rand(9)}, target),
        ({"label_smoothing": 0.1}, target),
        ({}, soft),
    ):
        check_against_eager(
            Loss(**options),
            (x, wanted),
            lambda m, s, wanted=wanted: (None, m(x * s, wanted)),
            num_steps=2,
        )


# --- batch norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(16, 5), (4, 5, 6, 7), (2, 5, 3, 3, 3)])
def test_batch_norm_again(shape: tuple[int, ...], affine: bool) -> None:
    values = torch.randn(shape)
    weight, bias = (torch.randn(5), torch.randn(5)) if affine else (None, None)
    mean, var = torch.randn(5), torch.rand(5)
    expected = aten._native_batch_norm_legit_functional(
        values, weight, bias, mean, var, True, 0.1, 1e-5
    )
    other_mean = torch.randn(5)
    ours = recompute_batch_norm(values, weight, bias, other_mean, var, True, 0.1, 1e-5)
    assert all(same_bits(a, b) for a, b in zip(ours[:3], expected[:3], strict=True))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shape", [(16, 5), (4, 5, 7), (4, 37, 6, 7), (2, 5, 3, 3, 3), (3, 64, 33, 31)]
)
def test_normalizing_again_gives_the_bits_of_batch_norm(
    shape: tuple[int, ...], dtype: torch.dtype, affine: bool
) -> None:
    channels = shape[1]
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(len(shape), torch.contiguous_format)
    for layout in (torch.contiguous_format, last):
        values = (3 * torch.randn(shape, dtype=dtype) + 7).to(memory_format=layout)
        values[:, 0] = 2.5  # a channel without variance
        weight, bias = (
            (torch.randn(channels, dtype=dtype), torch.randn(channels, dtype=dtype))
            if affine
            else (None, None)
        )
        running = torch.randn(channels, dtype=dtype), torch.rand(channels, dtype=dtype)
        expected = aten._native_batch_norm_legit_functional(
            values, weight, bias, *running, True, 0.1, 1e-5
        )
        assert can_recompute_normalization(values, weight, bias, *expected[1:3])
        ours = recompute_normalization(values, weight, bias, *expected[1:3])
        assert all(same_bits(a, b) for a, b in zip(ours[:3], expected[:3], strict=True))
        assert [a.stride() for a in ours[:3]] == [b.stride() for b in expected[:3]]
        assert all(
            a.data_ptr() != b.data_ptr() for a, b in zip(ours[:3], expected[:3], strict=True)
        )


def test_what_cannot_be_normalized_again_with_the_same_bits() -> None:
    values, vector = torch.randn(4, 5, 6, 7), torch.randn(5)
    assert can_recompute_normalization(values, None, None, vector, vector)
    # another kernel, which rounds otherwise
    assert not can_recompute_normalization(values.permute(0, 1, 3, 2), None, None, vector, vector)
    assert not can_recompute_normalization(values.bfloat16(), vector, vector, vector, vector)
    assert not can_recompute_normalization(
        values.bfloat16(), None, None, vector.bfloat16(), vector.bfloat16()
    )
    assert not can_recompute_normalization(values, vector.double(), vector, vector, vector)


# --- max-pooling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ([2, 2], [2, 2]),
        ([2, 2],),
        ([3, 3], [2, 2], [1, 1]),
        ([3, 2], [1, 2], [1, 0], [2, 3]),
        ([2], [2]),
        ([3, 3], [2, 2], [0, 0], [1, 1], True),
    ],
)
@pytest.mark.parametrize("shape", [(2, 5, 16, 12), (3, 9, 13)])
def test_pooling_again_gives_the_bits_of_max_pooling(
    shape: tuple[int, ...], arguments: tuple[Any, ...]
) -> None:
    values = torch.randn(shape).relu()  # with ties
    values.view(-1)[::7] = -torch.inf
    values.view(-1)[3] = torch.nan
    for given in (values, values.double(), values.bfloat16()):
        expected = aten.max_pool2d_with_indices(given, *arguments)
        assert can_recompute_max_pool(given, *arguments)
        offsets = saved_offsets(expected[1:], given, *arguments)
        assert offsets.nbytes == expected[1].nbytes / 4
        ours = recompute_max_pool(given, offsets[0], *arguments)
        assert ours[0].isnan().any()
        assert same_bits(ours[0].isnan(), expected[0].isnan())
        assert same_bits(ours[0].nan_to_num(nan=3.0), expected[0].nan_to_num(nan=3.0))
        assert same_bits(ours[1], expected[1])
        assert [a.stride() for a in ours] == [b.stride() for b in expected]


def test_what_cannot_be_pooled_again() -> None:
    assert not can_recompute_max_pool(
        torch.randn(2, 5, 8, 8).to(memory_format=torch.channels_last), [2, 2]
    )
    assert can_recompute_max_pool(torch.empty(1, 3, 32766), [2, 2])
    # the offset of the second row does not fit into two bytes
    assert not can_recompute_max_pool(torch.empty(1, 3, 32768), [2, 2])


# --- in place -------------------------------------------------------------------------------------


def arguments_of(target: Any) -> tuple[Any, ...]:
    """Arguments for one entry of the table of in-place forms.

    Ordinary values, all operands of one layout.
    """
    a, b = torch.randn(6, 5), torch.randn(6, 5)
    mask = torch.rand(6, 5) > 0.5
    scores, classes = a.log_softmax(1), torch.randint(0, 5, (6,))
    gradient, total = torch.tensor(1.0), torch.tensor(6.0)
    rows = torch.randperm(6)[:, None].expand(6, 5)
    special: dict[Any, tuple[Any, ...]] = {
        aten.pow.Tensor_Scalar: (a.abs(), 1.5),
        aten.masked_fill.Scalar: (a, mask, -3.0),
        aten.masked_fill.Tensor: (a, mask, torch.tensor(2.0)),
        aten.threshold_backward.default: (a, b, 0.0),
        aten.tanh_backward.default: (a, b.tanh()),
        aten.sigmoid_backward.default: (a, b.sigmoid()),
        aten.rsqrt.default: (a.abs(),),
        aten.sqrt.default: (a.abs(),),
        aten.clamp.default: (a, -0.5, 0.5),
        aten.where.self: (mask, a, b),
        aten.leaky_relu_backward.default: (a, b, 0.1, False),
        aten._softmax.default: (a, 1, False),
        aten._log_softmax.default: (a, 1, False),
        aten._log_softmax_backward_data.default: (a, b.log_softmax(1), 1, torch.float32),
        aten._softmax_backward_data.default: (a, b.softmax(1), 1, torch.float32),
        aten.native_dropout_backward.default: (a, mask, 1.25),
        aten.addmm.default: (a, torch.randn(6, 4), torch.randn(4, 5)),
        cross_entropy_backward: (gradient, scores, classes, None, 1, -100, total),
        dropout_apply: (a, mask, 0.3),
        aten.scatter_add.default: (a, 0, rows, b),
        aten.scatter.src: (a, 0, rows, b),
        aten.scatter.value: (a, 0, rows, 0.7),
    }
    if target in special:
        return special[target]
    schema = target._schema.arguments
    values = iter((a, b))
    kinds = [
        str(argument.type)
        for argument in schema
        if not argument.kwarg_only and not argument.has_default_value()
    ]
    return tuple(next(values) if kind == "Tensor" else 0.7 for kind in kinds)


CASES = [(target, position) for target, form in _FORMS.items() for position in form.operands]
CASE_NAMES = [  # the same in every process: a function's text has its address
    f"{target if isinstance(target, torch._ops.OpOverload) else target.__name__}-{position}"
    for target, position in CASES
]


@pytest.mark.parametrize(("target", "position"), CASES, ids=CASE_NAMES)
def test_in_place_form_is_the_functional_form(target: Any, position: int) -> None:
    form = _FORMS[target]
    given = arguments_of(target)
    # the two forms round a number to bfloat16 differently: not offered there
    takes_number = not form.out_name and len(given) > 1
    only_float32 = takes_number or target is cross_entropy_backward
    for dtype in (torch.float32,) if only_float32 else (torch.float32, torch.bfloat16):
        args = [
            arg.to(dtype)
            if isinstance(arg, Tensor) and arg.is_floating_point() and arg.ndim
            else arg
            for arg in given
        ]
        if dtype in args or torch.float32 in args:
            args = [dtype if arg is torch.float32 else arg for arg in args]
        before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        expected = target(*args)
        taken = args[position]
        keywords = {form.out_name: taken} if form.out_name else {}
        assert form.out_name or position == 0
        ours = form.target(*args, **keywords)
        assert ours.data_ptr() == taken.data_ptr()
        assert same_bits(ours, expected)
        assert ours.stride() == expected.stride()
        for index, arg in enumerate(args):
            if isinstance(arg, Tensor) and index != position:
                assert same_bits(arg, before[index]), "another operand was changed"


@pytest.mark.parametrize("alpha", [1, -0.5])
def test_in_place_forms_keep_keywords(alpha: float) -> None:
    for target in (aten.add.Tensor, aten.sub.Tensor):
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        expected = target(a, b, alpha=alpha)
        ours = _FORMS[target].target(a, b, alpha=alpha, out=b)
        assert same_bits(ours, expected)
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = aten.gelu_backward(a, b, approximate="tanh")
    form = _FORMS[aten.gelu_backward.default]
    assert same_bits(form.target(a, b, approximate="tanh", grad_input=a), expected)


def test_operand_that_is_read_twice_survives_an_in_place_form() -> None:
    """`h * h`, `h + h.t()`, `h * h.sum(0)` and the like, through plans."""
    from helpers import check_against_eager

    @made_of(lambda: {"linear": torch.nn.Linear(16, 16)})
    class Twice(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x[:16])
            h = h * h + 1
            h = h + h.t()
            h = h - h.flip(0)
            h = h * h[0]
            h = h + h[:, :1]
            h = (h.exp() * h.sigmoid()).tanh()
            return -((h / (h.abs() + 1)) ** 2)

    x = torch.randn(64, 16)
    check_against_eager(Twice(), x, lambda module, step: (None, module(x * step * 0.1).mean()))


# --- structure ------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Leaf:
    value: Any
    other: Any = None


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t(),
        lambda t: (t(), [t(), {"a": t(), "b": None}], 3, 2.5, "x", True, None),
        lambda t: Leaf(t(), Leaf((t(), t()), {"k": t()})),
        lambda t: {
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "size": torch.Size([2]),
            "colour": Colour.RED,
        },
        lambda t: (),
        lambda t: [[], {}, (), t()],
        lambda t: [Leaf(None), Leaf(t())],
    ],
)
def test_structure_round_trip(make: Any) -> None:
    counter = itertools.count()
    read = functools.partial(flatten, what="it", takes_objects=True)
    tensors, structure = read(make(lambda: torch.tensor(next(counter))))
    counter = itertools.count()
    assert sorted(int(tensor) for tensor in tensors) == list(range(len(tensors)))
    expected = make(lambda: f"tensor {next(counter)}")
    assert structure.rebuild([f"tensor {int(tensor)}" for tensor in tensors]) == expected
    assert structure == read(make(lambda: torch.tensor(0)))[1]
    assert structure != read((make(lambda: torch.tensor(0)), 1))[1]


def test_structure_keeps_some_tensors_only() -> None:
    tensors, structure = flatten(
        {"a": torch.tensor(0), "b": Leaf(torch.tensor(1), [torch.tensor(2)])}, what="it"
    )
    place = [int(tensor) for tensor in tensors].index(2)
    rebuilt = structure.with_tensor_alone(place).rebuild(["kept"])
    assert rebuilt == {"a": None, "b": Leaf(None, ["kept"])}


def test_structure_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UnsupportedModelError, match=r"the reply.*object"):
        flatten({"a": object()}, what="the reply")


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [
        (1, 1), (123456789, 123456789), (0.5, 500), (1.0, 1001), (0.0015, 1), ("1", 1), ("10B", 10),
        ("1kB", 1000), ("1KB", 1000), ("1KiB", 1024), ("800MB", 800_000_000), ("6GiB", 6 * 2**30),
        ("1.5 GiB", 3 * 2**29), ("2TB", 2 * 10**12), ("1tib", 2**40), (".5MiB", 2**19),
        ("1.MB", 10**6), ("  7 gb ", 7 * 10**9), ("0.3B", None), ("0.1kB", 100), ("1.9B", 1),
        ("3 PB", None), ("1,000", None), ("1e3", None), ("٣GB", None), ("6 GiB/s", None),
        ("nan", None), ("inf", None), (float("inf"), None), (-0.1, None), (1.0000001, None),
        (2**80, 2**80),
        # not rounded through a float: 0.7 GB and 16 digits stay what they are
        ("4.35kB", 4350), ("9007199254740993B", 9007199254740993), ("1.1MB", 1_100_000),
        ("64.1GB", 64_100_000_000),
    ],
)  # fmt: skip
def test_budget_table(budget: Any, num_bytes: int | None) -> None:
    if num_bytes is None:
        with pytest.raises(InvalidBudgetError):
            parse_budget(budget, 1001)
    else:
        assert parse_budget(budget, 1001) == num_bytes


# --- random state ---------------------------------------------------------------------------------


def test_random_state_of_a_recomputation() -> None:
    from rockmate.ops import rng as random_state

    device = torch.device("cpu")
    torch.manual_seed(7)
    state = random_state.get_random_state(device)
    first = torch.rand(5)
    present = torch.get_rng_state()
    before = random_state.exchange_random_state(device, state)
    recompute = torch.rand(5)
    random_state.exchange_random_state(device, before)
    assert torch.equal(first, recompute)
    assert torch.equal(torch.get_rng_state(), present)
    assert random_state.is_random(aten.bernoulli.p)
    assert random_state.is_random(dropout_mask)
    assert not random_state.is_random(aten.mm.default)
    assert not random_state.is_random(dropout_apply)
    seeded = ("efficient", "cudnn")
    for kernel in seeded:
        backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
        assert not random_state.is_random(backward), "it takes the seed of the forward"


def test_forms_with_a_number_are_not_offered_in_half_precision() -> None:
    @made_of(lambda: {"linear": torch.nn.Linear(8, 8)})
    class Halving(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten.mul.Scalar(self.linear(x), 0.7)

    for dtype, expected in ((torch.float32, True), (torch.bfloat16, False)):
        planner = Planner(Halving().to(dtype), torch.randn(4, 8, dtype=dtype))
        plan = planner.plan(1.0)
        names = [
            plan.graph.ops[plan.schedule.steps[position]].node.target
            for position in plan.schedule.in_place
        ]
        assert (torch.ops.aten.mul.Scalar in names) is expected
