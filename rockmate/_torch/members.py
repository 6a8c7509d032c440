"""The dictionaries of a module, and the hooks of modules and tensors.

The public ways (`named_parameters`, `register_*_hook`) list or add. They tell neither which object
stands under a name in one module, nor whether any hook is registered, nor can they put a tensor
back under its name.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_code
from torch.nn.utils import parametrize

from rockmate._util import attributes_set

MEMBER_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# Lists in which a recurrent layer has its parameters a second time; it renews them by itself.
RECURRENT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})

# Fast readers for `ModelWatch`, which runs with each training call. The argument is `vars(module)`.
member_tables_of = itemgetter("_modules", "_parameters", "_buffers")
module_hooks_of = itemgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks"
)


_GLOBAL_HOOKS = (
    module_code._global_forward_pre_hooks, module_code._global_forward_hooks,
    module_code._global_backward_pre_hooks, module_code._global_backward_hooks,
)  # fmt: skip


def hooks_within(modules: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    """The script's hooks around forwards and backwards of some modules, and those of all."""
    tables = chain(_GLOBAL_HOOKS, *(module_hooks_of(vars(each)) for each in modules))
    found = [hook for table in tables if table for hook in table.values()]
    return [e for e in found if not str(getattr(e, "__module__", "")).startswith("torch.")]


# Readers of a tensor's hooks.
tensor_hooks_of = attrgetter("_backward_hooks")
all_hooks_of = attrgetter("_post_accumulate_grad_hooks", "_backward_hooks")


def is_of_several(hook: Any) -> bool:
    """Whether a tensor hook is that of `torch.autograd.graph.register_multi_grad_hook`."""
    code = getattr(hook, "__code__", None)  # the name of a wrapper is that of what it wraps
    return code is not None and code.co_qualname.startswith("register_multi_grad_hook.")


def has_node_hooks(leaf: torch.Tensor) -> bool:
    """Whether hooks wait at a leaf's accumulation node; only the handle of one leads to others."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    for register in (node.register_hook, node.register_prehook):
        handle = register(print)
        handle.remove()
        if handle.hooks_dict_ref():
            return True
    return False


def parametrizations_afresh() -> contextlib.AbstractContextManager[None]:
    """Has what `parametrize.cached()` keeps be computed again within, and kept for within alone.

    The cache is a global of PyTorch's, which hands a tensor of a trace or a trial to later calls.
    """
    return attributes_set((parametrize, "_cache", {}))


def tensor_tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's own parameters and buffers by name, as dictionaries that can be written."""
    return module._parameters, module._buffers  # pyright: ignore[reportReturnType]


def named_members(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a model's modules, one with several names under each."""
    named = model.named_parameters, model.named_buffers
    return dict(chain.from_iterable(each(remove_duplicate=False) for each in named))


def writable_tables(model: nn.Module) -> list[dict[str, Any]]:
    """The parameters and buffers of a model's modules by name; those of TorchScript are fixed."""
    tables = (table for module in model.modules() for table in tensor_tables(module))
    return [table for table in tables if isinstance(table, dict)]


def submodule_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """The module's children by name, absent ones included, as a dictionary that can be written."""
    return module._modules


def modules_within(module: nn.Module) -> list[nn.Module]:
    """The module and all below it, each once: `modules()` in a fraction of the time."""
    found, known = [module], {module}
    for each in found:
        for child in each._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


def module_at(module: nn.Module, path: str) -> nn.Module:
    """The one at a path below: `get_submodule` in a fraction of the time."""
    for name in path.split("."):
        child = module._modules[name]
        assert child is not None
        module = child
    return module


def share_members(wrapper: nn.Module, module: nn.Module) -> None:
    """Gives `wrapper` the dictionaries of `module`: a registration in one appears in the other."""
    for name in MEMBER_TABLES:
        wrapper.__dict__[name] = getattr(module, name)


def forward_hooks(module: nn.Module) -> Mapping[int, Any]:
    """The module's forward hooks by key."""
    return module._forward_hooks


def all_forward_hooks(module: nn.Module) -> Mapping[int, Any]:
    """The hooks ahead of the module's forward and behind it, by key."""
    return {**module._forward_pre_hooks, **module._forward_hooks}


def other_hooks(module: nn.Module) -> Mapping[int, Any]:
    """The hooks ahead of the module's forward and around its backward, by key."""
    return {**module._forward_pre_hooks, **module._backward_hooks, **module._backward_pre_hooks}


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook sees, or changes, the tensor's gradient."""
    return bool(tensor._backward_hooks)


def has_accumulation_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook runs after the parameter's gradient has been accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)  # pyright: ignore


def has_global_hooks() -> bool:
    """Whether hooks are registered around the forwards or backwards of all modules."""
    return any(map(bool, _GLOBAL_HOOKS))


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` has wrapped the model. `OptimizedModule` is private, too."""
    return "_orig_mod" in model._modules


def innermost(model: nn.Module) -> nn.Module:
    """The model that was compiled, perhaps more than once; another model as it is."""
    while is_compiled(model):
        model = model._orig_mod  # pyright: ignore[reportAssignmentType]
    return model


def has_compiled(model: nn.Module) -> bool:
    """Whether the model or a submodule has been compiled; `module.compile()` has no public mark."""
    modules = modules_within(model)
    return any(is_compiled(each) or compiled_call(each) is not None for each in modules)


def is_member(module: nn.Module, name: str) -> bool:
    """Whether a parameter, buffer or submodule of the module has this name."""
    return name in module._parameters or name in module._buffers or name in module._modules


def compiled_call(module: nn.Module) -> Any:
    """What the module's calls run in place of its forward, as `compile` leaves it; None as a rule.

    It is no part of a module's pickle and of its copies.
    """
    return vars(module).get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Has the module's calls run `call`; with None, its forward."""
    vars(module)["_compiled_call_impl"] = call
    if call is None:
        del vars(module)["_compiled_call_impl"]


_plain_compile = nn.Module.compile
_after_compile = Counter[Callable[[nn.Module, Any], None]]()


def call_after_compile(function: Callable[[nn.Module, Any], None]) -> Callable[[], None]:
    """Has a function called behind each `module.compile()`, until what is returned is called.

    It gets the module, and what its calls ran before, which PyTorch's own method replaces.
    """

    def compile_and_call(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        before = compiled_call(module)
        _plain_compile(module, *args, **kwargs)
        for each in [*_after_compile]:
            each(module, before)

    def end() -> None:
        _after_compile[function] -= 1
        if not _after_compile[function]:
            del _after_compile[function]
        if not _after_compile:
            setattr(nn.Module, "compile", _plain_compile)  # noqa: B010

    if not _after_compile:
        setattr(nn.Module, "compile", compile_and_call)  # noqa: B010
    _after_compile[function] += 1
    return end


class _Finder:
    def __init__(self, find: Callable[[nn.Module], Any]) -> None:
        self._find = find

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None or torch.compiler.is_dynamo_compiling():
            return None
        return self._find(module)


def find_calls(find: Callable[[nn.Module], Any] | None) -> None:
    """Has `find` asked at each call of a module for what runs in place of its forward.

    It must not raise an `AttributeError`. No frame of its own is around the module's code, and with
    None all is as PyTorch has it.
    """
    setattr(nn.Module, "_compiled_call_impl", None if find is None else _Finder(find))  # noqa: B010
