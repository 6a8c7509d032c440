"""Symbolic sizes. PyTorch documents them, exports none, and takes a second to load them."""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = ["ConstantSource", "DimDynamic", "ShapeEnv"]
