"""Module and sample -> joint graph.

PyTorch's AOTAutograd traces the plain module with fake tensors, without Dynamo. It returns forward
and backward as one functional ATen graph whose inputs and outputs bear descriptors. Here the
descriptors become `Role`s. What would let the trace differ from eager is set for its duration:

* `torch.compiler.is_compiling()` and `is_exporting()` are true for libraries, so that they read no
  tensor values. The user's own files are told so only where eager's code does not trace.
* Hugging Face's mask code is told what it cannot read. Without a padding mask there is no padding,
  without `position_ids` there is no packing. The graph then has the attention kernel of eager.
* The key/value cache and gradient checkpointing of Hugging Face models are off.

Nothing of it outlives the capture: module, buffers, `.grad`, random state, flags are restored.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from rockmate._torch.aot import (
    compile_flags,
    joint_graph,
    linalg_checks_kept,
    scripts_traced,
    value_checks_as_ops,
    without_decompositions,
)
from rockmate._torch.fake import errors_unlogged, forget_tensors, is_fake, results_corrected
from rockmate._torch.members import hooks_within
from rockmate._torch.storage import version_of
from rockmate.capture.attribute_access import AttributeState, Place, accesses_recorded
from rockmate.capture.behaviour import check_behaviour
from rockmate.capture.carried_attributes import attributes_left
from rockmate.capture.checkpoint_regions import checkpoint_regions, num_checkpoints
from rockmate.capture.compiled_model import uncompiled
from rockmate.capture.diagnose import explain_failure, refuse_effects
from rockmate.capture.given_tensors import cloned_with_strides, lifted_tensors, with_trained_buffers
from rockmate.capture.huggingface import known_masks, training_only_features_off
from rockmate.capture.nodes import call_name
from rockmate.capture.opaque_call import OpaqueCall
from rockmate.capture.opaque_functions import ForeignFunctions
from rockmate.capture.opaque_module import record_calls, traced_as_ops
from rockmate.capture.opaque_ops import install
from rockmate.capture.outer_values import values_read_by
from rockmate.capture.provenance import name_backward, record_module_stack
from rockmate.capture.read_values import SampleValues, UnknownValueError
from rockmate.capture.roles import Capture, Role, RoleKind, traced_calls
from rockmate.capture.structure import Structure
from rockmate.capture.tensor_parts import plain_places
from rockmate.capture.trace_state import (
    CAPTURE_LOCK,
    EAGER_KERNELS,
    random_state_kept,
    tensors_kept,
)
from rockmate.capture.traced_forward import Outside, TracedForward
from rockmate.capture.wrapping import Wrapping
from rockmate.errors import InPlaceCollectiveError, InvalidSampleError, UnsupportedModelError
from rockmate.ops.collectives import wait_for_collectives
from rockmate.ops.gathering import padded_names, put_padded_parts
from rockmate.ops.kernel_layouts import in_kernel_layout
from rockmate.ops.value_mark import values_marked
from rockmate.state.call_state import caches_passed_by, empty_caches, outside_of, undone
from rockmate.state.writes import Writes

logger = logging.getLogger(__name__)


def capture_joint(
    model: nn.Module,
    tensors: list[torch.Tensor],
    structure: Structure,
    *,
    differentiable: Literal["loss", "all"] = "loss",
    outputs: Literal["all", "loss"] = "all",
    untraced: Sequence[str] = (),
    keeps_checkpoints: bool = False,
    keeps_strides: bool = False,
    reads_masks: bool = False,
    values: SampleValues | None = None,
) -> Capture:
    """Traces forward and backward of `model` for one input signature.

    Args:
        model: the module, in the mode that it will be trained in.
        tensors: the tensors of the sample input; only their metadata matters.
        structure: rebuilds `(args, kwargs)` from the tensors.
        differentiable: "loss" cuts outputs beside a loss from the backward; "all" keeps them all.
        outputs: "loss" returns `None` for every output tensor but the loss.
        untraced: paths of opaque modules; see `rockmate.capture.opaque_module`.
        keeps_checkpoints: whether checkpoints that a Hugging Face model switches on are recorded.
        keeps_strides: whether inputs with gaps between elements are traced so, not as dense ones.
        reads_masks: whether Hugging Face's mask code reads whether a mask pads, as in eager.
        values: what the forward may read values of; None for `tensors` and the model's buffers.

    Raises:
        InvalidSampleError: the model rejects the sample, or no output requires a gradient.
        UnsupportedModelError: it cannot be captured as one static graph; the text names the line.
        UntestedVersionError: PyTorch does not behave as a capture relies on.
    """
    # Copies: a sample that passes one tensor twice would be captured as a model with one input.
    clone = cloned_with_strides if keeps_strides else torch.Tensor.clone
    tensors = [clone(each.detach()).requires_grad_(each.requires_grad) for each in tensors]
    make = partial(
        TracedForward, model, structure, differentiable=differentiable, outputs=outputs,
        keeps_checkpoints=keeps_checkpoints, reads_masks=reads_masks,
        sample=values if values and values.num_carriers else None, caches=empty_caches(),
    )  # fmt: skip
    check_behaviour()
    with uncompiled(model), caches_passed_by(model):
        try:
            return _captured(model, make, tensors, untraced)
        except UnknownValueError as error:
            values = values or SampleValues(tensors, dict(model.named_buffers()))
            known = [each for each in values.inputs if each is not None]
            if values.num_carriers or any(map(is_fake, known)):
                raise
            if any(each.is_meta for each in known):
                msg = f"{error} The sample is on the meta device: one on the CPU has the values."
                raise UnknownValueError(msg) from error
            found = list[Exception]()  # the first one is of what is not even to be deferred
            for defers in (True, False):
                reading = partial(make, sample=replace(values, defers=defers))
                try:
                    return _captured(model, reading, tensors, untraced)
                except (InvalidSampleError, UnsupportedModelError) as later:
                    found.append(later)
            raise ([n for n in found if type(n) is UnknownValueError] or found[-1:])[0] from error


def _captured(
    model: nn.Module,
    make: Callable[..., TracedForward],
    tensors: list[torch.Tensor],
    untraced: Sequence[str],
) -> Capture:
    """The capture of a model from its present state; errors as for `capture_joint`."""
    wrapped: list[tuple[Any, torch.Tensor]] = []
    is_elsewhere = any(map(is_fake, (*tensors, *model.parameters())))  # it cannot run
    functions = ForeignFunctions(are_recorded=is_elsewhere)
    outside = values_read_by(model, ())
    objects = outside_of(model.modules(), hooks_within(model.modules()))
    make = partial(make, outside=Outside(outside, objects))
    failure: InvalidSampleError | None = None  # of a trace as a compiler's
    asked: set[str] | None = set()  # files of the user's that ask whether it is one

    def trace(logs: Sequence[Place] = ()) -> tuple[fx.GraphModule, TracedForward]:
        # Hooks put tensors into dictionaries of the script, where those of a trace are no use.
        with undone(model, Writes()):
            # A checkpoint would run what is opaque without gradients, unlike the trace.
            with training_only_features_off(model):
                answers = partial(_answers, first := make(), tensors, failure is None, asked)
                calls = record_calls(
                    model, tensors, first.structure, untraced, as_traced=answers,
                    with_functions=functions.are_recorded and not is_elsewhere,
                )  # fmt: skip
            forward = make(logs=logs)
            with functions.traced(), answers():
                joint, wrapped[:] = _traced(model, forward, tensors, calls)
        return joint, forward

    while True:
        try:
            joint, forward = trace()
            break
        except Exception as error:
            is_told = isinstance(error, InvalidSampleError | UnsupportedModelError)
            is_told = is_told and not isinstance(error, InPlaceCollectiveError)
            if is_told and not is_elsewhere and functions.may_be_traced_again(error):
                continue
            if is_told and asked:  # eager's code does not trace: a compiler's may
                asked = None
                continue
            if failure is not None:
                raise failure from error
            if type(error) is not InvalidSampleError:
                raise
            failure = error  # a library's code for compilers may leave out what training needs
    wrappings = _wrappings(wrapped, padded_names(model))
    if notice := forward.outputs.notice:
        logger.warning('%s; pass differentiable="all" if they are part of your loss', notice)
    attributes, joint, forward = attributes_left(model, joint, forward, trace)
    outer = values_read_by(model, functions.met) if functions.met else outside
    attributes = attributes.also_reading(outer) if outer else attributes
    capture = with_trained_buffers(model, _with_roles(joint, forward, wrappings))
    constants = tuple((each, version_of(each)) for each in lifted_tensors(capture))
    return replace(capture, attributes=replace(attributes, constants=constants))


@contextlib.contextmanager
def _answers(
    forward: TracedForward, tensors: list[torch.Tensor], has_flags: bool, asked: set[str] | None
) -> Iterator[None]:
    """What libraries' code is told while the model is traced. It is set for the whole process."""
    masks = known_masks(*forward.structure.rebuild(tensors), are_read=forward.reads_masks)
    flags = compile_flags(are_on=has_flags, asked=asked)
    with CAPTURE_LOCK, flags, masks, scripts_traced(forward.model):
        yield


