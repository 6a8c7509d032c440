"""Questions to the running backward, and gradients accumulated from within it.

These are the most fragile interfaces of this package: they belong to the engine, are undocumented,
and PyTorch uses them for its own needs alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as checkpoint
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

# A context that runs ops below autograd's layer of the dispatcher. `no_grad` records as little and
# passes through that layer, at 1 to 2 us an op. Version counters keep counting, which
# `torch.inference_mode` stops.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
_engine: Any = torch.autograd.Variable._execution_engine
# Public from PyTorch 2.15 on.
_queue_callback = getattr(torch.autograd.graph, "queue_callback", _engine.queue_callback)


def keeps_graph() -> bool:
    """Whether the running backward was called with `retain_graph=True`.

    The backward of an autograd function is not told.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore


def backward_id() -> int:
    """A number of the running backward, -1 outside one. The autograd functions are not told."""
    return torch._C._current_graph_task_id()


def _executes(node: Any) -> bool | None:
    """Whether the running backward runs a node; None inside `torch.autograd.grad` for a leaf's.

    The engine raises there. The backward of an autograd function is not told.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None


def will_execute(node: Any) -> bool:
    """Whether the running backward runs a node; False inside `torch.autograd.grad`.

    It tells `loss.backward()`, which runs the node of every leaf, from `torch.autograd.grad` and
    from `backward(inputs=...)`.
    """
    return _executes(node) is True


def is_asked_for(leaf_node: Any) -> bool:
    """Whether the running backward accumulates the gradient of a leaf or returns it."""
    return _executes(leaf_node) is not False


def returns_gradients_of(leaves: Iterable[torch.Tensor]) -> bool:
    """Whether the running backward is of an `autograd.grad` for one of the leaves."""
    edge_of = torch.inference_mode(False)(torch.autograd.graph.get_gradient_edge)
    return any(_executes(edge_of(leaf).node) is None for leaf in leaves if leaf.requires_grad)


def nodes_of(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """The nodes from which backwards of some tensors begin."""
    return {each.grad_fn for each in tensors if each.grad_fn is not None}


def call_before_backward(tensors: Iterable[torch.Tensor], hook: Callable[[Any], None]) -> bool:
    """Has a hook called with gradients before a backward of some tensors; whether any may come."""
    nodes = nodes_of(tensors)
    for node in nodes:
        node.register_prehook(hook)
    return bool(nodes)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Calls a function when the running backward has ended. Only a running one takes it."""
    _queue_callback(callback)


class _AfterBackward:
    """Calls a function when it goes: the engine drops it when its call has returned."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __call__(self) -> None:
        """The engine calls it at the end of the backward, where the thread's state is its own."""

    def __del__(self) -> None:
        if backward_id() == -1:
            self._callback()
        else:  # a backward within another one has ended
            after_backward(self._callback)


def after_backward(callback: Callable[[], object]) -> None:
    """Calls a function after the running backward, and those around it, whether or not they fail.

    `at_end_of_backward` is earlier: then the engine still puts the state of its thread back, and
    with it a profiler that was stopped meanwhile. Only a running backward takes it. What the
    function raises is printed, not raised.
    """
    at_end_of_backward(_AfterBackward(callback))


def has_saved_tensor_hooks() -> bool:
    """Whether somebody's hooks are on for what autograd saves: checkpoints, `save_on_cpu`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # pyright: ignore


def is_checkpointed() -> bool:
    """Whether what runs is to run again in a backward, by a checkpoint of PyTorch's, or does so."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    is_by_hooks = hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    function = getattr(torch._C._current_autograd_node(), "_forward_cls", None)  # pyright: ignore
    return is_by_hooks or function is checkpoint.CheckpointFunction


@contextlib.contextmanager
def saving(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """`saved_tensors_hooks` that are none of the user's, as those of a checkpoint are not.

    A selective checkpoint within, from PyTorch 2.15 on, warns of the user's hooks, and may give
    them what it saves. It passes over hooks with this mark to those that were on before. There is
    no public mark; older versions, which ask for none, read neither attribute. The user's pair goes
    at the end, since the graph holds `pack`.
    """
    own: Any = partial(pack)
    own._checkpoint_internal = True
    own._user_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore
    with torch.autograd.graph.saved_tensors_hooks(own, unpack):
        try:
            yield
        finally:
            del own._user_hooks


def dispatch_keys() -> tuple[Any, Any]:
    """The dispatcher's included and excluded keys in this thread, for `accumulate`."""
    return (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


def accumulate(
    parameters: tuple[torch.Tensor, ...], gradients: Sequence[torch.Tensor], keys: tuple[Any, Any]
) -> None:
    """Lets the engine add gradients to `.grad` and fire all hooks of the parameters.

    This is `torch.autograd.backward(parameters, gradients)` without its checks in Python. They hold
    here and take three times as long as the rest. Restoring the dispatcher's state has no public
    way: `keys` are those of `dispatch_keys` where ops pass through autograd, as hooks may need it.
    """
    with torch._C._ForceDispatchKeyGuard(*keys):
        _engine.run_backward(
            parameters,
            tuple(gradients),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def profiler_label(name: str) -> contextlib.AbstractContextManager[Any]:
    """A label in profiles. `torch.profiler.record_function` costs 70 us also if none is taken."""
    return torch.profiler.record_function(name) if is_profiling() else contextlib.nullcontext()


def is_profiling() -> bool:
    """Whether an autograd profiler is on. The public profilers do not say so."""
    return torch.autograd._profiler_enabled()


def active_transform() -> str | None:
    """Its name, such as "torch.func.vmap", the innermost first; None where there is none."""
    interpreter = peek_interpreter_stack()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    return "torch.autograd.forward_ad" if forward_ad._current_level >= 0 else None


def records_plainly() -> bool:
    """Whether autograd records calls, of tensors that have memory of their own."""
    return torch.is_grad_enabled() and active_transform() is None


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether it stands for several, as `torch.autograd.grad(is_grads_batched=True)` has it."""
    return is_legacy_batchedtensor(tensor)
