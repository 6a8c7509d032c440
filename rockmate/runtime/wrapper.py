"""A module that behaves as the one that it wraps, whose objects and attributes are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rockmate._torch.members import is_compiled
from rockmate.errors import UnsupportedModelError
from rockmate.runtime.delegation import delegate
from rockmate.runtime.methods import Methods


class Wrapper(nn.Module):
    """The wrapped module's class, mode, attributes and state."""

    _methods: Methods

    @property
    def __class__(self) -> type:
        # Libraries ask a model for its class: Trainer to find label names and to save it, PEFT to
        # find adapters.
        wrapped = self.__dict__.get("_wrapped")
        return type(self) if wrapped is None else wrapped.__class__

    @__class__.setter
    def __class__(self, cls: type) -> None:
        from rockmate.runtime.ddp import SHARDED

        msg = (
            f"the class of a RockmateModule cannot be set to {cls.__name__}. If fully_shard did "
            f"this: {SHARDED}"
        )
        raise UnsupportedModelError(msg)

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The wrapped module's mode. `modules()` yields the wrapper in place of that module."""
        wrapped = self.__dict__.get("_wrapped")
        return wrapped is None or wrapped.training

    @training.setter
    def training(self, mode: bool) -> None:
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None:  # `nn.Module.__init__` sets it before there is one
            wrapped.training = mode

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self.__dict__["_wrapped"]

    train, eval, to, cuda, cpu = map(delegate, ("train", "eval", "to", "cuda", "cpu"))
    half, bfloat16, float, double = map(delegate, ("half", "bfloat16", "float", "double"))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's."""
        return self.original.load_state_dict(state_dict, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_wrapped" not in self.__dict__:
                raise
            return self._methods.replaced(getattr(self.original, name), name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the wrapped module there, where its code reads it.

        A compiled module has all of its attributes in the module that was compiled.
        """
        wrapped = self.__dict__.get("_wrapped")
        if wrapped is not None and name not in self.__dict__ and self._is_of(wrapped, name):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def _is_of(self, wrapped: nn.Module, name: str) -> bool:
        """Whether an attribute is the wrapped module's to set."""
        return not hasattr(type(self), name) if is_compiled(wrapped) else name in wrapped.__dict__

    def __dir__(self) -> list[str]:
        """Names of both modules."""
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.original)})
