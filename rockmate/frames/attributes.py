"""What second runs of frames read of modules: attributes and hooks."""

from __future__ import annotations

import functools
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from rockmate._torch.members import (
    RECURRENT_WEIGHTS,
    all_hooks_of,
    member_tables_of,
    module_hooks_of,
)
from rockmate.state.contents import Both
from rockmate.state.members import objects_and_members
from rockmate.state.objects import Handler, objects_of_python, put_dict

# Tables of members and hooks, and the forward that stands in for a frame's own.
_SKIPPED = (vars(nn.Module()).keys() | RECURRENT_WEIGHTS | {"forward"}) - {"training"}


class Attributes(NamedTuple):
    """The attributes of a module, as a root, with its hooks; members among them do not count."""

    table: dict[str, Any]


def _hooks(found: Attributes) -> list[dict[int, Any] | None]:
    """Tables of the hooks of the module and its parameters."""
    parameters = filter(torch.is_tensor, member_tables_of(found.table)[1].values())
    return [*module_hooks_of(found.table), *chain(*map(all_hooks_of, parameters))]


def _take(found: Attributes) -> Both:
    attributes = {name: each for name, each in found.table.items() if name not in _SKIPPED}
    hooks = enumerate(_hooks(found))
    return Both(attributes, {f"{at}": dict(each) for at, each in hooks if each})


def _put(found: Attributes, content: Both) -> None:
    for name in found.table.keys() - content.items.keys() - _SKIPPED:
        del found.table[name]
    found.table.update(content.items)
    for at, hooks in enumerate(_hooks(found)):
        if hooks is not None:
            put_dict(hooks, content.attributes.get(f"{at}", {}))


_OF_MODULE = Handler(_take, _put)


def follows_of_frame(kind: type) -> Handler | None:
    """The handler of a type: that of Python's objects, with modules as `Attributes`."""
    if kind in (MethodType, functools.partial):
        return objects_and_members(kind)
    return _OF_MODULE if kind is Attributes else objects_of_python(kind)