def _traced(
    model: nn.Module,
    forward: TracedForward,
    tensors: list[torch.Tensor],
    calls: Mapping[str, OpaqueCall],
) -> tuple[fx.GraphModule, list[tuple[Any, torch.Tensor]]]:
    """The joint graph of `forward`, which runs `model`, and its gradients that are wrappers.

    Errors as for `capture_joint`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(errors_unlogged())
        stack.enter_context(values_marked())
        stack.enter_context(value_checks_as_ops())
        stack.enter_context(linalg_checks_kept())
        stack.enter_context(without_decompositions(EAGER_KERNELS))
        fakes = stack.enter_context(results_corrected(in_kernel_layout))
        keeps = forward.keeps_checkpoints
        stack.enter_context(
            training_only_features_off(model, keeps_checkpoints=keeps, is_told=True)
        )
        stack.enter_context(random_state_kept(tensors))
        stack.enter_context(tensors_kept(model))
        stack.enter_context(plain_places(model))
        put_padded_parts(model)
        stack.enter_context(traced_as_ops(calls, model))
        modules = stack.enter_context(record_module_stack(model))
        checkpoints = stack.enter_context(checkpoint_regions())
        before = AttributeState(model)
        accesses = stack.enter_context(accesses_recorded(model, before))
        try:
            joint, wrapped = joint_graph(stack, forward, tensors)
        except (InvalidSampleError, UnsupportedModelError):
            raise
        except Exception as error:
            explained = explain_failure(error, model, modules.innermost, forward.outside.places)
            raise forward.held.explained(explained, modules.innermost) from error
        for node in joint.graph.find_nodes(op="get_attr"):
            constant = getattr(joint, str(node.target))
            node.meta["val"] = fakes.get(id(constant), node.meta.get("val"))
        install(joint.graph)
        before.refuse_changes(forward.left.outside.objects)
    forward.takes_gradient = modules.takes_gradient
    forward.left.accesses.add_reads(accesses)  # of hooks and autograd functions in the backward
    forget_tensors(next(iter(joint.graph.nodes)).meta["val"])
    checkpoints.note_decisions()
    name_backward(joint.graph)
    refuse_effects(joint.graph, model)
    wait_for_collectives(joint.graph)
    return joint, wrapped


def _wrappings(
    wrapped: Sequence[tuple[Any, torch.Tensor]], are_padded: Container[str]
) -> dict[Role, Wrapping]:
    """How to wrap each gradient that is a wrapper, by the role of its parameter or input."""
    found = {}
    for descriptor, like in wrapped:
        role = _input_role(descriptor)
        what = f"the gradient of {role.name or f'input {role.index}'}"
        found[role] = Wrapping.like(like, what=what, is_padded=role.name in are_padded)
    return found


def _with_roles(
    joint: fx.GraphModule, forward: TracedForward, wrappings: Mapping[Role, Wrapping]
) -> Capture:
    _drop_objects(joint.graph)
    made_by_code = joint.graph.find_nodes(op="get_attr")
    constants = {str(node.target): getattr(joint, str(node.target)) for node in made_by_code}
    for value in constants.values():
        if not isinstance(value, torch.Tensor):
            raise UnsupportedModelError(
                f"the model's forward uses a {type(value).__name__} object, which cannot be "
                "captured. Use the default random generator, and tensors that are inputs or "
                "buffers."
            )
    placeholders = joint.graph.find_nodes(op="placeholder")
    returned = joint.graph.output_node()
    values: Any = returned.args[0]
    inputs = tuple((node, _held(_input_role(node.meta["desc"]), forward)) for node in placeholders)
    inputs += tuple((node, Role(RoleKind.CONSTANT, name=str(node.target))) for node in made_by_code)
    output_roles = tuple(
        _output_role(descriptor, wrappings) if isinstance(node, fx.Node) else None
        for node, descriptor in zip(values, returned.meta["desc"], strict=True)
    )
    tangents = {role.index for _, role in inputs if role.kind is RoleKind.TANGENT}
    if tangents != set(forward.outputs.differentiable):
        missing = sorted(set(forward.outputs.differentiable) - tangents)
        raise UnsupportedModelError(
            f"output tensors {missing} of the model, or tensors that its forward assigns to "
            "attributes, require grad but are its own inputs or parameters, or views of them. "
            "Return or assign a copy, or detach them."
        )
    return Capture(
        joint,
        inputs,
        output_roles,
        constants,
        forward.outputs.structure,
        forward.outputs.non_differentiable,
        read_values=forward.reader.values,
        num_checkpoints=num_checkpoints(joint.graph),
        traced=traced_calls(joint.graph),
    )


def _held(role: Role, forward: TracedForward) -> Role:
    """The role of an input, which may stand for a tensor in an attribute of another one."""
    if role.name not in forward.held.inputs:
        return role
    name, path = forward.held.inputs[role.name]
    return Role(RoleKind.BUFFER, name=name, inner=path)


def _input_role(descriptor: Any) -> Role:
    kind = type(descriptor).__name__
    match kind:
        case "ParamAOTInput":
            return Role(RoleKind.PARAMETER, name=descriptor.target.removeprefix("model."))
        case "BufferAOTInput":
            return Role(RoleKind.BUFFER, name=descriptor.target.removeprefix("model."))
        case "PlainAOTInput":
            return Role(RoleKind.INPUT, index=descriptor.idx)
        case "TangentAOTInput" if type(descriptor.output).__name__ == "PlainAOTOutput":
            return Role(RoleKind.TANGENT, index=descriptor.output.idx)
        case "TangentAOTInput" if type(descriptor.output).__name__ == "InputMutationAOTOutput":
            raise _changed_in_place(_input_role(descriptor.output.mutated_input))
        case "SubclassGetAttrAOTInput":
            base = _input_role(descriptor.base)
            return replace(base, inner=(*base.inner, descriptor.attr))
    msg = "the step reads what is no parameter, buffer or argument. Pass it, or register it."
    raise UnsupportedModelError(msg)


def _drop_objects(graph: fx.Graph) -> None:
    """Drops inputs that are no tensors and that the graph only returns: the mesh of a `DTensor`.

    Raises:
        UnsupportedModelError: an op reads one.
    """
    returned = graph.output_node()
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            continue
        readers = [user for user in node.users if user is not returned]
        if readers:
            kind, reader = type(node.meta.get("val")).__name__, call_name(readers[0])
            msg = f"the op {reader} reads a {kind}, which is no tensor and cannot be planned"
            raise UnsupportedModelError(msg)
        values: Any = returned.args[0]
        returned.args = (tuple(None if value is node else value for value in values),)
        graph.erase_node(node)


def _output_role(descriptor: Any, wrappings: Mapping[Role, Wrapping]) -> Role:
    kind = type(descriptor).__name__
    if kind == "SubclassGetAttrAOTOutput":
        base = _output_role(descriptor.base, wrappings)
        if base.kind is RoleKind.OUTPUT:
            raise UnsupportedModelError(
                f"output tensor {base.index} of the model, or a tensor that its forward assigns to "
                "an attribute, wraps other tensors, which a plan does not return. Return a plain "
                "tensor, such as `output.to_local()` or `output.full_tensor()` of a DTensor."
            )
        return replace(base, inner=(*base.inner, descriptor.attr))
    if kind == "PlainAOTOutput":
        return Role(RoleKind.OUTPUT, index=descriptor.idx)
    if kind == "InputMutationAOTOutput":
        target = _input_role(descriptor.mutated_input)
        if target.kind is RoleKind.BUFFER:
            return Role(RoleKind.BUFFER_UPDATE, name=target.name)
        if target.kind is RoleKind.INPUT:
            return Role(RoleKind.INPUT_UPDATE, index=target.index)
        raise _changed_in_place(target)
    if kind == "GradAOTOutput":
        target = _input_role(descriptor.grad_of)
        if target.kind is RoleKind.INPUT:
            kind = RoleKind.INPUT_GRADIENT
            return Role(kind, index=target.index, wrapping=wrappings.get(target))
        kind = RoleKind.PARAMETER_GRADIENT
        return Role(kind, name=target.name, wrapping=wrappings.get(target))
    msg = "the step has a result besides outputs, updates and gradients. Return it, or detach it."
    raise UnsupportedModelError(msg)


def _changed_in_place(role: Role) -> UnsupportedModelError:
    if role.kind is RoleKind.PARAMETER:
        msg = (
            f"the forward changes the parameter {role.name} in place, which a plan cannot repeat. "
            "Change it after the backward, or make it a buffer (register_buffer)."
        )
    else:
        msg = (
            "the model changes an input that requires a gradient in place, which a plan cannot "
            "repeat. Change a copy: x = x * 2 in place of x.mul_(2)."
        )
    return UnsupportedModelError(msg)
