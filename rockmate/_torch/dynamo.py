"""What a backend of `torch.compile` has to know of the graph that Dynamo hands it.

The interface of a backend is public: a graph and example inputs. It says neither where an input
comes from, nor which call of `torch.compile` it serves, nor whether the frame was broken. Dynamo
keeps these beside the graph, under private names.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

_TORCH = str(Path(torch.__file__).parent)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)
_MEMBER = re.compile(r"_modules\['([^']+)'\]|_(?:parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of Dynamo's graph.

    Attributes:
        name: of its node.
        path: of the parameter or buffer in its module, as in a state dict; empty for other inputs.
        is_buffer: whether it is a buffer of a module.
        size: the symbol that it stands for, if it is a size or another integer; else None.
        shape: of a tensor; sizes that are symbols are symbols here. Empty if it is not known.
    """

    name: str
    path: str
    is_buffer: bool
    size: Any
    shape: tuple[Any, ...]


def is_exporting() -> bool:
    """Whether `torch.export` traces, also in code that Dynamo traces for it.

    There `torch.compiler.is_exporting()` is always true before PyTorch 2.13; the flag behind it is
    read as it is.
    """
    return torch.compiler._is_exporting_flag


def placeholders_of(graph: fx.GraphModule) -> list[Placeholder]:
    """The inputs of a graph, in order."""
    return [_placeholder(node) for node in graph.graph.find_nodes(op="placeholder")]


def _placeholder(node: fx.Node) -> Placeholder:
    source = _source_name(_source_of(node))
    parts = [module or member for module, member in _MEMBER.findall(source)]
    is_member = source.endswith("]") and ("._parameters[" in source or "._buffers[" in source)
    example = node.meta.get("example_value")
    is_tensor = isinstance(example, torch.Tensor)
    return Placeholder(
        name=node.name,
        path=".".join(parts) if is_member else "",
        is_buffer="._buffers[" in source,
        size=_expression(example) if isinstance(example, torch.SymInt) else None,
        shape=tuple(map(_expression, example.shape)) if is_tensor else (),
    )


def _source_of(node: fx.Node) -> Any:
    """Where Dynamo found an input; None if it is made by another part of a graph that was split."""
    argument = node.meta.get("grapharg")
    return getattr(argument, "source", None) or getattr(node, "_dynamo_source", None)


def _source_name(source: Any) -> Any:
    return "" if source is None else source.name


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def output_examples(graph: fx.GraphModule) -> list[Any]:
    """The fake values of a graph's outputs, in order; constants as they are."""
    returned: Any = graph.graph.output_node().args[0]
    outputs = returned if isinstance(returned, tuple | list) else (returned,)
    return [
        node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in outputs
    ]


def evaluated(value: Any, sizes: dict[Any, int]) -> Any:
    """An output that is no tensor, for the sizes of a call: symbol -> number."""
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value
    expression: Any = value.node.expr
    result = expression.xreplace(sizes)
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return next(kind(result) for symbolic, kind in kinds.items() if isinstance(value, symbolic))


def module_path(node: fx.Node) -> str:
    """Path of the submodule whose forward made a node of Dynamo's graph; empty at the top."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)  # L['self'].layers[0] and the like
    root, _, rest = path.removeprefix("L.").removeprefix("G.").partition(".")
    parts = [part for part in rest.split(".") if part and part not in ("_modules", "slice")]
    return ".".join(parts) if root else ""


# What Dynamo writes for a call of `torch.utils.checkpoint.checkpoint`.
checkpointed_call = torch.ops.higher_order.tag_activation_checkpoint


def checkpointed_bodies(graph: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs of checkpointed calls, those within others included."""
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=checkpointed_call):
        body = getattr(graph, str(node.args[0].target))
        found += [body, *checkpointed_bodies(body)]
    return found


def checkpoint_contexts(body: fx.GraphModule) -> dict[str, Any]:
    """The `context_fn` of a checkpointed call, as an argument; empty if it has none."""
    contexts = body.meta.get("_checkpoint_context_fn")
    return {} if contexts is None else {"context_fn": contexts}


