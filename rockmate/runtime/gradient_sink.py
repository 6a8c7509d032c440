"""How parameter gradients leave the backward: each is added to `.grad` as soon as it is final, and its hooks fire once.

Gradients are added to `.grad` directly. Autograd's engine then visits the parameter's accumulation node with a gradient without any
element, so that all that is hooked to it fires. A weight that is tied arrives as several gradients; its node is visited once, after the
last, and the first need not wait in memory for it. A visit from within a backward takes as long as ten small additions, and who waits
for it cannot always be seen from Python (DistributedDataParallel does): so none is left out, but where no hook is seen, parameters are
visited a few at a time in a group of processes, and otherwise all by the engine that runs anyway, when the step is done.

The gradient of a large weight is a matrix product that nobody else reads. It is made and added slice by slice: the whole of it, often
the largest tensor of the backward, never exists. Each element is the same dot product, so on CPU the result is bitwise the same; a
library that sums in another order for another shape may round it differently (within 1e-6 relative). The gradient of an embedding is
zero but for the rows of the tokens at hand, so only those are made and added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from rockmate._torch.engine import accumulate, dispatch_keys
from rockmate._torch.members import has_accumulation_hooks, has_tensor_hooks
from rockmate.graph.ir import SlicedMatmul
from rockmate.ops.unused_gradient import is_undefined

_VISITED_AT_ONCE = 8  # parameters
_VISITED_WITHIN_BYTES = (
    1 << 20
)  # of them: far less than a bucket that data-parallel training reduces at once


def emit_gradient(sink: GradientSink, gradient: torch.Tensor, name: str, is_final: bool) -> None:
    """Hands one parameter gradient over; called from the emitted backward."""
    sink.accept(name, gradient, is_final=is_final)


def emit_sliced_matmul(
    sink: GradientSink,
    left: torch.Tensor,
    right: torch.Tensor,
    name: str,
    is_final: bool,
    is_flipped: bool,
    dim: int,
    slice_size: int,
    is_one_of_several: bool,
) -> None:
    """Hands over the product of two matrices, slice by slice; called from the emitted backward."""
    product = SlicedMatmul(
        is_flipped=is_flipped, dim=dim, slice_size=slice_size, is_one_of_several=is_one_of_several
    )
    sink.accept_product(name, left, right, product, is_final=is_final)


def emit_embedding_gradient(
    sink: GradientSink,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    name: str,
    is_final: bool,
) -> None:
    """Hands over the gradient of an embedding, only the rows that a token touches; called from the emitted backward."""
    sink.accept_embedding(name, gradient, indices, num_weights, padding_idx, is_final=is_final)


def fire_hooks(sink: GradientSink, name: str) -> None:
    """Fires the hooks of a parameter that was still to be read when its gradient was final; called from the emitted backward."""
    sink.finish(name)


class GradientSink:
    """Takes parameter gradients as they become final."""

    fires_hooks = True  # otherwise someone else does, when the step is done

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Takes the parameters that the forward ran with, by name; hooks fire in the dispatcher's state at this moment."""
        self._leaves = parameters
        self._dispatch_keys = dispatch_keys()
        self._waiting: dict[int, torch.Tensor] = {}
        self._unused: set[int] = set()  # parameters of which a use has come to nothing
        self._begun: set[int] = set()  # parameters that have a gradient, with another one to come
        self._complete: list[
            torch.Tensor
        ] = []  # their `.grad` is, and their nodes are yet to be visited
        self._complete_bytes = 0

    def accept(self, name: str, gradient: torch.Tensor, *, is_final: bool) -> None:
        """Adds `gradient` to the `.grad` of parameter `name`; hooks fire if it is the parameter's last of this backward.

        One that is marked as unused leaves all as it is, as autograd does.
        """
        parameter = self._leaves[name]
        if not parameter.requires_grad:  # frozen since the forward: autograd would drop it, too
            return
        if is_undefined(gradient):
            self._unused.add(id(parameter))
            if is_final:
                self.finish(name)
            return
        self._begin(parameter, is_final=is_final)
        if self._must_see_whole(parameter):
            waiting = self._waiting.pop(id(parameter), None)
            whole = gradient if waiting is None else waiting + gradient
            if is_final and self.fires_hooks:
                self._accumulate((parameter,), (whole,))
            else:
                self._waiting[id(parameter)] = whole.clone() if waiting is None else whole
            return
        at_rest = parameter.grad
        if at_rest is None:
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        elif at_rest.layout is torch.strided:
            at_rest.add_(gradient)
        else:
            parameter.grad = gradient + at_rest  # in the order that the engine takes
        if is_final:
            self._visit(parameter)

    def finish(self, name: str) -> None:
        """Fires the hooks of parameter `name`, whose gradient has been accepted as not final; none if the step has not used it."""
        parameter = self._leaves[name]
        if not parameter.requires_grad or id(parameter) in self._unused - self._begun:
            return
        if self.fires_hooks and id(parameter) in self._waiting:
            self._accumulate((parameter,), (self._waiting.pop(id(parameter)),))
        else:
            self._visit(parameter)

    def _visit(self, parameter: torch.Tensor) -> None:
        """Has the node of a parameter whose `.grad` is complete visited: at once if a hook is seen, else with others."""
        if not self.fires_hooks:
            return
        self._complete.append(parameter)
        self._complete_bytes += parameter.nbytes
        is_enough = (
            len(self._complete) == _VISITED_AT_ONCE or self._complete_bytes > _VISITED_WITHIN_BYTES
        )
        if is_enough or has_accumulation_hooks(parameter):
            self.close()

    def close(self) -> None:
        """Visits the nodes that are left; to be called when nothing more is to come."""
        if self._complete:
            complete, self._complete, self._complete_bytes = tuple(self._complete), [], 0
            self._accumulate(
                complete, tuple([nothing(p.shape, p.dtype, p.device) for p in complete])
            )

    def _accumulate(
        self, parameters: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]
    ) -> None:
        """Lets the engine add gradients to `.grad` and fire the hooks of the parameters."""
        accumulate(parameters, gradients, self._dispatch_keys)

    def accept_product(
        self,
        name: str,
        left: torch.Tensor,
        right: torch.Tensor,
        product: SlicedMatmul,
        *,
        is_final: bool,
    ) -> None:
        """Adds `left @ right` (or its transpose) to the `.grad` of parameter `name` without ever holding all of it."""
        parameter = self._leaves[name]
        if not parameter.requires_grad:
            return
        if self._must_see_whole(parameter):
            whole = torch.mm(left, right)
            self.accept(name, whole.t() if product.is_flipped else whole, is_final=is_final)
            return
        self._begin(parameter, is_final=is_final)
        gradient = _gradient_at_rest(parameter)
        total = gradient.t() if product.is_flipped else gradient
        if product.is_one_of_several:
            total.addmm_(left, right)
        else:
            _add_by_slices(total, left, right, product)
        if is_final:
            self._visit(parameter)

    def accept_embedding(
        self,
        name: str,
        gradient: torch.Tensor,
        indices: torch.Tensor,
        num_weights: int,
        padding_idx: int,
        *,
        is_final: bool,
    ) -> None:
        """Adds the gradient of an embedding's weight to the `.grad` of parameter `name`, touched rows only.

        Rows are numbered anew without the untouched ones, and ATen's own kernel adds up the tokens of each, in its order.
        """
        parameter = self._leaves[name]
        if not parameter.requires_grad:
            return
        backward = torch.ops.aten.embedding_dense_backward
        if self._must_see_whole(parameter):
            self.accept(
                name,
                backward(gradient, indices, num_weights, padding_idx, False),
                is_final=is_final,
            )
            return
        self._begin(parameter, is_final=is_final)
        touched, row_of_token = torch.unique(indices, return_inverse=True)
        rows = backward(gradient, row_of_token, touched.numel(), -1, False)
        if padding_idx >= 0:
            rows[touched == padding_idx] = 0.0
        _gradient_at_rest(parameter).index_add_(0, touched, rows)
        if is_final:
            self._visit(parameter)

    def _begin(self, parameter: torch.Tensor, *, is_final: bool) -> None:
        if not is_final:
            self._begun.add(id(parameter))

    def _must_see_whole(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has a tensor hook, which must see its whole gradient at once."""
        return bool(
            has_tensor_hooks(parameter) or (self._waiting and id(parameter) in self._waiting)
        )


def _add_by_slices(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, product: SlicedMatmul
) -> None:
    for start in range(0, total.shape[product.dim], product.slice_size):
        length = min(product.slice_size, total.shape[product.dim] - start)
        rows = left.narrow(0, start, length) if product.dim == 0 else left
        columns = right.narrow(1, start, length) if product.dim == 1 else right
        total.narrow(product.dim, start, length).add_(torch.mm(rows, columns))


def _gradient_at_rest(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's `.grad`, made of zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


@lru_cache(maxsize=256)
def nothing(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A gradient that adds nothing: sparse and without elements, so that adding it takes no pass over `.grad`."""
    return torch.empty(shape, dtype=dtype, device=device, layout=torch.sparse_coo)
