"""The loss block in chunks.

The same loss and gradients as eager for every kind of loss, and refusals where rows mix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import torch
from chunk_cases import (
    FORMS,
    Loss,
    check_as_eager,
    chunked,
    clipped_ratio,
    distance,
    distances,
    eager,
    entropies,
    gradients,
    log_probabilities,
    make,
    sample,
    selected,
    shifted,
    sorted_scores,
    train,
    values_in_01,
)
from torch import Tensor, fx, nn
from torch.nn import functional

from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.step_options import StepOptions
from rockmate.planning.step import capture_step


def rows_of(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.view(-1, scores.shape[-1]), labels.view(-1)


def cross_entropy(**options: object) -> Loss:
    return lambda scores, labels: functional.cross_entropy(*rows_of(scores, labels), **options)  # pyright: ignore[reportArgumentType]


def class_weights(scores: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, scores.shape[-1], dtype=scores.dtype)
    return functional.cross_entropy(*rows_of(scores, labels), weight=weight)


def num_items_in_batch(scores: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face's trainer has it.

    The sum over a count that it knows of the whole accumulated batch.
    """
    return functional.cross_entropy(*rows_of(scores, labels), reduction="sum") / 37


def soft_cap(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(*rows_of(torch.tanh(scores / 30.0) * 30.0, labels))


def label_smoother(scores: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face's `LabelSmoother`: every step written out."""
    scores_of_log, labels = -functional.log_softmax(scores, dim=-1), labels.unsqueeze(-1)
    padding = labels.eq(-100)
    labels = labels.clamp(min=0)
    loss = scores_of_log.gather(dim=-1, index=labels).masked_fill(padding, 0.0)
    smooth = scores_of_log.sum(dim=-1, keepdim=True).masked_fill(padding, 0.0)
    num_active = padding.numel() - padding.long().sum()
    return 0.9 * loss.sum() / num_active + 0.1 * smooth.sum() / (num_active * scores.shape[-1])


def log_sum_exp(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy by hand, with the square of the normaliser beside it (z loss)."""
    rows, labels = rows_of(scores, labels)
    normaliser = rows.logsumexp(dim=-1)
    chosen = rows.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return (normaliser - chosen).mean() + 1e-2 * (normaliser**2).mean()


def per_token(scores: Tensor, labels: Tensor) -> Tensor:
    """Weighted token by token."""
    rows, labels = rows_of(scores, labels)
    losses = functional.cross_entropy(rows, labels, reduction="none")
    return (losses * torch.linspace(0.0, 1.0, len(labels))).sum()


def of_elements(loss: Callable[..., Tensor], **options: object) -> Loss:
    """Of each score and a number."""
    return lambda scores, labels: loss(scores, values_in_01(scores), **options)


def of_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy(torch.sigmoid(scores), values_in_01(scores))


LOSSES: Mapping[str, Loss] = {
    "squared error": of_elements(functional.mse_loss),
    "squared error, summed": of_elements(functional.mse_loss, reduction="sum"),
    "squared errors": lambda scores, labels: of_elements(functional.mse_loss, reduction="none")(
        scores, labels
    ).mean(),
    "absolute error": of_elements(functional.l1_loss),
    "smooth l1": of_elements(functional.smooth_l1_loss, beta=0.3),
    "huber, summed": of_elements(functional.huber_loss, reduction="sum", delta=0.3),
    "binary": of_elements(functional.binary_cross_entropy_with_logits),
    "binary, summed": of_elements(functional.binary_cross_entropy_with_logits, reduction="sum"),
    "binary of probabilities": of_probabilities,
    "soft margin": lambda scores, labels: functional.soft_margin_loss(
        scores, values_in_01(scores) - 0.5
    ),
    "divergence": lambda scores, labels: functional.kl_div(
        scores.log_softmax(-1), values_in_01(scores), reduction="batchmean"
    ),
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "ignored class": lambda scores, labels: cross_entropy(ignore_index=7)(
        scores, labels.clamp(min=7)
    ),
    "label smoothing": cross_entropy(label_smoothing=0.1),
    "class weights": class_weights,
    "num_items_in_batch": num_items_in_batch,
    "soft cap": soft_cap,
    "label smoother": label_smoother,
    "log_sum_exp": log_sum_exp,
    "per token": per_token,
    "shifted": shifted,
    "log probabilities": lambda scores, labels: -log_probabilities(scores, labels).mean(),
    "selected": lambda scores, labels: -selected(scores, labels).mean(),
    "entropy": lambda scores, labels: entropies(scores).mean(),
    "clipped ratio": clipped_ratio,
}
# --- the same sum ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_same_loss_and_gradients(loss: str) -> None:
    model = make(LOSSES[loss])
    step = capture_step(model, sample())
    check_as_eager(step, sample(), scale=3.0)


@pytest.mark.parametrize("options", [{"bias": True}, {"tied": True}], ids=["bias", "tied"])
def test_heads(options: dict[str, bool]) -> None:
    model = make(cross_entropy(), **options)
    step = capture_step(model, sample())
    check_as_eager(step, sample())


def test_classes_before_tokens() -> None:
    """As PyTorch has losses of images and sequences: the tokens of all samples are the rows."""
    model = make(lambda scores, labels: functional.cross_entropy(scores.transpose(1, 2), labels))
    for batch in ({name: value[:1] for name, value in sample().items()}, sample()):
        check_as_eager(capture_step(model, batch), batch)


def test_all_results_of_a_call_between_others_are_of_the_region() -> None:
    workload = models.tiny("modernbert").with_loss_inside()  # norms without a bias
    step = capture_step(workload.model, workload.sample, StepOptions(outputs="loss"))
    check_as_eager(step, workload.sample, forms=FORMS[1:])


def test_rows_do_not_divide_into_chunks_of_one_size() -> None:
    model = make(cross_entropy())
    step = capture_step(model, sample())
    graph = chunked(step, "5 recompute").graph
    heights = [
        op.node.meta["val"].shape[0]
        for op in graph.ops
        if op.node.target is torch.ops.aten._log_softmax.default
    ]
    assert heights == [4, 4, 5, 4, 5]  # 22 rows


def test_no_token_counts() -> None:
    """A batch whose targets are all ignored has no mean, in eager neither."""
    model, batch = make(cross_entropy()), sample()
    batch["labels"].fill_(-100)
    step = capture_step(model, batch)
    assert all(train(chunked(step, chunks), batch).isnan() for chunks in FORMS)


@pytest.mark.parametrize("options", [{"bias": True}, {"tied": True}], ids=["bias", "tied"])
@pytest.mark.parametrize("loss", ["mean", "soft cap", "label smoothing"])
def test_bfloat16_within_the_rounding_of_eager(loss: str, options: dict[str, bool]) -> None:
    """Against float64. Both add up in float32 and round once.

    The order may turn a rounding of one value in many thousands.
    """
    model = make(LOSSES[loss], **options)
    _, exact = eager(model.double(), sample())
    model.bfloat16()
    _, rounded = eager(model, sample())
    step = capture_step(model, sample())
    for chunks in FORMS:
        train(chunked(step, chunks), sample())
        ours, of_eager = distances(gradients(model), exact), distances(rounded, exact)
        assert all(ours[name] <= 1.01 * of_eager[name] for name in ours), (chunks, ours, of_eager)


class Watched(fx.Interpreter):
    """Runs a graph and compares the dtype of each value with that of its fake tensor."""

    def run_node(self, n: fx.Node) -> object:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            assert value.dtype == n.meta["val"].dtype, n.format_node()
        return value


@pytest.mark.parametrize(
    ("dtype", "forms"),
    [(torch.bfloat16, FORMS), (torch.float16, FORMS[:1])],
    ids=["bfloat16", "float16"],
)
@pytest.mark.parametrize("options", [{"bias": True}, {"tied": True}], ids=["bias", "tied"])
def test_written_out_under_autocast(
    options: dict[str, bool], dtype: torch.dtype, forms: tuple[str, ...]
) -> None:
    """Autocast's casts are those that were captured, and chunks have no others.

    The loss is scaled, as float16 needs it.
    """
    model = make(cross_entropy(), **options)
    _, exact = eager(model.double(), sample(), 1024.0)
    expected, rounded = eager(model.float(), sample(), 1024.0, autocast=dtype)
    with torch.autocast("cpu", dtype):
        step = capture_step(model, sample())
        steps = [chunked(step, chunks) for chunks in forms]
        at_once = step.in_chunks(Chunks.parse("3 at_once"))
    assert isinstance(at_once, Refusal) == (dtype == torch.float16)
    for chunks, step in zip(forms, steps, strict=True):
        fakes = [node.meta["val"] for node, _ in step.capture.inputs]
        Watched(step.capture.joint).run(
            *(torch.zeros(fake.shape, dtype=fake.dtype) for fake in fakes)
        )
        assert distance(train(step, sample(), 1024.0), expected) <= 1e-6, chunks
        ours, of_eager = distances(gradients(model), exact), distances(rounded, exact)
        assert all(ours[name] <= 1.01 * of_eager[name] for name in ours), (chunks, ours, of_eager)


def test_gradients_accumulate_over_steps_and_hooks_fire_once() -> None:
    model = make(cross_entropy(), tied=True)
    step = capture_step(model, sample())
    calls: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    batches = [sample(seed) for seed in (1, 2)]
    for chunks in FORMS:
        for batch in batches:
            train(chunked(step, chunks), batch)
        assert sorted(calls) == sorted(2 * [name for name, _ in model.named_parameters()])
        ours = gradients(model)
        for batch in batches:
            model(**batch)["loss"].backward()
        assert max(distances(ours, gradients(model)).values()) <= 1e-6
        calls.clear()


def test_returned_gradients() -> None:
    model = make(cross_entropy(), tied=True)
    step = capture_step(model, sample(), StepOptions(gradients="returned"))
    check_as_eager(step, sample())


# --- what stands in the way -----------------------------------------------------------------------


def contrastive(scores: Tensor, labels: Tensor) -> Tensor:
    """Every row against every other."""
    rows, labels = rows_of(scores, labels)
    return functional.cross_entropy(rows @ rows.t(), torch.arange(len(labels)))


def normalised_over_tokens(scores: Tensor, labels: Tensor) -> Tensor:
    rows, labels = rows_of(scores, labels)
    return functional.cross_entropy(rows - rows.mean(dim=0), labels)


def softmax_over_tokens(scores: Tensor, labels: Tensor) -> Tensor:
    rows, labels = rows_of(scores, labels)
    return functional.nll_loss(functional.log_softmax(rows, dim=0), labels)


def shifted_beside_all(scores: Tensor, labels: Tensor) -> Tensor:
    """The normaliser of the last token counts, and its label does not."""
    return shifted(scores, labels) + 1e-2 * scores.logsumexp(-1).square().mean()


INSEPARABLE: Mapping[str, tuple[Loss, str]] = {
    "contrastive": (contrastive, r"aten\.mm\.default .* (combines rows|has the rows)"),
    "normalised over tokens": (normalised_over_tokens, r"reads mean.*, a sum over all rows"),
    "softmax over tokens": (
        softmax_over_tokens,
        r"aten\._log_softmax\.default .* runs along the rows",
    ),
    "sorted scores": (sorted_scores, r"aten\.sort\.default .* has no rule"),
    "shifted beside all": (shifted_beside_all, r"aten\.slice\.Tensor .* runs along the rows"),
}


@pytest.mark.parametrize("loss", INSEPARABLE)
def test_refused_where_rows_mix(loss: str) -> None:
    function, says = INSEPARABLE[loss]
    found = capture_step(make(function), sample()).in_chunks(Chunks.parse("2 recompute"))
    assert isinstance(found, Refusal)
    assert re.search(says, str(found)), str(found)


def test_refused_where_the_loss_is_outside() -> None:
    layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)).train()
    step = capture_step(layers, torch.randn(32, 16))
    assert "is no scalar" in str(step.in_chunks(Chunks.parse("2 at_once")))


def test_more_chunks_than_rows() -> None:
    found = capture_step(make(cross_entropy()), sample()).in_chunks(Chunks.parse("23 recompute"))
    assert isinstance(found, Refusal)
    assert "22 rows cannot be split into 23 chunks" in str(found)


def with_gradient(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """A function that passes values on, and changes their gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return change(gradient)

    return Changed.apply


def with_scores(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """The model with a loss of scores whose gradient is changed."""
    changed = with_gradient(change)
    return make(
        lambda scores, labels: functional.cross_entropy(
            changed(rows_of(scores, labels)[0]), labels.view(-1)
        )
    )


@pytest.mark.parametrize(
    ("change", "chunks", "says"),
    [
        (lambda gradient: gradient.clamp(-1e-3, 1e-3), "2 at_once", "clamp.*not known to be lin"),
        (lambda gradient: gradient * gradient, "2 at_once", "not known to be linear"),
        (
            lambda gradient: gradient - gradient.sum(0), "2 recompute",
            "a sum over all rows, before all chunks have been added",
        ),
    ],
    ids=["not linear", "a product of two gradients", "a sum before it is complete"],
)  # fmt: skip
def test_a_backward_that_chunks_would_change_is_refused(
    change: Callable[[Tensor], Tensor], chunks: str, says: str
) -> None:
    found = capture_step(with_scores(change), sample()).in_chunks(Chunks.parse(chunks))
    assert isinstance(found, Refusal)
    assert re.search(says, str(found)), str(found)


def test_a_backward_that_is_not_linear_is_recomputed() -> None:
    model = with_scores(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    step = capture_step(model, sample())
    _, reference = eager(model, sample(), scale=3.0)
    train(chunked(step, "2 recompute"), sample(), scale=3.0)
    assert max(distances(gradients(model), reference).values()) <= 1e-6


@pytest.mark.parametrize("text", ["", "1 recompute", "x at_once", "4 both", "4"])
def test_chunks_are_read_back_or_refused(text: str) -> None:
    assert Chunks.parse("8 at_once") == Chunks(8, "at_once")
    with pytest.raises(ValueError, match="loss_chunks is"):
        Chunks.parse(text)