# --- the frame ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Break:
    """Why, and where, a frame was not captured whole.

    Attributes:
        reason: in Dynamo's words; empty if it does not say.
        place: the user's line, as "file:line in function"; empty if it is not known.
        is_of_data_parallel: whether Dynamo splits the graph of a DistributedDataParallel module, to
            reduce its gradients bucket by bucket.
    """

    reason: str
    place: str
    is_of_data_parallel: bool = False

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return (self.place or "a line that Dynamo does not name") + why


def break_of(graph: fx.GraphModule) -> Break | None:
    """The break at which a graph ends; None if it ends with its frame."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    first, *_ = str(reason.reason).strip().splitlines() or [""]
    last = reason.user_stack[-1] if reason.user_stack else None
    if first.startswith("DDPOptimizer"):
        return Break(first, "the module in DistributedDataParallel", is_of_data_parallel=True)
    place = f"{last.filename}:{last.lineno} in {last.name}" if last else ""
    return Break(first, place)


def broken_caller() -> Break | None:
    """The user's line that called the frame which is compiled, where that is not the whole model.

    Dynamo compiles the outermost frame of the user's code first. Another one is compiled by itself
    only if an outer one was broken: it is the rest of that frame, or a function that it calls. To
    be called from a backend.
    """
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back  # of the backend itself
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        name = frame.f_code.co_filename
        is_dynamos = name.startswith((_TORCH, _STANDARD_LIBRARY, "<"))
        if not is_dynamos and "site-packages" not in name:
            return Break("", f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return None


def _translator() -> Any:
    """What translates the frame that is being compiled."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()


def compile_call() -> Any:
    """An object that all graphs of one call of `torch.compile` have in common, and no others.

    To be called from a backend.
    """
    backend = _translator().output.compiler_fn
    # Around a DistributedDataParallel module, Dynamo splits graphs before they come here.
    owner = getattr(backend, "__self__", backend)
    return getattr(owner, "backend_compile_fn", owner)


def compilations_left() -> int:
    """How often Dynamo will compile the frame again; past that it runs the frame uncompiled.

    It counts what it has compiled of the same code, for any model. To be called from a backend.
    """
    from torch._guards import CompileContext

    compilation = CompileContext.current_compile_id()
    number = 0 if compilation is None else (compilation.frame_compile_id or 0)
    return max(0, torch.compiler.config.recompile_limit - number - 1)


def fails_past_limit() -> bool:
    """Whether Dynamo raises where it would run a frame uncompiled for having compiled too often."""
    return torch.compiler.config.fail_on_recompile_limit_hit


def guard_training(graph: fx.GraphModule) -> bool | None:
    """Whether a module of the frame is in training mode; the frame is compiled again if it changes.

    The modules are those outermost ones whose parameters and buffers are inputs of the graph.
    Dynamo itself guards the mode only where code reads it. To be called from a backend.

    Returns:
        None if no input belongs to a module.
    """
    modes = [_guarded_mode(source) for source in _outermost_modules(graph)]
    return any(modes) if modes else None


def _outermost_modules(graph: fx.GraphModule) -> list[Any]:
    found: dict[str, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        chain = [_source_of(node)]
        while getattr(chain[-1], "base", None) is not None:
            chain.append(chain[-1].base)
        for source in reversed(chain):
            if isinstance(_value_of(source), nn.Module):
                found.setdefault(_source_name(source), source)
                break
    return list(found.values())


def _value_of(source: Any) -> Any:
    """The object that a source stands for in the frame; None if it cannot be told."""
    frame = _translator().output.root_tx
    scope = {"L": frame.f_locals, "G": frame.f_globals}
    try:
        return eval(_source_name(source), scope)
    except Exception:  # noqa: BLE001 - Dynamo's expressions may need names of its own
        return None


def _guarded_mode(module: Any) -> bool:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    install_guard(AttrSource(module, "training").make_guard(GuardBuilder.CONSTANT_MATCH))
    return _value_of(module).training


# --- compiled modules -----------------------------------------------------------------------------


def is_fake_call(arguments: Sequence[Any]) -> bool:
    """Whether a backend's function is called with fake tensors, for the shapes of its outputs."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor in map(type, arguments)


@contextlib.contextmanager
def uncompiled_calls() -> Iterator[None]:
    """Runs code that has been through `torch.compile` as if it had not."""
    if torch.compiler.is_dynamo_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
