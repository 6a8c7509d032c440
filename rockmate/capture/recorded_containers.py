"""Lists and dicts that note whether a forward only adds to them.

A forward that appends its auxiliary loss to a list, or keeps a statistic under a key, does the same
in each call, whatever the container holds. A forward that looks at what is there does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rockmate._torch import pytree

_READ_OF_LIST = (
    "__getitem__ __iter__ __len__ __contains__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ "
    "__mul__ __rmul__ __reversed__ index count copy pop insert remove sort reverse __setitem__ "
    "__delitem__ __imul__"
)
_READ_OF_DICT = (
    "__iter__ __len__ __eq__ __ne__ __or__ __ror__ __reversed__ keys values items copy popitem"
)
_KEY_OF_DICT = "__getitem__ __contains__ __delitem__ get pop setdefault"


class RecordedList(list[Any]):
    """A list in place of another one.

    Attributes:
        original: the other one.
        is_read: whether its content was looked at while it had any of the original.
        is_cleared: whether that is gone.
    """

    def __init__(self, original: list[Any]) -> None:
        super().__init__(original)
        self.original = original
        self.is_read = self.is_cleared = False

    def clear(self) -> None:
        """Removes all items."""
        self.is_cleared = True
        super().clear()

    def note_read(self, _: tuple[Any, ...]) -> None:
        """Notes that something has looked at it."""
        self.is_read = self.is_read or not self.is_cleared

    def added(self) -> list[Any] | None:
        """The items that were appended; None if it has changed otherwise."""
        begin: list[Any] = [] if self.is_cleared else self.original
        items = list(list.__iter__(self))
        kept = items[: len(begin)]
        is_extended = len(kept) == len(begin) and all(map(_is, kept, begin))
        return items[len(begin) :] if is_extended else None

    def restore(self) -> None:
        """Takes the content of the original."""
        list.__setitem__(self, slice(None), self.original)

    def plain(self) -> list[Any]:
        """The same items in a list."""
        return list(list.__iter__(self))


class RecordedDict(dict[Any, Any]):
    """A dict in place of another one; attributes as of `RecordedList`."""

    def __init__(self, original: dict[Any, Any]) -> None:
        super().__init__(original)
        self.original = original
        self.is_read = self.is_cleared = False
        self._own: set[Any] = set()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._own.add(key)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets several items."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def clear(self) -> None:
        """Removes all items."""
        self.is_cleared = True
        super().clear()

    def note_read(self, keys: tuple[Any, ...]) -> None:
        """Notes that something has looked at it, or at one key."""
        is_own = bool(keys) and keys[0] in self._own
        self.is_read = self.is_read or not (self.is_cleared or is_own)

    def added(self) -> dict[Any, Any] | None:
        """The items that were set; None if it has changed otherwise."""
        items = self.plain()
        begin: dict[Any, Any] = {} if self.is_cleared else self.original
        is_kept = all(key in items for key in begin)
        others = all(key in begin and items[key] is begin[key] for key in items.keys() - self._own)
        return {key: items[key] for key in items if key in self._own} if is_kept & others else None

    def restore(self) -> None:
        """Takes the content of the original."""
        dict.clear(self)
        dict.update(self, self.original)

    def plain(self) -> dict[Any, Any]:
        """The same items in a dict."""
        return dict(zip(dict.keys(self), dict.values(self), strict=True))


Recorded = RecordedList | RecordedDict


def _is(item: Any, other: Any) -> bool:
    return item is other


def _noting(base: Callable[..., Any], *, has_key: bool) -> Callable[..., Any]:
    def read(self: Recorded, *args: Any, **kwargs: Any) -> Any:
        self.note_read(args if has_key else ())
        return base(self, *args, **kwargs)

    return read


for _name in _READ_OF_LIST.split():
    setattr(RecordedList, _name, _noting(getattr(list, _name), has_key=False))
for _name in _READ_OF_DICT.split():
    setattr(RecordedDict, _name, _noting(getattr(dict, _name), has_key=False))
for _name in _KEY_OF_DICT.split():
    setattr(RecordedDict, _name, _noting(getattr(dict, _name), has_key=True))


def recorded(value: Any, known: dict[int, Any]) -> Any:
    """A container in place of a list or dict; any other value as it is.

    Args:
        value: an attribute.
        known: the containers for those that were given before, by address.
    """
    kind = {list: RecordedList, dict: RecordedDict}.get(type(value))
    if kind is None:
        return value
    if id(value) not in known:
        known[id(value)] = kind(value)
    return known[id(value)]


def unrecorded(output: Any) -> Any:
    """The model's output with a plain container for each that records."""
    containers = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Recorded)]
    for container in containers:
        container.note_read(())
    if not containers:
        return output
    return pytree.tree_map(
        lambda leaf: leaf.plain() if isinstance(leaf, Recorded) else leaf, output
    )
