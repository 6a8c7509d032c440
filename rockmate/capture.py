"""Module and sample -> joint graph: this and `rockmate/symbolic.py` are the only files that touch PyTorch's private tracing interface.

`torch._functorch.aot_autograd.aot_export_joint_with_descriptors` (torch 2.11 to 2.13) traces the plain module with fake tensors, no
Dynamo, and returns forward and backward as one functional ATen graph whose inputs and outputs bear descriptors. Here those become
this project's own `Role`s, and everything that would let the trace differ from what eager runs is set for its duration:

* the flags behind `torch.compiler.is_compiling()` and `is_exporting()` are on, so that model code does not read tensor values;
* Hugging Face's mask code is told what it cannot read: without a padding mask there is no padding, without `position_ids` there is
  no packing, so the captured graph runs the attention kernel that eager runs;
* the key/value cache and gradient checkpointing of Hugging Face models are off: one is useless in training, the other is our job.

Nothing of it outlives the capture: module, mode, buffers, `.grad`, random state and every flag are as before.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from rockmate.errors import InvalidSampleError, UnsupportedModelError
from rockmate.module_trail import module_trail
from rockmate.structure import Structure, flatten
from rockmate.untraced import install, record_calls, traced_as_ops

logger = logging.getLogger("rockmate")

_PLAIN = (bool, int, float, str)
_KERNELS = (
    *(f"upsample_{kind}" for kind in ("linear1d", "bilinear2d", "trilinear3d", "bicubic2d")),
    *(f"{kind}{dims}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    *(f"_upsample_{kind}2d_aa" for kind in ("bilinear", "bicubic", "lanczos")),
    "softshrink", "hardshrink", "multi_margin_loss", "multilabel_margin_loss_forward",
)  # fmt: skip
"""Differentiable ATen ops with a kernel of their own that PyTorch would trace as a formula of smaller ops."""
_MOST_NAMED = 4  # submodules in an error
_CAPTURE_LOCK = threading.Lock()  # the compile flags are process-wide


class RoleKind(enum.Enum):
    """What an input or output of the joint graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    BUFFER_UPDATE = "buffer_update"
    INPUT_UPDATE = "input_update"
    PARAMETER_GRADIENT = "parameter_gradient"
    INPUT_GRADIENT = "input_gradient"


@dataclass(frozen=True, slots=True)
class Role:
    """One input or output of the joint graph: its kind, with the name (parameters, buffers, constants) or index (all others)."""

    kind: RoleKind
    name: str = ""
    index: int = -1


@dataclass(frozen=True, slots=True)
class Capture:
    """A joint graph and the meaning of its ends.

    Each node's `meta["module"]` is the path of the innermost submodule that ran it, or whose op it differentiates.

    Attributes:
        joint: the functional forward and backward in one graph.
        inputs: the role of each placeholder and of each constant tensor, in order.
        output_roles: the role of each value that the graph returns; None for the gradient of an input that needs none.
        constants: tensors that the model's code made from Python numbers, by name.
        output_structure: rebuilds the model's output from its tensors, in the order of `Role.index`.
        cut_outputs: indices of the outputs that have a gradient in eager and none here.
    """

    joint: fx.GraphModule
    inputs: tuple[tuple[fx.Node, Role], ...]
    output_roles: tuple[Role | None, ...]
    constants: Mapping[str, torch.Tensor]
    output_structure: Structure
    cut_outputs: tuple[int, ...]

    @property
    def outputs(self) -> tuple[tuple[fx.Node, Role], ...]:
        """Each value that the graph returns now, with its role."""
        returned: Any = self.joint.graph.output_node().args[0]
        return tuple(
            (node, role)
            for node, role in zip(returned, self.output_roles, strict=True)
            if role is not None
        )


def with_graph(capture: Capture, graph: fx.Graph, twins: Mapping[fx.Node, fx.Node]) -> Capture:
    """The capture on a copy of its graph, where `twins` stand for its own nodes; no code is written for it, since none is run."""
    with _use_lazy_graph_module(True):
        joint = _make_graph_module(capture.joint, graph)
    return replace(
        capture, joint=joint, inputs=tuple((twins[node], role) for node, role in capture.inputs)
    )


