"""The loss block in chunks: the same loss and gradients as eager for every kind of loss, and refusals where rows mix."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping

import architectures
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rockmate import InfeasibleBudgetError, Plan, PlanMismatchError, Planner, RockmateModule
from rockmate.allocations import timeline
from rockmate.chunking import Chunks
from rockmate.costs import measure_costs
from rockmate.delivery import owner_names
from rockmate.emit import emit
from rockmate.graph import Op, Phase
from rockmate.region import Refusal
from rockmate.runtime import Runner
from rockmate.schedule import no_recomputation
from rockmate.simulate import simulate
from rockmate.step import CapturedStep, capture_step

_WIDTH, _CLASSES, _BATCH, _TOKENS = 16, 61, 2, 11
FORMS = ("2 recompute", "5 recompute", "2 at_once", "5 at_once")
Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Words to logits by way of one hidden layer, and a loss."""

    def __init__(self, loss: Loss, *, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(_CLASSES, _WIDTH)
        self.hidden = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _CLASSES, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.loss = loss

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return {"loss": self.loss(self.head(torch.tanh(self.hidden(self.words(words)))), labels)}


def sample(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words, labels = (torch.randint(0, _CLASSES, (_BATCH, _TOKENS), generator=generator) for _ in range(2))
    labels[0, :4] = -100
    return {"words": words, "labels": labels}


def rows_of(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return scores.view(-1, scores.shape[-1]), labels.view(-1)


def cross_entropy(**options: object) -> Loss:
    return lambda scores, labels: functional.cross_entropy(*rows_of(scores, labels), **options)  # pyright: ignore[reportArgumentType]


def class_weights(scores: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, scores.shape[-1], dtype=scores.dtype)
    return functional.cross_entropy(*rows_of(scores, labels), weight=weight)


def num_items_in_batch(scores: Tensor, labels: Tensor) -> Tensor:
    """As Hugging Face's trainer has it: the sum over a count that it knows of the whole accumulated batch."""
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


LOSSES: Mapping[str, Loss] = {
    "mean": cross_entropy(),
    "sum": cross_entropy(reduction="sum"),
    "ignored class": lambda scores, labels: cross_entropy(ignore_index=7)(scores, labels.clamp(min=7)),
    "label smoothing": cross_entropy(label_smoothing=0.1),
    "class weights": class_weights,
    "num_items_in_batch": num_items_in_batch,
    "soft cap": soft_cap,
    "label smoother": label_smoother,
    "log_sum_exp": log_sum_exp,
    "per token": per_token,
}


def make(loss: Loss, **options: bool) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(loss, **options).train()


def chunked(step: CapturedStep, chunks: str) -> CapturedStep:
    found = step.in_chunks(Chunks.parse(chunks))
    assert not isinstance(found, Refusal), str(found)
    return found


def train(step: CapturedStep, batch: Mapping[str, Tensor], scale: float = 1.0) -> Tensor:
    """One step of the captured graph, nothing recomputed; gives the loss."""
    program = emit(step.graph, no_recomputation(step.graph), owner_names(step.model))
    outputs = Runner(program, step.model).run([batch[name] for name in sorted(batch)], hooks_last=False)
    (outputs[0] * scale).backward()
    return outputs[0].detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def eager(model: nn.Module, batch: Mapping[str, Tensor], scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch)["loss"]
    (loss * scale).backward()
    return loss.detach(), gradients(model)


def distance(ours: Tensor, reference: Tensor) -> float:
    """Relative, by norm."""
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def distances(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == reference.keys()
    return {name: distance(gradient, reference[name]) for name, gradient in ours.items()}


# --- the same sum --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_same_loss_and_gradients(loss: str) -> None:
    model = make(LOSSES[loss])
    step = capture_step(model, sample())
    expected, reference = eager(model, sample(), scale=3.0)
    for chunks in FORMS:
        found = train(chunked(step, chunks), sample(), scale=3.0)
        assert distance(found, expected) <= 1e-6
        assert max(distances(gradients(model), reference).values()) <= 1e-6, chunks


@pytest.mark.parametrize("options", [{"bias": True}, {"tied": True}], ids=["bias", "tied"])
def test_heads(options: dict[str, bool]) -> None:
    model = make(cross_entropy(), **options)
    step = capture_step(model, sample())
    _, reference = eager(model, sample())
    for chunks in FORMS:
        train(chunked(step, chunks), sample())
        assert max(distances(gradients(model), reference).values()) <= 1e-6, chunks


def test_rows_do_not_divide_into_chunks_of_one_size() -> None:
    model = make(cross_entropy())
    step = capture_step(model, sample())
    graph = chunked(step, "5 recompute").graph
    heights = [op.node.meta["val"].shape[0] for op in graph.ops if op.node.target is torch.ops.aten._log_softmax.default]
    assert heights == [4, 4, 5, 4, 5]  # 22 rows


def test_no_token_counts() -> None:
    """A batch whose targets are all ignored has no mean, in eager neither."""
    model, batch = make(cross_entropy()), sample()
    batch["labels"].fill_(-100)
    step = capture_step(model, batch)
    assert all(train(chunked(step, chunks), batch).isnan() for chunks in FORMS)


@pytest.mark.parametrize("loss", ["mean", "soft cap", "label smoothing"])
def test_bfloat16_within_the_rounding_of_eager(loss: str) -> None:
    model = make(LOSSES[loss])
    _, exact = eager(model.double(), sample())
    model.bfloat16()
    _, rounded = eager(model, sample())
    step = capture_step(model, sample())
    for chunks in FORMS:
        train(chunked(step, chunks), sample())
        ours, of_eager = distances(gradients(model), exact), distances(rounded, exact)
        assert all(ours[name] <= 1.5 * of_eager[name] for name in ours), (chunks, ours, of_eager)


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
    step = capture_step(model, sample(), gradients="returned")
    _, reference = eager(model, sample())
    for chunks in FORMS:
        train(chunked(step, chunks), sample())
        assert max(distances(gradients(model), reference).values()) <= 1e-6


# --- what stands in the way ----------------------------------------------------------------------------


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


def squared_error(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.mse_loss(scores, torch.zeros_like(scores))


def shifted(scores: Tensor, labels: Tensor) -> Tensor:
    """The last token's logits are left out: tokens of two samples are no longer side by side."""
    return functional.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), labels[:, 1:].reshape(-1))


INSEPARABLE: Mapping[str, tuple[Loss, str]] = {
    "contrastive": (contrastive, r"aten\.mm\.default .* (combines rows|takes rows)"),
    "normalised over tokens": (normalised_over_tokens, r"reads mean.*, a sum over all rows"),
    "softmax over tokens": (softmax_over_tokens, r"aten\._log_softmax\.default .* runs along the rows"),
    "squared error": (squared_error, r"aten\.mse_loss\.default .* has no rule"),
    "shifted": (shifted, r"aten\.slice\.Tensor .* runs along the rows"),
}


@pytest.mark.parametrize("loss", INSEPARABLE)
def test_refused_where_rows_mix(loss: str) -> None:
    function, says = INSEPARABLE[loss]
    found = capture_step(make(function), sample()).in_chunks(Chunks.parse("2 recompute"))
    assert isinstance(found, Refusal)
    assert re.search(says, str(found)), str(found)


def test_more_chunks_than_rows() -> None:
    found = capture_step(make(cross_entropy()), sample()).in_chunks(Chunks.parse("23 recompute"))
    assert isinstance(found, Refusal)
    assert "22 rows cannot be 23 chunks" in str(found)


class Clipped(torch.autograd.Function):
    """Passes values on, and clips their gradient."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


def test_a_backward_that_is_not_linear_is_not_taken_in_the_forward() -> None:
    model = make(lambda scores, labels: functional.cross_entropy(*rows_of(Clipped.apply(scores), labels)))  # pyright: ignore
    step = capture_step(model, sample())
    found = step.in_chunks(Chunks.parse("2 at_once"))
    assert isinstance(found, Refusal)
    assert "clamp" in str(found)
    assert "not known to be linear" in str(found)
    _, reference = eager(model, sample(), scale=3.0)
    train(chunked(step, "2 recompute"), sample(), scale=3.0)
    assert max(distances(gradients(model), reference).values()) <= 1e-6


class Centred(torch.autograd.Function):
    """Passes values on, and subtracts from their gradient what all of it adds up to."""

    @staticmethod
    def forward(ctx: object, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient - gradient.sum(0)


def test_a_sum_of_the_backward_is_not_read_before_it_is_complete() -> None:
    model = make(lambda scores, labels: functional.cross_entropy(Centred.apply(rows_of(scores, labels)[0]), labels.view(-1)))  # pyright: ignore
    found = capture_step(model, sample()).in_chunks(Chunks.parse("2 recompute"))
    assert isinstance(found, Refusal)
    assert "a sum over all rows, where only a part of them is known" in str(found)


@pytest.mark.parametrize("text", ["", "1 recompute", "x at_once", "4 both", "4"])
def test_chunks_are_read_back_or_refused(text: str) -> None:
    assert Chunks.parse("8 at_once") == Chunks(8, "at_once")
    with pytest.raises(ValueError, match="loss_chunks is"):
        Chunks.parse(text)


# --- models --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "mistral", "opt", "bert", "t5", "whisper"])
def test_loss_blocks_of_architectures(name: str) -> None:
    batch = architectures.ARCHITECTURES[name].make_batch(0)
    step = capture_step(architectures.make(name), batch, outputs="loss")
    for chunks in ("3 recompute", "3 at_once"):
        graph = chunked(step, chunks).graph
        rows = [op for op in graph.ops if op.node.target is torch.ops.aten._log_softmax.default]
        assert len(rows) == Chunks.parse(chunks).number


# --- feed-forward blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_feed_forward_blocks(name: str) -> None:
    """Dropout and all: the masks are drawn as a whole, in eager's order."""
    model, batch = architectures.make(name), architectures.ARCHITECTURES[name].make_batch(0)
    step = capture_step(model, batch, outputs="loss")
    inner = {op.node.meta["val"].shape[0] for op in chunked(step, "1 recompute, 3 in layers").graph.ops if _widens(op)}
    assert inner == {8}  # of 2 x 12 rows
    torch.manual_seed(3)
    expected, reference = eager(model, batch, scale=3.0)
    for chunks in ("1 recompute, 3 in layers", "2 at_once, 5 in layers"):
        torch.manual_seed(3)
        assert distance(train(chunked(step, chunks), batch, scale=3.0), expected) <= 1e-6
        ours = gradients(model)  # side by side, since that of a key's bias is zero but for rounding
        assert distance(*(torch.cat([found[name].flatten() for name in reference]) for found in (ours, reference))) <= 1e-6, chunks


def _widens(op: Op) -> bool:
    """Whether it is the first product of a feed-forward block."""
    if op.phase is not Phase.FORWARD or op.node.target not in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return False
    inner, outer = op.node.args[-1].meta["val"].shape  # pyright: ignore
    return inner < outer and re.search(r"mlp|intermediate", op.module) is not None


# --- plans ---------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Words straight to many logits: nearly all of the step is its loss block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 64)
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, words: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return {"loss": functional.cross_entropy(self.head(torch.tanh(self.words(words))).flatten(0, 1), labels.flatten())}


@functools.cache
def wide() -> tuple[Wide, dict[str, Tensor], Planner]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = torch.randint(0, 4096, (2, 128))
        model = Wide().train()
    batch = {"words": words, "labels": words.flip(0)}
    return model, batch, Planner(model, batch)


def test_chunks_only_for_budgets_that_nothing_else_meets() -> None:
    _, _, planner = wide()
    assert "loss_chunks" not in planner.plan(planner.minimum_peak_bytes).options
    below = planner.plan(planner.minimum_peak_bytes // 3)
    assert "loss_chunks" in below.options
    assert below.predicted_peak_bytes <= planner.minimum_peak_bytes // 3
    assert re.search(r"loss block +in \d+ chunks of its rows; .* \(head\)", below.summary())
    assert "loss block: in" in str(below.explain("head"))
    assert "not in chunks: it can be" in str(planner.plan(1.0).explain("head"))


@pytest.mark.parametrize("share", [0.35, 0.2])
def test_measured_peak_is_the_predicted_one(share: float) -> None:
    model, batch, planner = wide()
    module = planner.module(int(share * planner.minimum_peak_bytes))

    def step() -> None:
        module(**batch)["loss"].backward()

    step()
    ours = gradients(model)
    _, reference = eager(model, batch)
    assert max(distances(ours, reference).values()) <= 1e-6
    step()
    model.zero_grad(set_to_none=False)
    assert timeline(step).peak_bytes == pytest.approx(module.plan.predicted_peak_bytes, rel=0.02)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("chunks", ["4 recompute", "4 at_once"])
def test_measured_peak_with_nothing_recomputed(chunks: str) -> None:
    model, batch, _ = wide()
    step = chunked(capture_step(model, batch), chunks)
    schedule = no_recomputation(step.graph)
    program = emit(step.graph, schedule, owner_names(model))
    runner = Runner(program, model)

    def run() -> None:
        runner.run([batch[name] for name in sorted(batch)], hooks_last=False)[0].backward()

    run()
    model.zero_grad(set_to_none=False)
    predicted = simulate(step.graph, schedule, measure_costs(step.graph)).peak_bytes
    assert timeline(run).peak_bytes == pytest.approx(predicted, rel=0.02)
    model.zero_grad(set_to_none=True)


def test_below_the_smallest_chunks() -> None:
    _, _, planner = wide()
    with pytest.raises(InfeasibleBudgetError) as caught:
        planner.plan(1000)
    assert caught.value.minimum_bytes < planner.minimum_peak_bytes // 4
    assert planner.plan(caught.value.minimum_bytes).predicted_peak_bytes == caught.value.minimum_bytes
    with pytest.raises(InfeasibleBudgetError):
        planner.plan(caught.value.minimum_bytes - 1)


def test_plans_in_chunks_are_files_like_others() -> None:
    model, batch, planner = wide()
    plan = planner.plan(planner.minimum_peak_bytes // 3)
    loaded = Plan.from_text(plan.to_text())
    assert loaded.summary() == plan.summary()
    module = RockmateModule(model, batch, plan=loaded)
    module(**batch)["loss"].backward()
    ours = gradients(model)
    planner.module(plan.budget_bytes)(**batch)["loss"].backward()
    assert all(torch.equal(ours[name], gradient) for name, gradient in gradients(model).items())


def test_a_plan_in_chunks_for_a_loss_that_has_none() -> None:
    _, batch, planner = wide()
    plan = planner.plan(planner.minimum_peak_bytes // 3)
    with pytest.raises(PlanMismatchError, match=r"in chunks .* cannot be: .*mse_loss.* has no rule.*Plan again"):
        RockmateModule(make(squared_error), batch | {"words": batch["words"] % _CLASSES}, plan=plan)


def test_not_allowed() -> None:
    model, batch, planner = wide()
    strict = Planner(model, batch, allow_chunking=False)
    with pytest.raises(InfeasibleBudgetError):
        strict.plan(planner.minimum_peak_bytes // 3)
    assert "allow_chunking=False" in str(strict.plan(1.0).explain("head"))


def test_allowed_wherever_they_are_faster() -> None:
    model, batch, planner = wide()
    free = Planner(model, batch, allow_chunking=True)
    assert free.minimum_peak_bytes < planner.minimum_peak_bytes // 4
    points = free.frontier()
    assert points[0].budget_bytes == free.minimum_peak_bytes
    assert free.plan(planner.minimum_peak_bytes).predicted_ms <= free.baseline_ms * 2


def test_the_reason_is_told() -> None:
    plan = Planner(make(squared_error), sample()).plan(1.0)
    assert "loss block: not in chunks: aten.mse_loss.default" in str(plan.explain("head"))
    assert "loss block" not in str(plan.explain("words"))
