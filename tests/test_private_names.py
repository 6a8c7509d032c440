"""Private PyTorch names stand in `rockmate/_torch/` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "rockmate"
PRIVATE_MODULES = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.proxy_tensor",
    "torch.utils.weak",
)
ATTRIBUTES = """
_C _autograd _backward_hooks _backward_pre_hooks _base _buffers _cdata _dispatch_cache _dynamo
_execution_engine _forward_hooks _forward_pre_hooks _fsdp_flattened _fsdp_wrapped_module
_functorch _get_default_store _modules _non_persistent_buffers_set _orig_mod _parameters
_post_accumulate_grad_hooks _profiler _profiler_enabled _python_dispatch _pytree _schema
_state_dict_hooks _subclasses _version py_kernels fake_device fake_mode
"""
PRIVATE_ATTRIBUTES = set(ATTRIBUTES.split())
FILES = sorted(path for path in ROOT.rglob("*.py") if "_torch" not in path.parts)


def private_parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]


def private_uses(path: Path) -> list[str]:
    """`line: name` of each private PyTorch name that a file touches."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    roots = set(torch_names(tree))
    return [
        f"{node.lineno}: {name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.expr)
        for name in private_names(node, roots)
    ]


def private_names(node: ast.AST, roots: set[str]) -> Iterator[str]:
    """The private PyTorch names in one node of a syntax tree, its children left out."""
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names if is_private_module(alias.name))
        case ast.ImportFrom(module=str(module)):
            names = (f"{module}.{alias.name}" for alias in node.names)
            yield from filter(is_private_module, names)
        case ast.Attribute():
            is_of_torch = is_torch(node.value, roots) and private_parts(node.attr)
            if node.attr in PRIVATE_ATTRIBUTES or is_of_torch:
                yield ast.unparse(node)
        case ast.Constant() if node.value in PRIVATE_ATTRIBUTES:
            yield repr(node.value)


def is_private_module(name: str) -> bool:
    """Whether a dotted name that is imported is PyTorch's and private."""
    is_private = bool(private_parts(name)) or name.startswith(PRIVATE_MODULES)
    return name.split(".")[0] == "torch" and is_private


def torch_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file imports from PyTorch: `torch`, `nn`, `fx`, ..."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = node.names
        else:
            continue
        yield from (alias.asname or alias.name.split(".")[0] for alias in found)


def is_torch(node: ast.expr, roots: set[str]) -> bool:
    """Whether an expression is a name of PyTorch or an attribute path of one, and no op."""
    while isinstance(node, ast.Attribute):
        if node.attr in ("aten", "ops"):
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id in roots


def test_no_file_touches_a_private_name_of_pytorch() -> None:
    faults = [f"{path.relative_to(ROOT)}:{use}" for path in FILES for use in private_uses(path)]
    assert not faults, "\n".join(faults)


def test_the_page_names_every_private_interface() -> None:
    page = (ROOT.parent / "docs" / "reference" / "private_interfaces.md").read_text("utf-8")
    listed = {part for name in re.findall(r"`([^`]+)`", page) for part in name.split(".")}
    used = {
        use.split(": ", 1)[1].strip("'").split(".")[-1]
        for path in sorted((ROOT / "_torch").glob("*.py"))
        for use in private_uses(path)
        if "_pytree." not in use
    }
    assert not used - listed - {"_C", "_autograd"}


def test_the_check_finds_private_names(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import torch\nfrom torch._dynamo import config\nimport torch._C\n"
        "x = t._version, torch._functorch.config, torch.autograd._profiler_enabled()\n"
        "y = torch.ops.aten._to_copy.default, self._own\n"
        "from torch import fx, nn\n"
        "z = fx.graph._PyTreeCodeGen, nn.Module._get_name, getattr(t, '_version')\n"
    )
    lines = [use.split(":")[0] for use in private_uses(file)]
    assert sorted(set(lines)) == ["2", "3", "4", "7"]
    assert lines.count("7") == 3