def capture_joint(
    model: nn.Module,
    tensors: list[torch.Tensor],
    structure: Structure,
    *,
    differentiable: Literal["loss", "all"] = "loss",
    outputs: Literal["all", "loss"] = "all",
    untraced: Sequence[str] = (),
) -> Capture:
    """Traces forward and backward of `model` for one input signature.

    Args:
        model: the module, in the mode that it will be trained in.
        tensors: the tensors of the sample input; only their metadata matters.
        structure: rebuilds `(args, kwargs)` from the tensors.
        differentiable: "loss" cuts every output but the loss from the backward where the output has a loss; "all" keeps them all.
        outputs: "loss" returns `None` for every output tensor but the loss.
        untraced: paths of submodules that run as they are; recurrent layers do so in any case. See `rockmate.untraced`.

    Raises:
        InvalidSampleError: the model rejects the sample, or no output depends on anything that requires a gradient.
        UnsupportedModelError: the model cannot be captured as one static graph; the message names the line.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    # Copies, since a sample that passes one tensor twice would be captured as a model with one input.
    tensors = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    forward = _TensorsIn(model, structure, differentiable=differentiable, outputs=outputs)
    args, kwargs = structure.rebuild(tensors)
    calls = record_calls(model, tensors, structure, untraced)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_CAPTURE_LOCK)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_compile_flags())
        stack.enter_context(_known_masks(args, kwargs))
        stack.enter_context(_value_checks_deferred())
        stack.enter_context(_eager_kernels())
        stack.enter_context(_training_only_features_off(model))
        stack.enter_context(_random_state_kept(tensors))
        stack.enter_context(_attributes_kept(model))
        stack.enter_context(_tensors_kept(model))
        stack.enter_context(traced_as_ops(calls))
        modules = stack.enter_context(module_trail(model))
        try:
            joint = aot_export_joint_with_descriptors(stack, forward, tuple(tensors))
        except (InvalidSampleError, UnsupportedModelError):
            raise
        except Exception as error:
            raise _explain(error, model, modules.innermost) from error
        captured = joint.graph_module
        install(captured.graph, calls)
    if forward.notice:
        logger.warning(
            '%s; pass differentiable="all" if they are part of your loss', forward.notice
        )
    modules.name_backward(captured.graph)
    return _with_roles(captured, forward)


class _TensorsIn(nn.Module):
    """The model as a function from tensors to a flat tuple of tensors, which is what the tracer's descriptors number."""

    def __init__(
        self, model: nn.Module, structure: Structure, *, differentiable: str, outputs: str
    ) -> None:
        super().__init__()
        self.model = model
        self._structure = structure
        self._differentiable = differentiable
        self._outputs = outputs
        self.output_structure: Structure | None = None
        self.differentiable_outputs: tuple[int, ...] = ()
        self.cut_outputs: tuple[int, ...] = ()
        self.notice = ""

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._structure.rebuild(list(tensors))
        buffers = _buffers_by_place(self.model)
        output = self.model(*args, **kwargs)
        _refuse_reassigned(buffers, _buffers_by_place(self.model))
        flat, structure = flatten(output, what="the model's output")
        loss = _find_loss(output, flat, has_labels=kwargs.get("labels") is not None)
        if self._outputs == "loss":
            if loss is None:
                msg = 'outputs="loss" needs an output with a scalar `loss` that requires grad. Leave `outputs` at "all".'
                raise InvalidSampleError(msg)
            structure, flat, loss = structure.without_tensors({loss}), [flat[loss]], 0
        if self._differentiable == "loss" and loss is not None:
            self.cut_outputs = tuple(
                index for index, tensor in enumerate(flat) if index != loss and tensor.requires_grad
            )
            scalars = sum(flat[index].numel() == 1 for index in self.cut_outputs)
            self.notice = (
                f"{scalars} scalar outputs beside the loss have no gradient in planned steps"
                if scalars
                else ""
            )
            flat = [
                tensor if index == loss else tensor.detach() for index, tensor in enumerate(flat)
            ]
        self.output_structure = structure
        self.differentiable_outputs = tuple(
            index for index, tensor in enumerate(flat) if tensor.requires_grad
        )
        if not self.differentiable_outputs:
            msg = (
                "no output of the model requires a gradient, so there is nothing to train. Unfreeze a parameter, pass labels, or "
                "call the plain model."
            )
            raise InvalidSampleError(msg)
        return tuple(_unshared(flat))


