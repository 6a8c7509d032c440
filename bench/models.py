"""The workloads that are measured: a model, its batches, its loss and its layers, by name.

Every model is built from written-out configuration values with fixed seeds, so that nothing is fetched and
two runs train the same numbers. Models are in train mode with the dropout of their configuration's default
(0.1 in GPT-2, BERT, T5 and the plain encoder; the other architectures have none by default), and keep no
key-value cache. Token batches carry no padding mask. A vocabulary is the published model's or, in the models
made small for a CPU, 8192. At full size a step takes roughly half a second to four on one CPU thread;
`tiny` variants take milliseconds and are meant for tests. A number at the end of a name counts layers.
`-2layer` models are small enough for a solver that sees the whole graph; their vocabulary of 512 leaves most
of the memory to the layers. `-gpu` models are meant for a GPU: a step in eager keeps 24 GiB or more of activations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from bench.branched_models import BUILDERS, BranchedModel, modules_at
from bench.unet import UNet

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Callable[..., Any], Batch], tuple[Any, Tensor]]

TARGET = "target"
"""Name of the batch entry that the loss outside the model reads and the model itself never sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with all that a training step of it needs.

    Attributes:
        name: The registry name.
        model: The module, in train mode.
        layers: `layers(model)` gives the modules that "one checkpoint a layer" wraps.
        stages: likewise the larger modules, each of several layers, that one would checkpoint instead; None where there are none.
        loss: `loss(model, batch)` gives (outputs, loss). The caller holds on to the outputs until the
            backward is over, as a training loop does, so that their bytes count alike for every peer.
        make_batch: `make_batch(seed)` gives a batch; equal seeds give equal values, all seeds equal shapes.
    """

    name: str
    model: nn.Module
    layers: Callable[[nn.Module], list[nn.Module]]
    loss: LossFunction
    make_batch: Callable[[int], Batch]
    stages: Callable[[nn.Module], list[nn.Module]] | None = None

    @property
    def sample(self) -> dict[str, Tensor]:
        """The keyword arguments of one call of the model (a target for an outside loss is not among them)."""
        return _model_inputs(self.make_batch(0))

    def with_loss_inside(self) -> Workload:
        """The same step with the loss computed by the module, where every method sees it; itself if it is so already."""
        if self.loss is _own_loss:
            return self
        return replace(
            self,
            model=LossInside(self.model, self.loss).train(),
            layers=lambda model: self.layers(model.model),  # pyright: ignore
            stages=self.stages and (lambda model: self.stages(model.model)),  # pyright: ignore
            loss=_first_loss,
            make_batch=lambda seed: _labelled(self.make_batch(seed)),
        )


def build(
    name: str, *, tiny: bool = False, device: str | torch.device = "cpu", seed: int = 0
) -> Workload:
    """The workload of that name, its weights drawn from `seed`; the global random state is left alone."""
    if name not in REGISTRY:
        raise ValueError(f"unknown model {name!r}; known: {', '.join(sorted(REGISTRY))}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return REGISTRY[name](name, tiny, torch.device(device))


def _prepared(model: nn.Module, device: torch.device) -> nn.Module:
    return model.to(device).train()


# --- losses -------------------------------------------------------------------------------------------


def _model_inputs(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != TARGET}


def _own_loss(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    outputs = model(**batch)
    return outputs, outputs.loss


def _outside_cross_entropy(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    outputs = model(**_model_inputs(batch))
    return outputs, functional.cross_entropy(outputs, batch[TARGET])


def _outside_squared_error(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    outputs = model(**_model_inputs(batch))
    return outputs, functional.mse_loss(outputs, batch[TARGET])


class LossInside(nn.Module):
    """A model whose loss is the caller's, with that loss computed inside."""

    def __init__(self, model: nn.Module, loss: LossFunction) -> None:
        """`loss` as in `Workload`."""
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, labels: Tensor, **inputs: Tensor) -> tuple[Tensor, Any]:
        """The loss, then the model's outputs."""
        outputs, loss = self.loss(self.model, {**inputs, TARGET: labels})
        return loss, outputs


