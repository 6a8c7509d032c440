"""Symbolic sizes. PyTorch documents them, exports none, and takes a second to load them."""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod

__all__ = ["ConstantSource", "DimDynamic", "FloorDiv", "Mod", "ShapeEnv"]
