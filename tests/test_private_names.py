"""Private PyTorch names stand in `rockmate/_torch/` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "rockmate"
PRIVATE_MODULES = (
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.proxy_tensor",
    "torch.utils.weak",
)
PRIVATE_ATTRIBUTES = {
    "_C",
    "_autograd",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_base",
    "_buffers",
    "_cdata",
    "_dispatch_cache",
    "_dynamo",
    "_execution_engine",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_fsdp_flattened",
    "_fsdp_wrapped_module",
    "_functorch",
    "_get_default_store",
    "_modules",
    "_non_persistent_buffers_set",
    "_orig_mod",
    "_parameters",
    "_post_accumulate_grad_hooks",
    "_profiler",
    "_profiler_enabled",
    "_python_dispatch",
    "_pytree",
    "_schema",
    "_state_dict_hooks",
    "_subclasses",
    "_version",
    "py_kernels",
    "fake_device",
    "fake_mode",
}
FILES = sorted(path for path in ROOT.rglob("*.py") if "_torch" not in path.parts)


def private_parts(name: str) -> list[str]:
    return [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]


def private_uses(path: Path) -> list[str]:
    """`line: name` of each private PyTorch name that a file touches."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "torch" and (
                private_parts(name) or name.startswith(PRIVATE_MODULES)
            ):
                found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_ATTRIBUTES:
            found.append(f"{node.lineno}: .{node.attr}")
        if isinstance(node, ast.Attribute) and is_torch(node.value) and private_parts(node.attr):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Constant) and node.value in PRIVATE_ATTRIBUTES:
            found.append(f"{node.lineno}: {node.value!r}")
    return found


def is_torch(node: ast.expr) -> bool:
    """Whether an expression is `torch` or a public attribute path of it that is no op namespace."""
    while isinstance(node, ast.Attribute):
        if node.attr in ("aten", "ops"):
            return False
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_touches_no_private_name_of_pytorch(path: Path) -> None:
    assert not private_uses(path)


def test_the_check_finds_private_names(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import torch\nfrom torch._dynamo import config\nimport torch._C\n"
        "x = t._version, torch._functorch.config, torch.autograd._profiler_enabled()\n"
        "y = torch.ops.aten._to_copy.default, self._own\n"
    )
    assert {use.split(":")[0] for use in private_uses(file)} == {"2", "3", "4"}
