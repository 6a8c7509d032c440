"""Accumulates the gradients of parameters inside a planned backward.

[Note: who owns a gradient]

A *partial gradient* is the result of one op: the gradient of one use of a parameter. A tied
parameter has several of them. At any time it has one owner:

1. The emitted backward, from the op that computes it to the call of the sink. The code then drops
   its reference.
2. `parameter.grad`, which belongs to the user. The sink adds each partial gradient to it at once
   and keeps no reference, so that the first need not wait in memory for the last.
3. The sink, instead of 2, if the parameter has a tensor hook (`register_hook`). Such a hook must
   see the whole gradient once. The sink owns the sum of the partial gradients (`_hooked`) until the
   last one has arrived, and then gives it to autograd's engine. If one backward runs several
   planned steps, the last of them does so.

A sum of partial gradients that the graph makes begins with what earlier steps of the same backward
have added up, as in autograd.

A gradient is *complete* when its last partial gradient has been added. It is *final* when, further,
no later op of the backward reads the parameter. Hooks may fire from then on. They may change the
parameter and free `.grad`, as an optimizer inside the backward does.

Hooks fire when autograd's engine visits the parameter's accumulation node. If `.grad` is complete,
the engine gets an *empty gradient*, sparse and without elements, which changes nothing. A visit
from within a backward takes as long as ten small additions. Who waits at a node cannot always be
seen from Python: DistributedDataParallel waits in C++. So there are three cases:

- No hook is seen, and there is no process group. The parameters are inputs of the planned step. The
  running engine visits their nodes when the step is done, at a tenth of that cost
  (`rockmate.runtime.ddp.LastHooksSink`).
- There is a process group. The sink has a few nodes visited at a time, as gradients become final.
- A hook is seen. The sink has the node visited at once.

Two kinds of gradient never exist as a whole. The gradient of a large weight is a matrix product
with no other reader. It is computed and added slice by slice; the whole would often be the largest
tensor of the backward. Each element is the same dot product, so on CPU the result is bitwise equal.
A library that sums in another order for another shape may round differently, within 1e-6 relative.
The gradient of an embedding is zero but for the rows of the batch's tokens. Only these are computed
and added.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from rockmate._torch import engine
from rockmate._torch.allocator import Recording
from rockmate._torch.members import has_accumulation_hooks, has_tensor_hooks
from rockmate._torch.subclasses import is_subclassed
from rockmate.capture.wrapping import NO_WRAPPINGS, Wrapping
from rockmate.errors import SignatureMismatchError
from rockmate.graph.ir import SlicedMatmul
from rockmate.graph.parameters import Binding
from rockmate.offload.trained_home import gradient_at_home, send_gradient_home
from rockmate.ops.shards import Reduction, Wait, issue_reduction, zero_parts
from rockmate.ops.undefined_gradient import is_undefined, undefined_gradient
from rockmate.runtime.held_gradients import HeldGradients
from rockmate.runtime.pending_steps import PartialGradients

# In a process group, nodes are visited as soon as this many parameters wait, ...
_MAX_WAITING = 8
# ... or parameters of more than this many bytes: far less than a bucket that a group reduces.
_MAX_WAITING_BYTES = 1 << 20


class GradientSink:
    """Accumulates partial gradients and fires the parameters' hooks; lives for one backward.

    The emitted backward calls it.

    Attributes:
        fires_hooks: False if the engine fires them when the step is done, or if a later step of the
            same backward does.
        held: gradients of a sharded model that wait for their reduction; None if there are none,
            and for gradients that are dropped.
        holding: addresses of parameters whose gradients wait there in this backward.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        partial: PartialGradients | None = None,
        *,
        fires_hooks: bool = True,
        wrappings: Mapping[str, Wrapping] = NO_WRAPPINGS,
        held: HeldGradients | None = None,
    ) -> None:
        """Takes the dispatcher's state as it is now for the hooks.

        Args:
            parameters: name -> leaf that the forward ran with.
            partial: what earlier steps of the same backward have accumulated.
            fires_hooks: whether this step is the last of that backward.
            wrappings: name -> how to wrap the gradient of a parameter.
            held: see the class.
        """
        self._wrappings = wrappings
        self.held = held
        self.holding = frozenset[int]() if held is None else held.holding()
        self.fires_hooks = fires_hooks
        self._leaves = parameters
        self._dispatch_keys = engine.dispatch_keys()
        partial = partial or PartialGradients()
        self._used, self._hooked, self._unfired = partial.used, partial.hooked, partial.unfired
        self._continued = set[str]()  # names of parameters whose `.grad` the sum goes on from
        # Parameters with a final gradient in `.grad`, whose nodes are not yet visited; their bytes.
        self._waiting: list[torch.Tensor] = []
        self._waiting_bytes = 0

    def issue(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        dims: Sequence[int],
        *settings: Any,
    ) -> Wait:
        """Begins to reduce whole gradients, or holds them.

        Args:
            names: of the parameters.
            gradients: see `issue_reduction`, as for `dims`.
            dims: see there.
            *settings: fields of the `Reduction`.

        Returns:
            What gives this rank's parts; undefined ones if whole gradients are held.
        """
        how = Reduction(*settings)
        if self.held is None:
            return issue_reduction(gradients, dims, how)
        parameters = [self._leaves[name] for name in names]
        if id(parameters[0]) not in self.holding:
            return issue_reduction(self.held.joined(parameters, gradients), dims, how)
        self.held.add(parameters, gradients, how)
        zeros = zero_parts(gradients, dims, how)
        return lambda: [*map(undefined_gradient, zeros)]

    def reduce(self, names: Sequence[str], *args: Any) -> list[torch.Tensor]:
        """What `issue` begins; the whole gradients are live until it has ended."""
        return self.issue(names, *args)()

    def continued(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The first gradient of a sum that the graph makes, added to those of earlier steps."""
        parameter = self._leaves.get(name)
        if parameter is None or not parameter.requires_grad or name in self._wrappings:
            return gradient
        if id(parameter) in self._hooked:
            return self._hooked.pop(id(parameter)).add_(gradient)
        total = None if self._needs_whole(parameter) else parameter.grad
        if total is None or total.layout is not torch.strided or id(parameter) not in self._used:
            return gradient
        self._continued.add(name)
        return total.add_(gradient)

    def accumulate(self, name: str, gradient: torch.Tensor, *, is_final: bool) -> None:
        """Adds a partial gradient to the `.grad` of a parameter; hooks fire if it is final.

        An undefined gradient leaves `.grad` as it is, as in autograd.
        """
        parameter = self._leaves[name]
        # Frozen since the forward: autograd drops the gradient, too.
        if not parameter.requires_grad:
            return
        if is_undefined(gradient):
            self.skip(name, is_final=is_final)
            return
        self._used.add(id(parameter))
        if name in self._wrappings:
            gradient = self._wrappings[name].wrap(gradient, parameter)
        if self._needs_whole(parameter):
            self._accumulate_hooked(parameter, gradient, is_final=is_final)
            return
        total = parameter.grad
        if total is None:
            parameter.grad = _new_gradient(parameter).copy_(gradient)
        elif name in self._continued:
            total.copy_(gradient)
        elif total.layout is torch.strided:
            total.add_(gradient)
        else:
            # Operands in the order of autograd's engine.
            parameter.grad = gradient + total
        if is_final:
            self._fire_hooks(parameter)

    def skip(self, name: str, *, is_final: bool) -> None:
        """Takes an undefined partial gradient."""
        if is_final:
            self.fire_hooks(name)

    def accumulate_matmul(
        self, name: str, left: torch.Tensor, right: torch.Tensor, *, is_final: bool, **fields: Any
    ) -> None:
        """Adds `left @ right`, or its transpose, to `.grad` in the form with these fields."""
        parameter, form = self._leaves[name], SlicedMatmul(**fields)
        if not parameter.requires_grad:
            return
        if self._needs_whole(parameter):
            whole = torch.mm(left, right)
            self.accumulate(name, whole.t() if form.is_flipped else whole, is_final=is_final)
            return
        self._used.add(id(parameter))
        gradient = _grad_or_zeros(parameter)
        total = gradient.t() if form.is_flipped else gradient
        if form.is_one_of_several:
            total.addmm_(left, right)
        else:
            _add_slices(total, left, right, form)
        if is_final:
            self._fire_hooks(parameter)

    def accumulate_embedding(
        self,
        name: str,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        num_weights: int,
        padding_idx: int,
        *,
        is_final: bool,
    ) -> None:
        """Adds the gradient of an embedding's weight to `.grad`, only the rows of its tokens.

        The rows are numbered without gaps. ATen's own kernel adds up the tokens of each row, in its
        own order.
        """
        parameter = self._leaves[name]
        if not parameter.requires_grad:
            return
        backward = torch.ops.aten.embedding_dense_backward
        if self._needs_whole(parameter):
            whole = backward(gradient, indices, num_weights, padding_idx, False)
            self.accumulate(name, whole, is_final=is_final)
            return
        self._used.add(id(parameter))
        tokens, row_of_position = _numbered(indices)
        rows = backward(gradient, row_of_position, tokens.numel(), -1, False)
        if padding_idx >= 0:
            rows.masked_fill_((tokens == padding_idx).unsqueeze(1), 0.0)
        _grad_or_zeros(parameter).index_add_(0, tokens, rows)
        if is_final:
            self._fire_hooks(parameter)

    def fire_hooks(self, name: str) -> None:
        """Fires the hooks of a parameter whose gradient is complete; none if it is undefined."""
        parameter = self._leaves[name]
        if not parameter.requires_grad or id(parameter) not in self._used:
            return
        self._fire(parameter)

    def close(self) -> None:
        """Has the nodes visited that still wait; to be called after the last gradient."""
        if self.fires_hooks and self._unfired:
            for parameter in list(self._unfired.values()):
                self._fire(parameter)
        self._visit_waiting()
        if self.held and self.fires_hooks:
            self.held.reduce_others(self.holding)

    def _visit_waiting(self) -> None:
        if self._waiting:
            waiting, self._waiting, self._waiting_bytes = tuple(self._waiting), [], 0
            self._visit(
                waiting, tuple([empty_gradient(p.shape, p.dtype, p.device) for p in waiting])
            )

    def _fire(self, parameter: torch.Tensor) -> None:
        if self.fires_hooks and id(parameter) in self._hooked:
            self._unfired.pop(id(parameter), None)
            self._visit((parameter,), (self._hooked.pop(id(parameter)),))
        else:
            self._fire_hooks(parameter)

    def _needs_whole(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's whole gradient is needed at once.

        A tensor hook must see it. To a parameter of a class of its own the engine adds it, by the
        rules of that class.
        """
        is_begun = bool(self._hooked) and id(parameter) in self._hooked
        return has_tensor_hooks(parameter) or is_subclassed(parameter) or is_begun

    def _accumulate_hooked(
        self, parameter: torch.Tensor, gradient: torch.Tensor, *, is_final: bool
    ) -> None:
        partial = self._hooked.pop(id(parameter), None)
        whole = gradient if partial is None else partial + gradient
        if is_final and self.fires_hooks:
            self._unfired.pop(id(parameter), None)
            self._visit((parameter,), (whole,))
        else:
            self._unfired[id(parameter)] = parameter
            # The emitted backward may reuse the memory of `gradient`.
            self._hooked[id(parameter)] = whole.clone() if partial is None else whole

    def _fire_hooks(self, parameter: torch.Tensor) -> None:
        """Has the node of a parameter visited: at once if a hook is seen, else with others."""
        if not self.fires_hooks:
            self._unfired[id(parameter)] = parameter
            return
        self._unfired.pop(id(parameter), None)
        self._waiting.append(parameter)
        self._waiting_bytes += parameter.nbytes
        is_full = len(self._waiting) == _MAX_WAITING or self._waiting_bytes > _MAX_WAITING_BYTES
        if is_full or has_accumulation_hooks(parameter):
            self._visit_waiting()

    def _visit(
        self, parameters: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]
    ) -> None:
        """Lets the engine accumulate gradients and fire the hooks of their parameters."""
        engine.accumulate(parameters, gradients, self._dispatch_keys)
        for parameter in parameters:
            send_gradient_home(parameter)


