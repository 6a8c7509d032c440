"""Nested containers as PyTorch's own tracing takes them apart.

Libraries register their containers here (Hugging Face its model outputs), so no other pytree
library sees the same leaves. PyTorch has no public name for it.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