def _buffers_by_place(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _refuse_reassigned(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Raises if the forward has put another tensor in the place of a buffer, which a graph cannot do for it."""
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)
    )
    if changed:
        msg = (
            f"the model's forward assigns a new tensor to its buffer {changed[0]}, which a captured graph cannot repeat. Change it in "
            "place instead (`buffer.copy_(...)`, `buffer.add_(...)`)."
        )
        raise UnsupportedModelError(msg)


def _find_loss(output: Any, flat: list[torch.Tensor], *, has_labels: bool) -> int | None:
    """Index among `flat` of the output's loss, None if there is none.

    That is an entry called `loss`, or the leading scalar of a tuple if the model was given `labels`.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if (
        loss is None
        and has_labels
        and isinstance(output, tuple | list)
        and len(flat) > 1
        and flat[0] is output[0]
    ):
        loss = flat[0] if flat[0].ndim == 0 else None
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad or loss.numel() != 1:
        return None
    return next((index for index, tensor in enumerate(flat) if tensor is loss), None)


def _unshared(flat: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies differentiable outputs that share memory with an earlier one: each then has a gradient of its own."""
    seen: set[int] = set()
    result = []
    for tensor in flat:
        key = tensor.untyped_storage()._cdata
        result.append(tensor.clone() if tensor.requires_grad and key in seen else tensor)
        seen.add(key)
    return result


@contextlib.contextmanager
def _compile_flags() -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` and `is_exporting()` true."""
    from torch._functorch import config

    compiler = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        # Eager's backward runs outside the user's autocast. Not every supported release knows the setting.
        known = (
            {"backward_pass_autocast": "off"} if hasattr(config, "backward_pass_autocast") else {}
        )
        with config.patch(known):
            yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


@contextlib.contextmanager
def _known_masks(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Answers for Hugging Face's mask code the questions that it would answer by reading values.

    A mask that is given is never skipped: its values differ from batch to batch, and a traced mask is still taken as unknown.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None or len(args) > 1:  # further positional arguments may be masks or positions
        yield
        return
    answers: dict[str, Callable[..., Any]] = {"is_torchdynamo_exporting": lambda: False}
    if kwargs.get("position_ids") is None:
        answers["find_packed_sequence_indices"] = lambda position_ids: None
    before = {name: getattr(masking, name) for name in answers if hasattr(masking, name)}
    try:
        for name in before:
            setattr(masking, name, answers[name])
        yield
    finally:
        for name, function in before.items():
            setattr(masking, name, function)


@contextlib.contextmanager
def _eager_kernels() -> Iterator[None]:
    """Keeps ops whole that PyTorch's Python dispatcher would trace as a formula: eager runs their kernel, which rounds otherwise."""
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    overloads = [
        getattr(packet, name)
        for packet in map(torch.ops.aten.__getattr__, _KERNELS)
        for name in packet.overloads()
    ]
    formulas = [
        (op, key, op.py_kernels[key]) for op in overloads for key in keys if key in op.py_kernels
    ]
    try:
        for op, key, _ in formulas:
            del op.py_kernels[key]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, formula in formulas:
            op.py_kernels[key] = formula
            op._dispatch_cache.clear()


@contextlib.contextmanager
def _value_checks_deferred() -> Iterator[None]:
    """Captures `torch._check_tensor_all` as an assertion among the ops, instead of reading the tensor; `rewrite` leaves such ops out."""

    def assert_all(condition: torch.Tensor, message: Any = None) -> None:
        torch._assert_async(condition.all())

    check = torch._check_tensor_all
    torch._check_tensor_all = assert_all
    try:
        yield
    finally:
        torch._check_tensor_all = check


@contextlib.contextmanager
def _training_only_features_off(model: nn.Module) -> Iterator[None]:
    """Switches off the key/value cache, and says so, and gradient checkpointing, of which the planner says so."""
    configs = [
        module.config
        for module in model.modules()
        if hasattr(getattr(module, "config", None), "__dict__")
    ]
    settings = [
        (config, vars(config).copy()) for config in configs
    ]  # some forwards write to them (`problem_type`)
    changed: list[tuple[Any, str]] = []
    holders = {
        id(holder): holder for module in model.modules() for holder in _cache_switches(module)
    }
    changed += [(holder, "use_cache") for holder in holders.values()]
    changed += [(module, "gradient_checkpointing") for module in modules_with_checkpointing(model)]
    if holders:
        logger.info(
            "use_cache is off in the planned forward: a training step has no use for past_key_values"
        )
    try:
        for holder, name in changed:
            setattr(holder, name, False)
        yield
    finally:
        for holder, name in changed:
            setattr(holder, name, True)
        for config, before in settings:
            for name in vars(config).keys() - before.keys():
                delattr(config, name)
            for name, value in before.items():
                if vars(config).get(name) is not value:
                    setattr(config, name, value)


def modules_with_checkpointing(model: nn.Module) -> list[nn.Module]:
    """The submodules in which Hugging Face's gradient checkpointing is switched on."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", None) is True
    ]


def _cache_switches(module: nn.Module) -> Iterator[Any]:
    config = getattr(module, "config", None)
    for holder in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if getattr(holder, "use_cache", None) is True:
            yield holder


@contextlib.contextmanager
def _random_state_kept(tensors: list[torch.Tensor]) -> Iterator[None]:
    devices = sorted(
        {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    )
    python_state, numpy_state = random.getstate(), np.random.get_state()
    failure: UnsupportedModelError | None = None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    except UnsupportedModelError as error:  # of which the draw is the likelier reason
        failure = error
    finally:
        drawn = random.getstate() != python_state or str(np.random.get_state()) != str(numpy_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
    if drawn:
        msg = (
            "the model's forward draws from Python's or NumPy's random numbers, which a captured graph cannot repeat: it would train one "
            "outcome for ever. Draw with torch, and keep control flow out of it (Hugging Face speech models: "
            "config.apply_spec_augment=False)."
        )
        raise UnsupportedModelError(msg) from failure
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Puts back plain attributes that the forward changes (counters), which planned steps will leave alone."""
    before = [
        (module, {name: value for name, value in vars(module).items() if type(value) in _PLAIN})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in attributes.items():
                if vars(module).get(name) != value:
                    logger.warning(
                        "the forward changes %s.%s, which planned steps do not",
                        type(module).__name__,
                        name,
                    )
                    setattr(module, name, value)


@contextlib.contextmanager
def _tensors_kept(model: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back where the tracer leaves its own: in a module with two names, which it swaps once for each."""
    places: list[dict[str, Any]] = [
        tensors for module in model.modules() for tensors in (module._parameters, module._buffers)
    ]
    before = [dict(tensors) for tensors in places]
    try:
        yield
    finally:
        for tensors, own in zip(places, before, strict=True):
            tensors.update(
                {name: tensor for name, tensor in own.items() if tensors.get(name) is not tensor}
            )


def _explain(error: Exception, model: nn.Module, path: str) -> Exception:
    """The tracer's error as one that the user can act on, with the submodule and the line of their code that caused it."""
    where = (f" in {path}" if path else "") + _user_line(error)
    text = str(error).strip().split("\n")[0][:300]
    causes = _causes(error)
    if any(type(cause).__name__ == "DynamicOutputShapeException" for cause in causes):
        msg = (
            f"{type(model).__name__} cannot be captured as one graph: it makes a tensor whose shape depends on values{where}, in "
            f"forward or backward ({text}). Such shapes have no single schedule; replace it by a tensor operation of fixed shape "
            f"(`torch.where` for `x[mask]` and `x[mask] = y`), or{_leave(model, path)}."
        )
        return UnsupportedModelError(msg)
    if any(_reads_values(cause) for cause in causes):
        msg = (
            f"{type(model).__name__} cannot be captured as one graph: its forward reads the value of a tensor{where}. Control flow or "
            f"shapes that depend on data have no single schedule; replace it by a tensor operation, or{_leave(model, path)}. ({text})"
        )
        return UnsupportedModelError(msg)
    if "convert all Tensors to FakeTensors" in str(error):
        msg = (
            f"{type(model).__name__} uses a tensor that is neither parameter, buffer nor input{where}, typically an attribute. "
            "Register it with register_buffer(name, tensor, persistent=False)."
        )
        return UnsupportedModelError(msg)
    if isinstance(
        error, TypeError | ValueError | IndexError | RuntimeError | KeyError | AttributeError
    ):
        msg = f"{type(model).__name__} raised on the sample input{where}: {type(error).__name__}: {text}"
        return InvalidSampleError(msg)
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be captured{where}: {type(error).__name__}: {text}"
    )


def _leave(model: nn.Module, path: str) -> str:
    """What a user can do about a submodule that cannot be captured, and about others of its class."""
    if not path:
        return " keep that part outside"
    kind = type(model.get_submodule(path))
    alike = [other for other, module in model.named_modules() if type(module) is kind]
    around = _around(model, alike)
    several = len(alike) > 1
    what = (
        f"that submodule and the others of its class {kind.__name__} as they are"
        if several
        else "that submodule as it is"
    )
    names = alike if len(alike) <= _MOST_NAMED or not around else [around]
    listed = ", ".join(f'"{name}"' for name in names)
    larger = (
        f', or what contains {"them" if several else "it"} ("{around}")'
        if around and names is alike
        else ""
    )
    return f" run {what}: untraced=[{listed}] (on the command line: --untraced {','.join(names)}){larger}"


def _around(model: nn.Module, paths: Sequence[str]) -> str:
    """Path of the innermost submodule that contains them all and has a forward of its own; empty if that is the whole model."""
    shared = paths[0].split(".")[:-1]
    while shared:
        around = ".".join(shared)
        is_called = type(model.get_submodule(around)).forward is not nn.Module.forward
        if is_called and all(path.startswith(f"{around}.") for path in paths):
            return around
        shared.pop()
    return ""


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, link by link."""
    return [error, *(_causes(error.__cause__) if error.__cause__ else [])]


def _reads_values(error: BaseException) -> bool:
    is_known = type(error).__name__ in {
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "UserError",
    }
    return is_known or "data-dependent" in str(error) or "_local_scalar_dense" in str(error)


def _user_line(error: BaseException) -> str:
    """The deepest frame outside PyTorch and this package, as text that starts with a blank; empty if there is none."""
    ours, torch_root = Path(__file__).parent, Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if ours not in Path(frame.filename).parents
        and torch_root not in Path(frame.filename).parents
        and frame.line
    ]
    frames = [frame for frame in frames if "contextlib" not in frame.filename]
    return f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""


def _with_roles(joint: fx.GraphModule, forward: _TensorsIn) -> Capture:
    made_by_code = [node for node in joint.graph.nodes if node.op == "get_attr"]
    for node in made_by_code:
        if not isinstance(getattr(joint, str(node.target)), torch.Tensor):
            msg = f"the model's forward uses a {type(getattr(joint, str(node.target))).__name__} object, which cannot be captured"
            raise UnsupportedModelError(
                f"{msg}. Use the default random generator, and tensors that are inputs or buffers."
            )
    constants = {str(node.target): getattr(joint, str(node.target)) for node in made_by_code}
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    returned = joint.graph.output_node()
    values: Any = returned.args[0]
    inputs = tuple((node, _input_role(node.meta["desc"])) for node in placeholders)
    inputs += tuple((node, Role(RoleKind.CONSTANT, name=str(node.target))) for node in made_by_code)
    output_roles = tuple(
        _output_role(descriptor) if isinstance(node, fx.Node) else None
        for node, descriptor in zip(values, returned.meta["desc"], strict=True)
    )
    tangents = {role.index for _, role in inputs if role.kind is RoleKind.TANGENT}
    if tangents != set(forward.differentiable_outputs):
        missing = sorted(set(forward.differentiable_outputs) - tangents)
        msg = (
            f"output tensors {missing} of the model require grad but are its own inputs or parameters (or views of them). Return a "
            "copy, or detach them."
        )
        raise UnsupportedModelError(msg)
    assert forward.output_structure is not None
    return Capture(
        joint, inputs, output_roles, constants, forward.output_structure, forward.cut_outputs
    )


def _input_role(descriptor: Any) -> Role:
    kind = type(descriptor).__name__
    match kind:
        case "ParamAOTInput":
            return Role(RoleKind.PARAMETER, name=_own_name(descriptor.target))
        case "BufferAOTInput":
            return Role(RoleKind.BUFFER, name=_own_name(descriptor.target))
        case "PlainAOTInput":
            return Role(RoleKind.INPUT, index=descriptor.idx)
        case "TangentAOTInput" if type(descriptor.output).__name__ == "PlainAOTOutput":
            return Role(RoleKind.TANGENT, index=descriptor.output.idx)
    msg = f"the model needs an input of kind {kind} ({descriptor}), which is not supported"
    raise UnsupportedModelError(msg)


def _output_role(descriptor: Any) -> Role:
    kind = type(descriptor).__name__
    if kind == "PlainAOTOutput":
        return Role(RoleKind.OUTPUT, index=descriptor.idx)
    if kind == "InputMutationAOTOutput":
        target = _input_role(descriptor.mutated_input)
        if target.kind is RoleKind.BUFFER:
            return Role(RoleKind.BUFFER_UPDATE, name=target.name)
        if target.kind is RoleKind.INPUT:
            return Role(RoleKind.INPUT_UPDATE, index=target.index)
    if kind == "GradAOTOutput":
        target = _input_role(descriptor.grad_of)
        if target.kind is RoleKind.PARAMETER:
            return Role(RoleKind.PARAMETER_GRADIENT, name=target.name)
        if target.kind is RoleKind.INPUT:
            return Role(RoleKind.INPUT_GRADIENT, index=target.index)
    msg = f"the model has an output of kind {kind} ({descriptor}), which is not supported"
    raise UnsupportedModelError(msg)


def _own_name(target: str) -> str:
    return target.removeprefix("model.")
