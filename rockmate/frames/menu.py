"""What a frame may give up: steps from nothing to all that it has saved, cheapest bytes first.

A frame saves tensors one after the other. Three kinds of sets of them can be made again:

* a *prefix*: the frame's forward runs again, up to the last tensor of the prefix;
* what a *part*, the call of a submodule within the frame, saves, and those of its results that are
  saved after it: the part's forward runs again, from inputs that stay in memory;
* what *ops* of the frame's forward make, see `derivation`. What none makes may be held in less.

Sets of parts are tried greedily, the least seconds for each byte first, and prefixes after them.
The lower convex hull of their (bytes, seconds) is the menu.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import median

from rockmate.budget import size_text
from rockmate.frames.derivation import TapedFrame, derivations, recipe_of
from rockmate.frames.regions import PartKey
from rockmate.frames.tape import Recipe
from rockmate.frames.way import Way

_MOST_PARTS = 8
"""How many sets of parts a menu tries."""
_MOST_CHOICES = 32
"""How many offers are kept while sets of parts are put together."""
_MOST_TRIED_PARTS = 12
"""Of how many parts sets are put together: those of the most bytes for their seconds."""
ALL_TENSORS = 1 << 30
"""The prefix of a frame whose number of tensors is not known."""
_CAUTIONS = (1.0, 4.0)
"""How much the seconds of observing ops weigh where sets of derived tensors grow."""
_MOST_PREFIXES = 8
"""After how many prefixes parts are tried."""


@dataclass(slots=True)
class PartProfile:
    """A part of a measured frame.

    Attributes:
        begin_s: when its forward began, in seconds since the frame's.
        end_s: when it ended.
        inputs: storages of its arguments.
        slots: positions of the tensors that it saves.
        result_slots: positions of later ones that are its results.
        begin_op: how many ops of the frame had been noted before.
        end_op: how many when it ended.
        again_s: seconds that it takes to be able to run again, and to begin.
    """

    begin_s: float
    inputs: set[int]
    end_s: float = 0.0
    slots: list[int] = field(default_factory=list)
    result_slots: list[int] = field(default_factory=list)
    begin_op: int = 0
    end_op: int = 0
    again_s: float = 0.0

    @property
    def all_slots(self) -> set[int]:
        """Positions of all tensors that the part can make again."""
        return {*self.slots, *self.result_slots}

    def is_within(self, other: PartProfile) -> bool:
        """Whether the call lies within another one."""
        return self is not other and other.begin_s <= self.begin_s and self.end_s <= other.end_s


@dataclass(frozen=True, slots=True)
class Offer:
    """A step of a menu: all that is given up by then.

    Attributes:
        num_bytes: that this frees.
        seconds: that it takes to make them again.
        parts: whose tensors are given up.
        prefix: how many of the first tensors are given up, beside those; 0 for none.
        derived: positions of tensors that are made again by the ops that made them. Such an offer
            gives up neither parts nor a prefix.
        extra_bytes: that are live while they are made again, beside all that the frame has saved.
        recipe: of those ops.
        packed: positions of further tensors, which are held as booleans.
        way: the number of a way, where the inside is captured: there is nothing else to give up.
        peak_bytes: of the frame's forward and backward, in such a way.
    """

    num_bytes: int
    seconds: float
    parts: frozenset[PartKey]
    prefix: int
    derived: frozenset[int] = frozenset()
    extra_bytes: int = 0
    recipe: Recipe | None = None
    packed: frozenset[int] = frozenset()
    way: int | None = None
    peak_bytes: int = 0

    @property
    def by_itself(self) -> frozenset[int]:
        """Positions of tensors that are given up one by one, with neither parts nor a prefix."""
        return self.derived | self.packed

    def __str__(self) -> str:
        if not (self.by_itself or self.parts or self.prefix):
            return f"{size_text(max(0, self.num_bytes))}, as planned"
        if self.by_itself:
            made = f"{len(self.derived)} tensors, made again by their ops"
            packed = f"{len(self.packed)} held as booleans"
            return ", ".join([made] * bool(self.derived) + [packed] * bool(self.packed))
        parts = [
            each.path if not each.number else f"{each.path} (call {each.number + 1})"
            for each in sorted(self.parts)
        ]
        first = "all" if self.prefix == ALL_TENSORS else f"its first {self.prefix} tensors"
        return ", ".join([first] * bool(self.prefix) + parts)


def offer_of_way(
    way: Way, saved_bytes: int, *, number: int | None = None, peak_bytes: int = 0
) -> Offer:
    """What a captured inside gives up in a way, of what it saves as in eager.

    Args:
        way: how it runs.
        saved_bytes: by its forward as in eager.
        number: of the way.
        peak_bytes: of the frame's forward and backward.
    """
    num_bytes = saved_bytes - way.held_bytes
    return Offer(num_bytes, way.seconds, frozenset(), 0, way=number, peak_bytes=peak_bytes)


@dataclass(slots=True)
class FrameProfile:
    """What a measured frame has saved.

    Attributes:
        storages: of each saved tensor, as far as the frame alone holds them.
        saved_s: when each was saved, in seconds since the frame's forward began.
        num_bytes: of each of these storages.
        others: storages that are in memory whatever the frame gives up.
        parts: the calls within it.
        slot_states: with a tape, the state of each saved tensor.
        taped: the ops of the forward; None without a tape.
    """

    storages: Sequence[Sequence[int]]
    saved_s: Sequence[float]
    num_bytes: Mapping[int, int]
    others: Set[int]
    parts: Mapping[PartKey, PartProfile]
    slot_states: Sequence[int] = ()
    taped: TapedFrame | None = None

    @property
    def hooks_s(self) -> float:
        """Seconds that the hooks of all that it saves take, when it is saved, read and released."""
        return 0.0 if self.taped is None else self.taped.cost.hook_s * len(self.storages)

    def able_parts(self) -> set[PartKey]:
        """Parts that could give up something, and whose inputs are in memory anyway."""
        present = self.others | {key for keys in self.storages for key in keys}
        return {
            key for key, part in self.parts.items() if part.all_slots and part.inputs <= present
        }

    def bytes_without(self, slots: set[int], needed: set[int]) -> int:
        """Bytes that are freed if these slots are given up, and storages are needed otherwise."""
        freed = {key for slot in slots for key in self.storages[slot]} - needed
        for slot, keys in enumerate(self.storages):
            if slot not in slots:
                freed.difference_update(keys)
        return sum(self.num_bytes[key] for key in freed)

    def offer(self, parts: frozenset[PartKey], prefix: int = 0) -> Offer:
        """Gives up what some parts save and their saved results, and a prefix."""
        needed: set[int] = set()
        seconds = self.saved_s[prefix - 1] if prefix else 0.0
        for key in parts:
            part = self.parts[key]
            needed |= part.inputs
            last_s = part.end_s if part.result_slots else self.saved_s[part.slots[-1]]
            seconds += last_s - part.begin_s + part.again_s
        slots = self.slots_of(parts) | set(range(prefix))
        return Offer(self.bytes_without(slots, needed), seconds, parts, prefix)

    def slots_of(self, parts: Set[PartKey]) -> set[int]:
        """Positions of what some parts save, and of their saved results."""
        return {slot for key in parts for slot in self.parts[key].all_slots}


def smoothed(profiles: Sequence[FrameProfile]) -> list[FrameProfile]:
    """The profiles, with times that are medians over those of the same structure and sizes.

    One time of one step is noisy: memory is touched for the first time, another process runs.
    """
    alike: dict[Hashable, list[FrameProfile]] = {}
    for profile in profiles:
        alike.setdefault(_structure(profile), []).append(profile)
    return [_with_median_times(profile, alike[_structure(profile)]) for profile in profiles]


def _structure(profile: FrameProfile) -> Hashable:
    """What times depend on: the same ops on larger tensors take longer."""
    parts = tuple((key, len(part.slots)) for key, part in profile.parts.items())
    sizes = tuple(tuple(profile.num_bytes[key] for key in keys) for keys in profile.storages)
    taped = profile.taped
    return len(profile.saved_s), parts, sizes, taped and (taped.states, taped.num_bytes)


def _with_median_times(profile: FrameProfile, alike: Sequence[FrameProfile]) -> FrameProfile:
    parts = {
        key: replace(
            part,
            begin_s=median(each.parts[key].begin_s for each in alike),
            end_s=median(each.parts[key].end_s for each in alike),
        )
        for key, part in profile.parts.items()
    }
    saved_s = [median(times) for times in zip(*(each.saved_s for each in alike), strict=True)]
    taped = (
        None
        if profile.taped is None
        else profile.taped._replace(
            seconds=tuple(map(median, zip(*_tape_seconds(alike), strict=True))),
            noting_s=median(each.taped.noting_s for each in alike if each.taped is not None),
        )
    )
    return replace(profile, saved_s=saved_s, parts=parts, taped=taped)


def _tape_seconds(profiles: Sequence[FrameProfile]) -> list[tuple[float, ...]]:
    return [each.taped.seconds for each in profiles if each.taped is not None]


def menu(profile: FrameProfile) -> tuple[Offer, ...]:
    """The offers of a frame, of rising bytes and rising seconds for each byte.

    The last is all tensors, even if a set of parts frees as much: what is shared with other frames
    is free when they give it up as well. Empty if the frame alone holds nothing.
    """
    offers = [Offer(0, 0.0, frozenset(), 0), *_by_parts(profile)]
    firsts = prefixes(profile)
    chosen: list[Offer] = []
    given_up: set[int] = set()
    for offer in _hull([*offers, *firsts]):
        # After a prefix no part can run, so only longer ones follow.
        slots = set(range(offer.prefix)) if offer.prefix else profile.slots_of(offer.parts)
        if given_up <= slots and (offer.prefix or not (chosen and chosen[-1].prefix)):
            chosen.append(offer)
            given_up = slots
    if profile.num_bytes:
        everything = firsts[-1]
        if not (chosen[-1].prefix and chosen[-1].num_bytes == everything.num_bytes):
            chosen.append(everything)
    return tuple(chosen[1:])


def choices(profile: FrameProfile) -> tuple[Offer, ...]:
    """What is worth giving up, of rising bytes and seconds: sets of parts, and prefixes with them.

    Unlike the steps of a menu, they need not contain one another. The last is everything.
    """
    firsts = prefixes(profile)
    if not firsts or not profile.num_bytes:
        return ()
    starts = _thinned(_undominated(firsts), _MOST_PREFIXES)
    nothing = Offer(0, 0.0, frozenset(), 0)
    found = [each for start in (nothing, *starts) for each in _sets_of_parts(profile, start)]
    return _worth(_undominated([*found, *firsts, *_by_ops(profile)]))


def of_least_bytes(several: Sequence[Sequence[Offer]]) -> tuple[Offer, ...]:
    """What is worth giving up where the same prefixes free other bytes on other ranks: the least.

    Args:
        several: the prefixes of each rank; those beyond the fewest are all that any has.
    """
    shared = [
        replace(min(each, key=lambda offer: offer.num_bytes), seconds=max(o.seconds for o in each))
        for each in zip(*several, strict=False)
    ]
    if not shared:
        return ()
    return _worth(_undominated([*shared[:-1], replace(shared[-1], prefix=ALL_TENSORS)]))


def _worth(offers: list[Offer]) -> tuple[Offer, ...]:
    return tuple(each for each in _thinned(offers, 2 * _MOST_CHOICES) if each.num_bytes)


def _sets_of_parts(profile: FrameProfile, start: Offer) -> list[Offer]:
    """An offer, and those that give up sets of the parts that follow its prefix, too."""
    able = [
        key for key in profile.able_parts()
        if min(profile.parts[key].all_slots) >= start.prefix
        and profile.parts[key].begin_s >= start.seconds
    ]  # fmt: skip
    alone = {key: profile.offer(frozenset((key,))) for key in able}
    able = [key for key in able if alone[key].num_bytes]
    able.sort(key=lambda key: (alone[key].seconds / alone[key].num_bytes, key))
    front = [start]
    for key in able[:_MOST_TRIED_PARTS]:
        more = [
            profile.offer(_with(profile, each.parts, key), start.prefix)
            for each in front
            if not _is_within_one(profile, key, each.parts)
        ]
        possible = (each for each in more if _keeps_inputs(profile, each))
        front = _thinned(_undominated([*front, *possible]), _MOST_CHOICES)
    return front


def _keeps_inputs(profile: FrameProfile, offer: Offer) -> bool:
    """Whether nothing is given up that one of the parts reads: it would stay in memory."""
    slots = profile.slots_of(offer.parts) | set(range(offer.prefix))
    given_up = {key for slot in slots for key in profile.storages[slot]}
    return all(given_up.isdisjoint(profile.parts[key].inputs) for key in offer.parts)


def _undominated(offers: Sequence[Offer]) -> list[Offer]:
    """Of rising bytes and seconds: those that no other frees as much as in less time."""
    best: list[Offer] = []
    for offer in sorted(offers, key=lambda each: (-each.num_bytes, each.seconds, each.prefix)):
        if not best or offer.seconds < best[-1].seconds:
            best.append(offer)
    return best[::-1]


def _thinned(offers: list[Offer], most: int) -> list[Offer]:
    """At most so many of them, the first and the last included, at even distances of bytes."""
    if len(offers) <= most:
        return offers
    span = offers[-1].num_bytes - offers[0].num_bytes
    step = span / (most - 1)
    kept = {round((each.num_bytes - offers[0].num_bytes) / step): each for each in offers[::-1]}
    return sorted({*kept.values(), offers[-1]}, key=lambda each: each.num_bytes)


def _by_parts(profile: FrameProfile) -> Iterator[Offer]:
    """Sets of parts, one more at a time; one that holds others takes their place."""
    able = profile.able_parts()
    present = profile.offer(frozenset())
    for _ in range(_MOST_PARTS):
        given_up = profile.slots_of(present.parts)
        sets = [_with(profile, present.parts, key) for key in sorted(able)]
        offers = [profile.offer(parts) for parts in sets if given_up <= profile.slots_of(parts)]
        more = [each for each in offers if each.num_bytes > present.num_bytes]
        if not more:
            return
        present = min(more, key=lambda each: _price(present, each))
        yield present
        able -= present.parts
        able = {key for key in able if not _is_within_one(profile, key, present.parts)}


def prefixes(profile: FrameProfile) -> list[Offer]:
    """Gives up the first tensors: one, two, up to all."""
    return [
        Offer(profile.bytes_without(set(range(length)), set()), seconds, frozenset(), length)
        for length, seconds in enumerate(profile.saved_s, start=1)
    ]


def _by_ops(profile: FrameProfile) -> Iterator[Offer]:
    """Sets of tensors that the ops of the forward make again."""
    if profile.taped is None:
        return
    slots_of_state: dict[int, set[int]] = {}
    for slot, state in enumerate(profile.slot_states):
        slots_of_state.setdefault(state, set()).add(slot)
    for each in chain.from_iterable(derivations(profile.taped, each) for each in _CAUTIONS):
        derived, packed = (
            frozenset[int]().union(*(slots_of_state[state] for state in states))
            for states in (each.states, each.packed)
        )
        yield Offer(
            each.num_bytes, each.seconds, frozenset(), 0, derived, each.extra_bytes,
            recipe_of(profile.taped, each) if derived else None, packed,
        )  # fmt: skip


def _with(profile: FrameProfile, parts: frozenset[PartKey], key: PartKey) -> frozenset[PartKey]:
    outer = frozenset((key,))
    return outer | {each for each in parts if not _is_within_one(profile, each, outer)}


def _is_within_one(profile: FrameProfile, key: PartKey, others: frozenset[PartKey]) -> bool:
    return any(profile.parts[key].is_within(profile.parts[other]) for other in others)


def _price(one: Offer, other: Offer) -> float:
    return (other.seconds - one.seconds) / (other.num_bytes - one.num_bytes)


def _hull(offers: Sequence[Offer]) -> list[Offer]:
    """The lower convex hull of (bytes, seconds), from no bytes to the most."""
    hull: list[Offer] = []
    for offer in sorted(offers, key=lambda each: (each.num_bytes, each.seconds, each.prefix)):
        if hull and offer.num_bytes == hull[-1].num_bytes:
            continue
        while len(hull) > 1 and _price(hull[-2], hull[-1]) >= _price(hull[-1], offer):
            hull.pop()
        hull.append(offer)
    return hull
