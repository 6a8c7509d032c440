"""Submodules that run as they are: those that the user names, since they cannot be traced, and recurrent layers.

Such a submodule is one op of the graph, and its backward another. The forward op runs the submodule with gradients on and returns its
outputs and a *handle*, a small tensor that holds the autograd graph of this one run. In the plan the handle has the size of what that
graph saves, so it is kept or made again like any other value: dropping it frees the submodule's memory, and making it again runs the
submodule once more, from the same random state. The backward op differentiates the graph that the handle holds.

What the graph saves of the op's own inputs and outputs is the plan's to count, and the backward op reads it like any other op's would.
Outputs need no more than that: they are made with the handle, so they are in memory while it is. An input may be dropped and made again
in between, so the graph does not hold it: it *borrows* the input, and finds it among the backward's arguments.

What the tracer cannot know is read off one run of the whole model on the sample, without gradients, before the capture: the
submodule's inputs and outputs, what it saves, whether it draws random numbers and whether it changes its buffers. Time and workspace are
measured on those inputs, since a submodule whose control flow depends on values may not run on made-up ones.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from rockmate._torch.allocator import net_allocated
from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.members import tensor_tables
from rockmate._torch.storage import StorageWeakRef, storage_id, version_of
from rockmate.capture.opaque_inputs import ReleasableInputs, attach_input
from rockmate.capture.structure import Structure, flatten
from rockmate.errors import BackwardError, InvalidSampleError, UnsupportedModelError
from rockmate.ops.rng import keep_state
from rockmate.ops.unused_gradient import undefined_gradient

_LEAST_BORROWED = (
    1024  # bytes for each tensor that is saved: to look at one takes some microseconds
)
_traced_calls: dict[
    str, OpaqueCall
] = {}  # of the capture that is going on, which a lock makes the only one


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """That of a tensor; one whose elements share memory, or leave gaps, is laid out anew."""
        like = torch.empty_like(tensor, device="meta")
        return cls(tuple(tensor.shape), like.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor of this layout, its values not set."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The tensor if it has this layout, and its memory to itself; else a copy that has."""
        has_gaps = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        return (
            tensor
            if tensor.stride() == self.stride and not has_gaps
            else self.empty().copy_(tensor)
        )