def _labelled(batch: Batch) -> Batch:
    return {"labels" if name == TARGET else name: value for name, value in batch.items()}


def _first_loss(model: Callable[..., Any], batch: Batch) -> tuple[Any, Tensor]:
    loss, outputs = model(**batch)
    return outputs, loss


# --- batches ------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    # An offset keeps batch 0 from repeating the draws that initialized the weights.
    return torch.Generator().manual_seed(1_000_003 + seed)


def _causal_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    tokens = torch.randint(3, vocabulary, shape, generator=_generator(seed)).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _classified_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    tokens = torch.randint(1, vocabulary, shape, generator=_generator(seed))
    labels = torch.randint(0, 4, shape[:1], generator=_generator(seed + 1))
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def _masked_tokens(
    seed: int, *, shape: tuple[int, int], vocabulary: int, device: torch.device
) -> Batch:
    generator = _generator(seed)
    tokens = torch.randint(3, vocabulary, shape, generator=generator)
    hidden = torch.rand(shape, generator=generator) < 0.15
    labels = tokens.masked_fill(~hidden, -100)
    return {"input_ids": tokens.masked_fill(hidden, 2).to(device), "labels": labels.to(device)}


def _translation_tokens(
    seed: int,
    *,
    shape: tuple[int, int],
    labels_shape: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> Batch:
    generator = _generator(seed)
    tokens = torch.randint(3, vocabulary, shape, generator=generator)
    labels = torch.randint(3, vocabulary, labels_shape, generator=generator)
    return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def _images(
    seed: int,
    *,
    batch: int,
    pixels: int,
    classes: int,
    names: tuple[str, str],
    device: torch.device,
) -> Batch:
    generator = _generator(seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    classes_wanted = torch.randint(0, classes, (batch,), generator=generator)
    return {names[0]: images.to(device), names[1]: classes_wanted.to(device)}


def _segmented_images(
    seed: int, *, batch: int, pixels: int, classes: int, device: torch.device
) -> Batch:
    generator = _generator(seed)
    images = torch.randn(batch, 3, pixels, pixels, generator=generator)
    classes_wanted = torch.randint(0, classes, (batch, pixels, pixels), generator=generator)
    return {"x": images.to(device), TARGET: classes_wanted.to(device)}


def _vectors(
    seed: int,
    *,
    shape: tuple[int, ...],
    name: str,
    target_shape: tuple[int, ...],
    device: torch.device,
) -> Batch:
    generator = _generator(seed)
    vectors = torch.randn(shape, generator=generator)
    target = torch.randn(target_shape, generator=generator)
    return {name: vectors.to(device), TARGET: target.to(device)}


# --- language models ----------------------------------------------------------------------------------


def _causal_workload(
    name: str,
    model: nn.Module,
    layers: Callable[[Any], Any],
    shape: tuple[int, int],
    vocabulary: int,
    device: torch.device,
) -> Workload:
    return Workload(
        name=name,
        model=_prepared(model, device),
        layers=lambda module: list(layers(module)),
        loss=_own_loss,
        make_batch=partial(_causal_tokens, shape=shape, vocabulary=vocabulary, device=device),
    )


def _gpt2(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    shape: tuple[int, int],
) -> Workload:
    if tiny:
        num_layers, width, heads, vocabulary, shape = min(num_layers, 3), 32, 2, 97, (2, 16)
    config = transformers.GPT2Config(
        n_layer=num_layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=max(shape[1], 64),
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    # What the library falls back to, with a warning, since this class name tells it nothing.
    model.loss_type = "ForCausalLM"
    return _causal_workload(
        name,
        model,
        lambda model: model.transformer.h,
        shape,
        vocabulary,
        device,
    )


def _rotary(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    kind: str,
    num_layers: int,
    width: int,
    heads: int,
    key_value_heads: int,
    inner: int,
    vocabulary: int = 8192,
    experts: int = 0,
    shape: tuple[int, int] = (2, 256),
    adapter_rank: int = 0,
) -> Workload:
    """A decoder with rotary positions, RMS norms and a gated MLP; `kind` is the library's prefix of its classes.

    With `experts` each MLP is that many of width `inner`, of which every token takes two. With `adapter_rank` the model is frozen and
    low-rank adapters on all its linear layers are trained instead (LoRA, Hu et al., 2021).
    """
    if tiny:
        num_layers, width, heads, key_value_heads, inner = (
            2,
            32,
            2 * heads // key_value_heads,
            2,
            48,
        )
        experts, vocabulary, shape = min(experts, 4), 97, (2, 16)
    mixture = (
        {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner}
        if experts
        else {}
    )
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=width // heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=max(shape[1], 64),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
        **mixture,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    decoder = model.model  # by itself, since adapters move it
    if adapter_rank:
        model = _adapted(model, adapter_rank)
    return _causal_workload(name, model, lambda _: decoder.layers, shape, vocabulary, device)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    """The model frozen, with adapters of that rank beside each linear layer but the last."""
    try:
        import peft
    except ImportError as error:
        msg = "LoRA models need the package peft: pip install peft"
        raise RuntimeError(msg) from error
    # Adapters that begin at zero would leave half of the gradients zero in the first step.
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )  # which peft still asks for
        return peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def _bert(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    head: Literal["classification", "masked"],
    num_layers: int,
    width: int,
    heads: int,
    vocabulary: int,
    shape: tuple[int, int],
) -> Workload:
    """BERT that classifies the sequence, or finds the seventh of its tokens that is hidden."""
    if tiny:
        num_layers, width, heads, vocabulary, shape = 2, 32, 2, 97, (2, 16)
    config = transformers.BertConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        num_labels=4,  # pyright: ignore
        pad_token_id=0,
        use_cache=False,
    )
    model_type, tokens = {
        "classification": (transformers.BertForSequenceClassification, _classified_tokens),
        "masked": (transformers.BertForMaskedLM, _masked_tokens),
    }[head]
    return Workload(
        name=name,
        model=_prepared(model_type(config), device),
        layers=lambda model: list(model.bert.encoder.layer),  # pyright: ignore
        loss=_own_loss,
        make_batch=partial(tokens, shape=shape, vocabulary=vocabulary, device=device),
    )


def _modernbert(name: str, tiny: bool, device: torch.device) -> Workload:
    """ModernBERT that finds hidden tokens; two layers of three attend to a window of 64 tokens, the third to all."""
    num_layers, width, heads, inner, vocabulary, shape, window = 12, 384, 6, 576, 8192, (2, 256), 64
    if tiny:
        num_layers, width, heads, inner, vocabulary, shape, window = 3, 32, 2, 48, 97, (2, 16), 8
    config = transformers.ModernBertConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=max(shape[1], 64),
        local_attention=window,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return Workload(
        name=name,
        model=_prepared(transformers.ModernBertForMaskedLM(config), device),
        layers=lambda model: list(model.model.layers),  # pyright: ignore
        loss=_own_loss,
        make_batch=partial(_masked_tokens, shape=shape, vocabulary=vocabulary, device=device),
    )


def _t5(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    inner: int,
    shape: tuple[int, int],
    labels_shape: tuple[int, int],
) -> Workload:
    head_width, vocabulary = 64, 32128
    if tiny:
        num_layers, width, head_width, heads, inner, vocabulary = 2, 32, 16, 2, 64, 97
        shape, labels_shape = (2, 16), (2, 8)
    config = transformers.T5Config(
        num_layers=num_layers,
        num_decoder_layers=num_layers,
        d_model=width,
        d_kv=head_width,
        d_ff=inner,
        num_heads=heads,
        vocab_size=vocabulary,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.1,
        feed_forward_proj="relu",
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
        pad_token_id=0,
        eos_token_id=1,
        use_cache=False,
    )
    return Workload(
        name=name,
        model=_prepared(transformers.T5ForConditionalGeneration(config), device),
        layers=lambda model: [*model.encoder.block, *model.decoder.block],  # pyright: ignore
        loss=_own_loss,
        make_batch=partial(
            _translation_tokens,
            shape=shape,
            labels_shape=labels_shape,
            vocabulary=vocabulary,
            device=device,
        ),
    )


# --- image models -------------------------------------------------------------------------------------


def _image_workload(
    name: str,
    model: nn.Module,
    layers: Callable[[Any], list[nn.Module]],
    device: torch.device,
    *,
    batch: int,
    pixels: int,
    classes: int,
) -> Workload:
    """A classifier of the library's kind, which computes the loss itself."""
    names = ("pixel_values", "labels")
    return Workload(
        name=name,
        model=_prepared(model, device),
        layers=layers,
        loss=_own_loss,
        make_batch=partial(
            _images, batch=batch, pixels=pixels, classes=classes, names=names, device=device
        ),
    )


def _vit(name: str, tiny: bool, device: torch.device, *, width: int, heads: int) -> Workload:
    num_layers, inner, batch, pixels, patch, classes = 12, 4 * width, 4, 224, 16, 1000
    if tiny:
        num_layers, width, heads, inner, batch, pixels, patch, classes = 2, 32, 2, 64, 2, 32, 8, 10
    config = transformers.ViTConfig(
        num_hidden_layers=num_layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=inner,
        image_size=pixels,
        patch_size=patch,
        num_labels=classes,  # pyright: ignore[reportCallIssue]
        problem_type="single_label_classification",
    )
    model = transformers.ViTForImageClassification(config)
    return _image_workload(
        name, model, _vit_layers, device, batch=batch, pixels=pixels, classes=classes
    )


def _vit_layers(model: nn.Module) -> list[nn.Module]:
    # By class, because the attribute that holds the layers moved between releases of the library.
    return [module for module in model.modules() if type(module).__name__ == "ViTLayer"]


def _staged(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    kind: str,
    widths: list[int],
    depths: list[int],
    batch: int = 8,
    pixels: int = 192,
    classes: int = 100,
    small: Mapping[str, Any],
    **configuration: Any,
) -> Workload:
    """A convolutional classifier in stages; `kind` is the library's prefix of its classes, `small` what the tiny variant has instead."""
    if tiny:
        widths, batch, pixels, classes = [16, 32], 2, 32, 10
        configuration |= small
        depths = configuration.pop("depths")
    config = getattr(transformers, f"{kind}Config")(
        hidden_sizes=widths,
        depths=depths,
        num_labels=classes,
        problem_type="single_label_classification",
        **configuration,
    )
    model = getattr(transformers, f"{kind}ForImageClassification")(config)
    layers = partial(_stage_layers, encoder=f"{kind.lower()}.encoder")
    return _image_workload(name, model, layers, device, batch=batch, pixels=pixels, classes=classes)


def _stage_layers(model: nn.Module, *, encoder: str) -> list[nn.Module]:
    stages: Any = model.get_submodule(encoder).stages
    return [layer for stage in stages for layer in stage.layers]


class Bottleneck(nn.Module):
    """The residual block of ResNet-50: 1x1, 3x3 (which strides), 1x1, with in-place ReLU and addition."""

    expansion = 4

    def __init__(self, in_width: int, inner: int, stride: int) -> None:
        """Widths in channels; a block that changes width or size projects its shortcut."""
        super().__init__()
        out_width = inner * self.expansion
        self.conv1 = nn.Conv2d(in_width, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, out_width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_width != out_width:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_width, out_width, 1, stride, bias=False), nn.BatchNorm2d(out_width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, (batch, 4 * inner, height / stride, width / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet of bottlenecks (He et al., 2015), laid out like torchvision's; the loss is the caller's."""

    def __init__(self, *, depths: tuple[int, ...], base_width: int, classes: int) -> None:
        """`depths` is the number of bottlenecks a stage; each stage doubles the inner width."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, base_width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(base_width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        in_width = base_width
        for stage, depth in enumerate(depths):
            inner = base_width * 2**stage
            for index in range(depth):
                blocks.append(Bottleneck(in_width, inner, 2 if stage and not index else 1))
                in_width = inner * Bottleneck.expansion
        self.blocks = nn.ModuleList(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for block in self.blocks:
            x = block(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _resnet(
    name: str, tiny: bool, device: torch.device, *, depths: tuple[int, ...], batch: int, pixels: int
) -> Workload:
    base_width, classes = 64, 1000
    if tiny:
        depths, base_width, classes, batch, pixels = (1, 2), 8, 10, 2, 32
    return Workload(
        name=name,
        model=_prepared(ResNet(depths=depths, base_width=base_width, classes=classes), device),
        layers=lambda model: list(model.blocks),  # pyright: ignore
        loss=_outside_cross_entropy,
        make_batch=partial(
            _images, batch=batch, pixels=pixels, classes=classes, names=("x", TARGET), device=device
        ),
    )


def _unet(
    name: str, tiny: bool, device: torch.device, *, base_width: int, batch: int, pixels: int
) -> Workload:
    """U-Net of four levels that assigns each pixel one of eight classes."""
    num_levels, classes = 4, 8
    if tiny:
        num_levels, base_width, batch, pixels = 2, 4, 2, 16
    return Workload(
        name=name,
        model=_prepared(
            UNet(num_levels=num_levels, base_width=base_width, classes=classes), device
        ),
        layers=lambda model: [*model.down, *model.up],  # pyright: ignore
        loss=_outside_cross_entropy,
        make_batch=partial(
            _segmented_images, batch=batch, pixels=pixels, classes=classes, device=device
        ),
    )


# --- plain torch --------------------------------------------------------------------------------------


class MLP(nn.Module):
    """A chain of equal layers, Linear then GELU: the simplest thing that has something to recompute."""

    def __init__(self, num_layers: int, width: int) -> None:
        """All layers keep the width."""
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's output, of the input's shape."""
        for layer in self.layers:
            x = layer(x)
        return x


def _mlp(name: str, tiny: bool, device: torch.device) -> Workload:
    num_layers, width, rows = (4, 32, 256) if tiny else (24, 768, 1024)
    shape = (rows, width)
    return Workload(
        name=name,
        model=_prepared(MLP(num_layers, width), device),
        layers=lambda model: list(model.layers),  # pyright: ignore
        loss=_outside_squared_error,
        make_batch=partial(_vectors, shape=shape, name="x", target_shape=shape, device=device),
    )


def _encoder(
    name: str,
    tiny: bool,
    device: torch.device,
    *,
    num_layers: int,
    width: int,
    heads: int,
    shape: tuple[int, int],
) -> Workload:
    inner = 4 * width
    if tiny:
        num_layers, width, heads, inner, shape = 2, 32, 2, 64, (2, 16)
    layer = nn.TransformerEncoderLayer(width, heads, inner, batch_first=True)
    # Nested tensors serve inference only, and the default warns where they cannot be used.
    model = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    full_shape = (*shape, width)
    return Workload(
        name=name,
        model=_prepared(model, device),
        layers=lambda module: list(module.layers),  # pyright: ignore
        loss=_outside_squared_error,
        make_batch=partial(
            _vectors, shape=full_shape, name="src", target_shape=full_shape, device=device
        ),
    )


# --- models that are no chain -------------------------------------------------------------------------


def _branched(
    name: str, tiny: bool, device: torch.device, *, build: Callable[[bool], BranchedModel]
) -> Workload:
    found = build(tiny)
    make_batch = found.make_batch
    return Workload(
        name=name,
        model=_prepared(found.model, device),
        layers=partial(modules_at, patterns=found.blocks),
        loss=_own_loss,
        make_batch=lambda seed: {
            key: value.to(device) for key, value in make_batch(_generator(seed)).items()
        },
        stages=partial(modules_at, patterns=found.stages) if found.stages else None,
    )


_small_gpt2 = partial(_gpt2, width=256, heads=4, vocabulary=8192)
_small_bert = partial(_bert, width=384, heads=6, shape=(2, 256))
_llama = partial(_rotary, kind="Llama", width=384, heads=6, key_value_heads=6, inner=1024)
_large_llama = partial(
    _rotary,
    kind="Llama",
    num_layers=16,
    width=2048,
    heads=32,
    key_value_heads=8,
    inner=5632,
    vocabulary=32000,
)

REGISTRY: dict[str, Callable[[str, bool, torch.device], Workload]] = {
    "gpt2": partial(_gpt2, num_layers=12, width=768, heads=12, vocabulary=50257, shape=(2, 256)),
    "gpt2-vocabulary": partial(
        _gpt2, num_layers=12, width=768, heads=12, vocabulary=50257, shape=(1, 256)
    ),
    "gpt2-deep": partial(_small_gpt2, num_layers=24, shape=(2, 192)),
    "gpt2-2layer": partial(_small_gpt2, num_layers=2, vocabulary=512, shape=(2, 192)),
    "gpt2-12": partial(_small_gpt2, num_layers=12, shape=(2, 96)),
    "gpt2-48": partial(_small_gpt2, num_layers=48, shape=(2, 96)),
    "gpt2-96": partial(_small_gpt2, num_layers=96, shape=(2, 96)),
    "bert-base": partial(
        _bert,
        head="classification",
        num_layers=12,
        width=768,
        heads=12,
        vocabulary=30522,
        shape=(4, 256),
    ),
    "bert-mlm": partial(
        _bert, head="masked", num_layers=12, width=768, heads=12, vocabulary=30522, shape=(4, 256)
    ),
    "bert-narrow": partial(_small_bert, head="classification", num_layers=12, vocabulary=8192),
    "bert-2layer": partial(_small_bert, head="masked", num_layers=2, vocabulary=512),
    "modernbert": _modernbert,
    "llama": partial(_llama, num_layers=8),
    "llama-2layer": partial(_llama, num_layers=2, vocabulary=512),
    # Llama 3's vocabulary on a model small enough for a CPU: its loss block takes most of the time and memory.
    "llama-vocabulary": partial(
        _rotary,
        kind="Llama",
        num_layers=4,
        width=512,
        heads=8,
        key_value_heads=8,
        inner=1408,
        vocabulary=128256,
        shape=(1, 1024),
    ),
    "llama-lora": partial(_llama, num_layers=8, adapter_rank=8),
    # Grouped queries are what sets it apart from the Llama type.
    "qwen3": partial(
        _rotary, kind="Qwen3", num_layers=8, width=320, heads=8, key_value_heads=4, inner=896
    ),
    "qwen3-moe": partial(
        _rotary,
        kind="Qwen3Moe",
        num_layers=6,
        width=256,
        heads=8,
        key_value_heads=4,
        inner=384,
        experts=8,
    ),
    "t5-small": partial(
        _t5, num_layers=6, width=512, heads=8, inner=2048, shape=(2, 256), labels_shape=(2, 128)
    ),
    "vit-base": partial(_vit, width=768, heads=12),
    "vit-small": partial(_vit, width=384, heads=6),
    "resnet50": partial(_resnet, depths=(3, 4, 6, 3), batch=5, pixels=160),
    "resnet101": partial(_resnet, depths=(3, 4, 23, 3), batch=3, pixels=128),
    "unet": partial(_unet, base_width=32, batch=2, pixels=128),
    "hf-resnet": partial(
        _staged,
        kind="ResNet",
        widths=[128, 256, 512, 1024],
        depths=[2, 2, 3, 2],
        embedding_size=64,
        layer_type="bottleneck",
        small={"depths": [2, 2], "embedding_size": 8},
    ),
    # RegNetY-800MF: grouped convolutions, each residual layer with squeeze and excitation.
    "regnet": partial(
        _staged,
        kind="RegNet",
        widths=[64, 128, 320, 768],
        depths=[1, 3, 8, 2],
        embedding_size=32,
        groups_width=16,
        layer_type="y",
        small={"depths": [1, 2], "embedding_size": 8, "groups_width": 8},
    ),
    # ConvNeXt-T
    "convnext": partial(
        _staged,
        kind="ConvNext",
        widths=[96, 192, 384, 768],
        depths=[3, 3, 9, 3],
        batch=4,
        pixels=160,
        image_size=160,
        num_stages=4,
        small={"depths": [1, 2], "image_size": 32, "num_stages": 2},
    ),
    "mlp": _mlp,
    "encoder": partial(_encoder, num_layers=8, width=512, heads=8, shape=(4, 192)),
    "encoder-deep": partial(_encoder, num_layers=32, width=128, heads=4, shape=(2, 192)),
    "encoder-wide": partial(_encoder, num_layers=2, width=1024, heads=16, shape=(2, 192)),
    "gpt2-gpu": partial(
        _gpt2, num_layers=24, width=1024, heads=16, vocabulary=50257, shape=(8, 1024)
    ),
    "bert-gpu": partial(
        _bert,
        head="classification",
        num_layers=24,
        width=1024,
        heads=16,
        vocabulary=30522,
        shape=(24, 512),
    ),
    "llama-gpu": partial(_large_llama, shape=(4, 2048)),
    "llama-lora-gpu": partial(_large_llama, adapter_rank=16, shape=(6, 2048)),
    "t5-gpu": partial(
        _t5, num_layers=24, width=1024, heads=16, inner=4096, shape=(8, 512), labels_shape=(8, 128)
    ),
    "resnet50-gpu": partial(_resnet, depths=(3, 4, 6, 3), batch=320, pixels=224),
    "resnet101-gpu": partial(_resnet, depths=(3, 4, 23, 3), batch=224, pixels=224),
    "unet-gpu": partial(_unet, base_width=64, batch=16, pixels=512),
    "encoder-deep-gpu": partial(_encoder, num_layers=96, width=512, heads=8, shape=(16, 512)),
    "encoder-wide-gpu": partial(_encoder, num_layers=4, width=4096, heads=32, shape=(24, 1024)),
    **{name: partial(_branched, build=build) for name, build in BUILDERS.items()},
}
"""Name to builder; a builder takes (name, tiny, device)."""

BRANCHED = (
    "t5-small", "t5-12", "bart", "whisper", "transformer", "clip", "unet", "conditional-unet", "two-streams", "densenet", "hrnet",
    "segformer", "llava",
)  # fmt: skip
"""Models that are no chain."""

COMPARED = {
    "cpu": (
        "gpt2-deep", "gpt2-vocabulary", "bert-narrow", "llama", "t5-small", "llama-lora", "encoder-deep", "encoder-wide", "vit-small",
        "resnet50", "resnet101", "regnet", "unet",
    ),
    "cuda": (
        "gpt2-gpu", "bert-gpu", "llama-gpu", "t5-gpu", "llama-lora-gpu", "encoder-deep-gpu", "encoder-wide-gpu", "resnet50-gpu",
        "resnet101-gpu", "unet-gpu",
    ),
}  # fmt: skip
"""Kind of device to the models that all methods are compared on."""