def _numbered(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a batch, and for each position the number of its token among them.

    Their number depends on the batch. On CUDA the host would have to wait for it, so there is an
    entry for each position instead. Entries beyond the last token are token 0 and have no position.
    """
    return (
        _numbered_on_device(indices)
        if indices.is_cuda
        else torch.unique(indices, return_inverse=True)
    )


def _numbered_on_device(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `_numbered`; no size depends on a value."""
    ordered, order = indices.flatten().sort()
    is_next = ordered.diff(prepend=ordered[:1]) != 0
    numbers = is_next.cumsum(0)
    tokens = torch.zeros_like(ordered).scatter_(0, numbers, ordered)
    return tokens, torch.empty_like(numbers).scatter_(0, order, numbers).view(indices.shape)


def _add_slices(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, form: SlicedMatmul
) -> None:
    for start in range(0, total.shape[form.dim], form.slice_size):
        length = min(form.slice_size, total.shape[form.dim] - start)
        rows = left.narrow(0, start, length) if form.dim == 0 else left
        columns = right.narrow(1, start, length) if form.dim == 1 else right
        total.narrow(form.dim, start, length).add_(torch.mm(rows, columns))


def _grad_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        parameter.grad = _new_gradient(parameter).zero_()
    return parameter.grad


def _new_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if (at_home := gradient_at_home(parameter)) is not None:
        return at_home
    Recording.leave_out(parameter.nbytes)
    return torch.empty_like(parameter)


@lru_cache(maxsize=256)
def empty_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty sparse gradient: fires accumulation hooks and leaves `.grad` untouched."""
    return torch.empty(shape, dtype=dtype, device=device, layout=torch.sparse_coo)


class Anchor:
    """The empty leaf that makes a planned step's outputs require grad, and its node."""

    def __init__(self, device: torch.device) -> None:
        self.leaf = torch.empty(0, device=device, requires_grad=True)
        self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node

    def is_visited(self) -> bool:
        """Whether the running backward accumulates into every leaf, as `loss.backward()` does."""
        return engine.will_execute(self.node)


class GradientOwners:
    """The parameters of a model to whose `.grad` a program's backward adds."""

    def __init__(self, binding: Binding, names: Sequence[str]) -> None:
        self._names, self._places = names, [binding.places[name] for name in names]
        # Those of the last call and their accumulation nodes. Autograd makes a node anew for each
        # gradient if nobody holds it, at the cost of a small addition.
        self._last: dict[str, torch.Tensor] = {}
        self._nodes: list[Any] = []

    def now(self) -> dict[str, torch.Tensor]:
        """Name -> parameter in the module now.

        Raises:
            SignatureMismatchError: one of them is no leaf, so it has no `.grad` to add to.
        """
        owners: list[Any] = [holder[key] for holder, key in self._places]
        if self._last and all(map(operator.is_, owners, self._last.values())):
            return self._last
        named = dict(zip(self._names, owners, strict=True))
        derived = [name for name, owner in named.items() if not owner.is_leaf]
        if derived:
            msg = (
                f"{derived[0]} is computed from other tensors in this call (functional_call, a "
                "swapped parameter), so its gradient has no place in .grad. Make the module with "
                'gradients="returned".'
            )
            raise SignatureMismatchError(msg)
        self._nodes = [torch.autograd.graph.get_gradient_edge(owner).node for owner in owners]
        self._last = named
        return named

    def release(self) -> None:
        """Drops accumulation nodes, whose metadata `parameter.data = ...` makes stale."""
        self._last = {}
        self._nodes.clear()