@dataclass(slots=True, kw_only=True, eq=False)
class OpaqueCall:
    """One call of a submodule in the model's forward, as it was on the sample.

    Attributes:
        name: path of the submodule, with the number of the call where it is called more than once.
        module: the submodule.
        arguments: rebuilds its positional and keyword arguments from their tensors.
        result: rebuilds its result from its tensors.
        inputs: the tensors of the arguments, then the parameters.
        parameter_names: of those parameters.
        outputs: layouts of the tensors of the result.
        gradients: layouts of the gradients of those inputs that require one.
        differentiable: of the inputs, which require a gradient.
        saved_bytes: what its autograd graph holds beside parameters, buffers, the outputs and what it borrows.
        borrowed: positions of the inputs that its autograd graph borrows.
        saved_outputs: positions of the outputs that its autograd graph holds.
        draws: whether it draws random numbers.
        changes_buffers: whether a run changes one of its buffers, so that it must not run again.
        autocast: dtype for each kind of device on which autocast is on in the call.
    """

    name: str
    module: nn.Module
    arguments: Structure
    result: Structure
    inputs: tuple[Tensor, ...]
    parameter_names: tuple[str, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    differentiable: tuple[bool, ...]
    autocast: Mapping[str, torch.dtype]
    saved_bytes: int = 0
    borrowed: tuple[int, ...] = ()
    saved_outputs: tuple[int, ...] = ()
    draws: bool = False
    changes_buffers: bool = False

    @property
    def num_arguments(self) -> int:
        """How many of the inputs are no parameters."""
        return len(self.inputs) - len(self.parameter_names)

    def observe(self) -> None:
        """Runs the submodule on the sample's inputs to see what it saves, draws and changes; leaves everything as it was."""
        buffers = self.copied_buffers()
        before = {name: version_of(buffer) for name, buffer in buffers.items()}
        with self.random_state_kept() as draws:
            self._observe_saved(buffers)
            self.draws = draws()
        self.changes_buffers = any(
            version_of(buffer) != before[name] for name, buffer in buffers.items()
        )
        with self.random_state_kept():
            self.saved_bytes = self._measured_bytes(self.copied_buffers())

    def _observe_saved(self, buffers: Mapping[str, Tensor]) -> None:
        """Finds which inputs the graph can borrow, and which outputs it holds."""
        inputs = self.copied_inputs()
        arguments = _Memory(inputs[: self.num_arguments])
        saved = _Saved()
        run = self.run(inputs, buffers=buffers, borrowed=range(self.num_arguments), note=saved.note)
        self._refuse_foreign(run)
        values = run.values(inputs, self.outputs)
        self.saved_outputs = tuple(
            index
            for index, (value, output) in enumerate(
                zip(_keys(values), _keys(run.outputs), strict=True)
            )
            if value == output and value in saved.keys
        )
        graph = _Graph.of(run)  # held, so that no two storages have one address
        del run, values, inputs
        shared = (
            saved.keys & arguments.num_bytes.keys()
        ) - arguments.held()  # by what no hook sees
        if sum(arguments.num_bytes[key] for key in shared) >= _LEAST_BORROWED * saved.count:
            self.borrowed = tuple(
                index for index, key in enumerate(arguments.keys) if key in shared
            )
        del graph

    def _measured_bytes(self, buffers: Mapping[str, Tensor]) -> int:
        """What a run leaves allocated beside its outputs, and the byte of the handle itself."""
        forward = OpaqueForward(self)

        def run() -> list[Tensor]:
            return forward.with_buffers(self.copied_inputs(), buffers)

        left_bytes, values = net_allocated(run, self.outputs[0].device)
        return left_bytes - sum(value.untyped_storage().nbytes() for value in values[:-1])

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[Callable[[], bool]]:
        """Puts the random state back; yields what tells whether it has changed meanwhile."""
        device = self.outputs[0].device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            state = keep_state(device)
            yield lambda: not torch.equal(state, keep_state(device))

    def copied_inputs(self) -> list[Tensor]:
        """The sample's inputs: the parameters themselves and copies of the others, which share memory where those do."""
        copies: dict[int, torch.UntypedStorage] = {}
        copied = []
        for tensor in self.inputs[: self.num_arguments]:
            memory = tensor.untyped_storage()
            if storage_id(memory) not in copies:
                copies[storage_id(memory)] = memory.clone()
            copied.append(
                tensor.new_empty(0).set_(
                    copies[storage_id(memory)],
                    tensor.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
            )
        return [*copied, *self.inputs[self.num_arguments :]]

    def copied_buffers(self) -> dict[str, Tensor]:
        """Copies of the submodule's buffers, by name."""
        return {name: buffer.clone() for name, buffer in self.module.named_buffers()}

    def run(
        self,
        inputs: Sequence[Tensor],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        borrowed: Sequence[int] | None = None,
        note: Callable[[Tensor], None] | None = None,
    ) -> _Run:
        """The outputs for `inputs`, with their autograd graph.

        Args:
            inputs: in the order of `OpaqueCall.inputs`.
            buffers: in place of the submodule's own.
            borrowed: positions of the inputs that the graph borrows, if not those of `OpaqueCall.borrowed`.
            note: called with each tensor that the graph saves.
        """
        loan = ReleasableInputs(inputs, self.borrowed if borrowed is None else borrowed, note=note)
        pairs = [
            attach_input(tensor) if needs else (tensor.detach(), tensor.detach())
            for tensor, needs in zip(
                inputs[: self.num_arguments], self.differentiable[: self.num_arguments], strict=True
            )
        ]
        parameters = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(
                inputs[self.num_arguments :], self.differentiable[self.num_arguments :], strict=True
            )
        ]
        args, kwargs = self.arguments.rebuild([value for _, value in pairs])
        state = {**dict(zip(self.parameter_names, parameters, strict=True)), **(buffers or {})}
        state = {
            f"module.{name}": tensor
            for name, tensor in _in_their_places(self.module, state).items()
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device_type, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device_type, dtype=dtype))
            stack.enter_context(loan.saving())
            before = _versions(inputs[: self.num_arguments])
            result = functional_call(_Hookless(self.module), state, args, kwargs, tie_weights=False)
            if _versions(inputs[: self.num_arguments]) != before:
                raise _changes_its_input(self.name)
        outputs, structure = flatten(result, what=f"the result of {self.name}")
        self._check(outputs, structure)
        return _Run([*(leaf for leaf, _ in pairs), *parameters], outputs, loan)

    def _refuse_foreign(self, run: _Run) -> None:
        """Raises if the outputs depend on a tensor that needs a gradient and is neither an input nor a parameter of the submodule."""
        known = {id(leaf) for leaf in run.leaves}
        pending, seen = (
            [output.grad_fn for output in run.outputs if output.grad_fn is not None],
            set(),
        )
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)  # of a node that accumulates into a leaf
            if variable is not None and id(variable) not in known:
                msg = (
                    f"the untraced submodule {self.name} uses a tensor of shape {tuple(variable.shape)} that needs a gradient and is "
                    "neither its input nor its parameter. Pass it in, or leave a larger part of the model untraced."
                )
                raise UnsupportedModelError(msg)
            pending += [parent for parent, _ in node.next_functions if parent is not None]

    def _check(self, outputs: Sequence[Tensor], structure: Structure) -> None:
        found = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        planned = [(layout.shape, layout.dtype) for layout in self.outputs]
        if len(found) == len(planned) and structure != self.result:
            kinds = ["tensor"] * len(found)
            msg = (
                f"the untraced submodule {self.name} returned {structure.rebuild(kinds)}, and {self.result.rebuild(kinds)} for the sample. "
                "What it returns beside tensors is fixed when the step is planned: return it as a tensor, or leave a larger part of the "
                "model untraced."
            )
            raise UnsupportedModelError(msg)
        if found != planned:
            msg = (
                f"the untraced submodule {self.name} returned {found}, and {planned} for the sample. What it returns must have the same "
                "shapes in every step: pad it, or leave a larger part of the model untraced."
            )
            raise UnsupportedModelError(msg)


class _Hookless(nn.Module):
    """A submodule without its own hooks, which are part of what is traced around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


class OpaqueForward:
    """The forward of an untraced submodule as an op: `(tensors) -> [*outputs, handle]`."""

    def __init__(self, call: OpaqueCall) -> None:
        """Of this call."""
        self.call = call
        self.__name__ = self.__qualname__ = "untraced_forward"

    def __str__(self) -> str:
        return f"rockmate.untraced_forward[{self.call.name}]"

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.call.draws

    @property
    def runs_once(self) -> bool:
        """Whether it must not be recomputed."""
        return self.call.changes_buffers

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the submodule."""
        return self.with_buffers(tensors, None)

    def with_buffers(
        self, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor] | None
    ) -> list[Tensor]:
        """Runs the submodule with these buffers in place of its own, if any are given."""
        run = self.call.run(tensors, buffers=buffers)
        handle = torch.empty(1, dtype=torch.uint8)
        handle.graph = _Graph.of(run)  # pyright: ignore[reportAttributeAccessIssue]
        return [*run.values(tensors, self.call.outputs), handle]

    def on_sample(self, _: Callable[[int], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the same on the sample's inputs instead of made-up ones, with copies of the buffers."""
        return self.with_buffers, (self.call.copied_inputs(), self.call.copied_buffers())


class OpaqueBackward:
    """The backward of an untraced submodule: `(gradients of the outputs, handle, values) -> gradients of the inputs that need one`.

    The values are the inputs that the handle's graph borrows, then the outputs that it holds.

    The gradient of an output that the loss does not depend on is None.
    """

    def __init__(self, call: OpaqueCall) -> None:
        """Of this call."""
        self.call = call
        self.__name__ = self.__qualname__ = "untraced_backward"

    def __str__(self) -> str:
        return f"rockmate.untraced_backward[{self.call.name}]"

    @property
    def released_bytes(self) -> int:
        """What the handle stands for, which a run releases on its way."""
        return self.call.saved_bytes - 1

    def __call__(
        self, gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor]
    ) -> list[Tensor]:
        """Differentiates the run that made the handle, and frees what it saved."""
        graph: _Graph | None = getattr(handle, "graph", None)
        if graph is None:
            msg = f"retain_graph=True is not possible with the untraced submodule {self.call.name}, which runs its backward once."
            raise BackwardError(msg)
        del handle.graph  # pyright: ignore[reportAttributeAccessIssue]
        return graph.differentiate(
            gradients, values[: len(self.call.borrowed)], self.call.gradients
        )

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: gradients as `made_up` makes that argument, and a run that is made for this.

        Which gradients there are and how they are laid out matters: a kernel copies what it cannot read as it is.
        """
        forward, (inputs, buffers) = OpaqueForward(self.call).on_sample(made_up)
        *outputs, handle = forward(inputs, buffers)
        values = [
            *(inputs[index] for index in self.call.borrowed),
            *(outputs[index] for index in self.call.saved_outputs),
        ]
        return self, (made_up(0), handle, values)


@dataclass(slots=True)
class _Run:
    """One run of a submodule: its inputs as leaves of the autograd graph, its outputs, and what the graph borrows."""

    leaves: list[Tensor]
    outputs: list[Tensor]
    loan: ReleasableInputs

    def values(self, inputs: Sequence[Tensor], layouts: Sequence[Layout]) -> list[Tensor]:
        """The outputs as the plan has them: outside the graph, each in memory of its own, laid out as on the sample."""
        given = {*_keys(inputs)}
        values = []
        for tensor, layout in zip(self.outputs, layouts, strict=True):
            shares = storage_id(tensor) in given
            values.append(layout.laid_out(tensor.detach().clone() if shares else tensor.detach()))
            given.add(storage_id(tensor))
        return values


@dataclass(slots=True, eq=False)
class _Graph:
    """The autograd graph of one run."""

    leaves: list[Tensor]
    ends: list[
        GradientEdge | None
    ]  # of the outputs, whose memory would be held with the tensors themselves
    loan: ReleasableInputs

    @classmethod
    def of(cls, run: _Run) -> _Graph:
        wanted = [leaf for leaf in run.leaves if leaf.requires_grad]
        return cls(
            wanted,
            [get_gradient_edge(output) if output.requires_grad else None for output in run.outputs],
            run.loan,
        )

    def differentiate(
        self,
        gradients: Sequence[Tensor | None],
        borrowed: Sequence[Tensor],
        layouts: Sequence[Layout],
    ) -> list[Tensor]:
        pairs = [
            (end, gradient)
            for end, gradient in zip(self.ends, gradients, strict=True)
            if not (end is None or gradient is None)
        ]
        ends, given = [end for end, _ in pairs], [gradient for _, gradient in pairs]
        with self.loan.given(borrowed):
            found = torch.autograd.grad(ends, self.leaves, given, allow_unused=True)
        values, seen = [], {*_keys(gradient for gradient in gradients if gradient is not None)}
        for gradient, layout in zip(
            found, layouts, strict=True
        ):  # each is memory of its own: the plan counts it so
            made = layout.empty().zero_() if gradient is None else gradient
            value = layout.laid_out(made.clone() if storage_id(made) in seen else made)
            values.append(value if gradient is not None else undefined_gradient(value))
            seen.add(storage_id(made))
        return values


# --- memory of a run -----------------------------------------------------------------------------------------------------------


class _Memory:
    """The storages of some tensors, which are not kept alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.keys = _keys(tensors)
        self.num_bytes = {
            storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors
        }
        self._references = {
            storage_id(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in tensors
        }

    def held(self) -> set[int]:
        """Those that something still holds."""
        if not all(reference.expired() for reference in self._references.values()):
            gc.collect()  # it may be a cycle of what the run has left behind
        return {key for key, reference in self._references.items() if not reference.expired()}


@dataclass(slots=True)
class _Saved:
    """What an autograd graph saves: the storages, and how many tensors."""

    keys: set[int] = field(default_factory=set)
    count: int = 0

    def note(self, tensor: Tensor) -> None:
        """Adds a tensor that is saved."""
        self.count += 1
        self.keys.add(storage_id(tensor))


def _keys(tensors: Iterable[Tensor]) -> list[int]:
    """What tells the tensors' storages apart while they are alive."""
    return [storage_id(tensor) for tensor in tensors]


# --- finding and recording -----------------------------------------------------------------------------------------------------


def record_calls(
    model: nn.Module, tensors: list[Tensor], structure: Structure, names: Sequence[str]
) -> dict[str, OpaqueCall]:
    """The calls of the submodules `names`, and of recurrent layers, in one run of the model on its sample.

    The run saves nothing for a backward and leaves buffers and random state as they were.

    Raises:
        InvalidSampleError: there is no submodule of such a name, or the forward does not call it.
        UnsupportedModelError: what goes in or comes out is no nesting of tensors and constants.
    """
    modules = opaque_modules(model, names)
    if not modules:
        return {}
    seen: list[tuple[str, nn.Module, Any, Any, dict[str, torch.dtype]]] = []
    handles = []
    given_versions: dict[str, list[int]] = {}
    for path, module in modules.items():

        def begin(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            given_versions[path] = _versions(
                flatten((args, kwargs), what=f"the arguments of {path}")[0]
            )

        def note(module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            if (
                _versions(flatten((args, kwargs), what=f"the arguments of {path}")[0])
                != given_versions[path]
            ):
                raise _changes_its_input(path)
            seen.append((path, module, (args, kwargs), result, autocast_dtypes()))

        handles += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(note, with_kwargs=True),
        ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = structure.rebuild(tensors)
    devices = sorted(
        {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    )
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), _nothing_saved():
            functional_call(
                model, _in_their_places(model, buffers), args, kwargs, tie_weights=False
            )
    finally:
        for handle in handles:
            handle.remove()
    named, called = (
        {model.get_submodule(name) for name in names},
        {module for _, module, *_ in seen},
    )
    missing = [path for path, module in modules.items() if module in named and module not in called]
    if missing:
        msg = f"the forward does not call the submodule {missing[0]} on this sample. Leave it out of `untraced`."
        raise InvalidSampleError(msg)
    numbers: dict[str, int] = {}
    calls = {}
    for path, module, arguments, result, autocast in seen:
        numbers[path] = numbers.get(path, 0) + 1
        name = path if numbers[path] == 1 else f"{path} ({numbers[path]})"
        calls[name] = _recorded(name, module, arguments, result, autocast)
    return calls


def opaque_names(options: Mapping[str, str]) -> tuple[str, ...]:
    """The names that were given, among the options of a captured step."""
    return tuple(name for name in options.get("untraced", "").split(",") if name)


def opaque_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Paths and submodules that are not traced: those named and recurrent layers, less what is part of another of them.

    Raises:
        InvalidSampleError: there is no submodule of such a name.
    """
    paths = dict(model.named_modules(remove_duplicate=False))  # a module may have several
    unknown = [name for name in names if not name or name not in paths]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], paths, n=3, cutoff=0.3)
        hint = f" Near it: {', '.join(nearest)}." if nearest else ""
        msg = (
            f"untraced names {unknown[0]!r}, which is no submodule of {type(model).__name__}.{hint}"
        )
        raise InvalidSampleError(msg)
    named = {paths[name] for name in names}
    chosen = {
        path: module
        for path, module in model.named_modules()
        if module in named or isinstance(module, nn.RNNBase)
    }
    return {
        path: module
        for path, module in chosen.items()
        if not any(path.startswith(f"{other}.") for other in chosen)
    }


def _in_their_places(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replacements of parameters and buffers, once for each place that holds one.

    A tied tensor has several places. A module with two names has one: PyTorch, left to find them, swaps it twice and puts back the wrong
    one.
    """
    present = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    replacement = {id(present[name]): tensor for name, tensor in state.items()}
    places = {
        f"{path}.{name}" if path else name: tensor
        for path, part in module.named_modules()
        for name, tensor in (item for table in tensor_tables(part) for item in table.items())
    }
    return {
        place: replacement[id(tensor)]
        for place, tensor in places.items()
        if id(tensor) in replacement
    }


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor has been changed in place."""
    return [version_of(tensor) for tensor in tensors]


def _changes_its_input(name: str) -> UnsupportedModelError:
    msg = (
        f"the untraced submodule {name} changes an input in place, which the rest of the step would not see. Change a copy in its forward "
        "(x = x.clone()), or leave a larger part of the model untraced."
    )
    return UnsupportedModelError(msg)


@contextlib.contextmanager
def _nothing_saved() -> Iterator[None]:
    def refuse(_: Any) -> Tensor:
        msg = "this run is never differentiated"
        raise AssertionError(msg)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse):
        yield


def _recorded(
    name: str, module: nn.Module, arguments: Any, result: Any, autocast: Mapping[str, torch.dtype]
) -> OpaqueCall:
    given, structure = flatten(arguments, what=f"the arguments of {name}")
    returned, result_structure = flatten(result, what=f"the result of {name}")
    parameters = dict(module.named_parameters())
    inputs = (
        *(tensor.detach() for tensor in given),
        *(parameter.detach() for parameter in parameters.values()),
    )
    call = OpaqueCall(
        name=name,
        module=module,
        arguments=structure,
        result=result_structure,
        inputs=inputs,
        parameter_names=tuple(parameters),
        outputs=tuple(map(Layout.of, returned)),
        gradients=tuple(
            Layout.of(tensor) for tensor in (*given, *parameters.values()) if tensor.requires_grad
        ),
        differentiable=tuple(tensor.requires_grad for tensor in (*given, *parameters.values())),
        autocast=autocast,
    )
    call.observe()
    return call


# --- tracing -------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("rockmate::untraced", mutates_args=())
def _forward(tensors: list[Tensor], name: str) -> list[Tensor]:
    raise NotImplementedError


@torch.library.custom_op("rockmate::untraced_backward", mutates_args=())
def _backward(
    gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor], name: str
) -> list[Tensor]:
    raise NotImplementedError


@_forward.register_fake
def _(tensors: list[Tensor], name: str) -> list[Tensor]:
    call = _traced_calls[name]
    outputs = [layout.empty() for layout in call.outputs]
    return [*outputs, torch.empty(call.saved_bytes, dtype=torch.uint8, device=outputs[0].device)]


@_backward.register_fake
def _(
    gradients: Sequence[Tensor | None], handle: Tensor, values: Sequence[Tensor], name: str
) -> list[Tensor]:
    call = _traced_calls[name]
    return [layout.empty() for layout in call.gradients]


def _keep_handle(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    ctx.name = inputs[1]
    ctx.set_materialize_grads(
        False
    )  # zeros would give what leads to an unused output alone a gradient
    call = _traced_calls[ctx.name]
    ctx.save_for_backward(
        output[-1],
        *(inputs[0][index] for index in call.borrowed),
        *(output[index] for index in call.saved_outputs),
    )


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    call = _traced_calls[ctx.name]
    found = iter(
        torch.ops.rockmate.untraced_backward(
            gradients[:-1], ctx.saved_tensors[0], ctx.saved_tensors[1:], ctx.name
        )
    )
    return [next(found) if needs else None for needs in call.differentiable], None


_forward.register_autograd(_differentiate, setup_context=_keep_handle)


@contextlib.contextmanager
def traced_as_ops(calls: Mapping[str, OpaqueCall]) -> Iterator[None]:
    """Makes each of the submodules one op of the trace; only one trace may go on at a time."""
    by_module: dict[nn.Module, list[OpaqueCall]] = {}
    for call in calls.values():
        by_module.setdefault(call.module, []).append(call)
    _traced_calls.update(calls)
    before = {
        module: vars(module)["forward"] for module in by_module if "forward" in vars(module)
    }  # assigned by somebody else
    try:
        for module, own in by_module.items():
            module.forward = partial(
                _call_op, module, itertools.cycle(own)
            )  # the tracer runs the model more than once
        yield
    finally:
        _traced_calls.clear()
        for module in by_module:
            vars(module).pop("forward", None)
            vars(module).update({"forward": before[module]} if module in before else {})


def _call_op(module: nn.Module, order: Iterator[OpaqueCall], *args: Any, **kwargs: Any) -> Any:
    call = next(order)
    tensors, structure = flatten((args, kwargs), what=f"the arguments of {call.name}")
    parameters = dict(module.named_parameters())
    given = [*tensors, *(parameters[name] for name in call.parameter_names)]
    if (
        structure != call.arguments
        or tuple(tensor.requires_grad for tensor in given) != call.differentiable
    ):
        msg = f"the untraced submodule {call.name} is called in another way when the model is traced than on the sample."
        raise UnsupportedModelError(msg)
    return call.result.rebuild(torch.ops.rockmate.untraced(given, call.name)[:-1])


def install(graph: fx.Graph, calls: Mapping[str, OpaqueCall]) -> None:
    """Puts what runs the submodules in the place of the ops that stood for them in the trace."""
    for node in graph.nodes:
        if node.target is torch.ops.rockmate.untraced.default:
            node.target, node.args = OpaqueForward(calls[node.args[1]]), node.args[:1]
        elif node.target is torch.ops.rockmate.untraced_backward.default:
            node.target, node.args = OpaqueBackward(calls[node.args[3]]), node.args[:3]
