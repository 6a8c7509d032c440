"""A frame: one call of a submodule, and what autograd has saved in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn

from rockmate._torch.engine import saving
from rockmate._torch.storage import version_of
from rockmate.errors import BackwardError
from rockmate.frames.call import Arguments, Call
from rockmate.frames.collector import Collector
from rockmate.frames.derivation import TapedFrame
from rockmate.frames.memory import Memory
from rockmate.frames.menu import FrameProfile, Offer, PartKey, PartProfile
from rockmate.frames.needs import FrameKey
from rockmate.frames.noting_cost import noting_cost
from rockmate.frames.part import Part, Result
from rockmate.frames.regions import Region
from rockmate.frames.saved import Saved
from rockmate.frames.slots import Slot, Slots, checked
from rockmate.frames.tape import Tape
from rockmate.frames.taped_slots import TapedSlots
from rockmate.frames.two_valued import TwoValued
from rockmate.state.tensors import storages_of, tensors_in


class Frame:
    """One call of a submodule.

    Attributes:
        key: which call.
        order: position among all frames, by the beginning of their calls.
        seconds: that its forward took.
        offers: what it may give up, see `menu`; of rising bytes.
        planned: what was decided ahead that it gives up.
        taken: what it has given up.
        is_made_again: whether something was dropped and has been made again. The rest then stays.
    """

    def __init__(self, call: Call, order: int, memory: Memory) -> None:
        """Holds nothing yet.

        Args:
            call: that runs.
            order: see above.
            memory: counts what frames hold.
        """
        self.key, self.order, self._memory = call.key, order, memory
        self._call = call
        self._held_outside = self._call.outside_storages()
        self._outside = frozenset(self._held_outside)
        self._slots = Slots(memory.storages)
        self._is_profiled = memory.profiles(call.key.path)
        self._saved_s: list[float] = []
        self._num_prefix = 0  # how many of the first tensors are dropped
        self._parts: dict[PartKey, Part] = {}
        self._running: list[Part] = []
        self._results: dict[int, Result] = {}
        self._num_calls: Counter[str] = Counter()
        self._taped: TapedSlots | None = None
        self._derived: Set[int] = frozenset()  # slots that their ops will make again
        self._begin_s = self._passed = self.seconds = 0.0
        self.offers: tuple[Offer, ...] = ()
        self.planned: Offer | None = None
        self.taken: Offer | None = None
        self.is_made_again = False

    way = None
    """It runs as in eager."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds and no other frame does."""
        return self._slots.num_bytes

    # --- the forward ------------------------------------------------------------------------------

    def run(self) -> Any:
        """The call's result. What autograd saves meanwhile goes into the frame."""
        is_taped, recipe = self._memory.wanted_tape(self.key)
        if is_taped:
            constants = self._call.constant_storages()
            tape = Tape(self.key.path, constants, self._memory.clock, recipe)
            self._taped = TapedSlots(tape)
        self._begin_s = self._memory.clock()
        with saving(self._pack, self._unpack), ExitStack() as stack:
            if self._taped is not None:
                stack.enter_context(self._taped.observing(None))
            output = self._call.run()
        self.seconds = self._passed_s()
        self._outside, self._held_outside, self._results = frozenset(), {}, {}
        self._call.end()
        self._slots.keep_returned(output)
        return output

    def run_part(self, path: str, module: nn.Module, arguments: Arguments, *, can_run: bool) -> Any:
        """The result of a submodule's call within this one.

        Args:
            path: of the submodule, within the frame's.
            module: the submodule.
            arguments: its own forward, and what it is called with.
            can_run: whether the part takes what a second run needs, or is only measured.
        """
        key = PartKey(path, self._num_calls[path])
        self._num_calls[path] += 1
        if not can_run and not self._is_profiled:
            with nullcontext() if self._taped is None else self._taped.observing(key):
                return arguments.forward(*arguments.args, **arguments.kwargs)
        tensors = tensors_in(arguments[1:])
        inputs = {key for tensor in tensors for key in storages_of(tensor)}
        profile = PartProfile(
            self._passed_s(), inputs, begin_op=self._num_ops(), again_s=self._memory.part_s
        )
        full_key = FrameKey(f"{self.key.path}.{path}", key.number)
        call = Call(full_key, module, arguments, self._memory) if can_run else None
        part = self._parts[key] = Part(key, len(self._slots), profile, call)
        self._running.append(part)
        try:
            with nullcontext() if self._taped is None else self._taped.observing(key):
                output = arguments.forward(*arguments.args, **arguments.kwargs)
        finally:
            self._running.pop()
        profile.end_op = self._num_ops()
        self._results |= part.end(output, self._passed_s())
        return output

    def _num_ops(self) -> int:
        return 0 if self._taped is None else self._taped.tape.num_ops

    def _passed_s(self) -> float:
        passed_s = self._memory.clock() - self._begin_s
        if self._taped is not None:
            tape = self._taped.tape
            passed_s -= tape.noting_s + len(tape.seconds) * noting_cost().unseen_s
        self._passed = max(self._passed, passed_s)  # what noting takes is known on average only
        return self._passed

    def _pack(self, tensor: torch.Tensor) -> Any:
        keys, version = storages_of(tensor), version_of(tensor)
        if self._outside.issuperset(keys):
            return Saved(tensor, keys, version)
        index = self._slots.add(tensor, keys, version)
        if self._is_profiled:
            self._saved_s.append(self._passed_s())
        if self._taped is not None:
            self._taped.note(tensor)
        for part in self._running:
            part.note(index, keys)
        if self._results:
            result = self._results.get(keys[0])
            if result is not None and result.has_in_its_storage(tensor):
                result.part.note_result(index, tensor, result)
        return Slot(self._slots, index)

    def profile(self) -> FrameProfile:
        """What is saved, at the end of the forward."""
        storages, own = self._slots.storages(), self._slots.own_bytes()
        return FrameProfile(
            storages=[[key for key in keys if key in own] for keys in storages],
            saved_s=self._saved_s,
            num_bytes=own,
            others=self._call.outside_storages().keys() | (set(chain(*storages)) - own.keys()),
            parts={key: part.profile for key, part in self._parts.items()},
            slot_states=() if self._taped is None else self._taped.states,
            taped=self._taped_profile(own),
        )

    def _taped_profile(self, own: Mapping[int, int]) -> TapedFrame | None:
        """The tape, without ops that were found not to make again what was saved."""
        if self._taped is None:
            return None
        wrong = self._memory.wrong_ops.get((self.key, self._taped.tape.ops))
        if wrong is None:
            return None
        parts = ((key, each.profile) for key, each in self._parts.items())
        regions = [Region(key, each.begin_op, each.end_op) for key, each in parts]
        return self._taped.profile(own, self._slots.present(), wrong, regions)

    def check_tape(self) -> None:
        """Has ops make each saved tensor again, and notes those that do not."""
        if self._taped is not None:
            known = (self.key, self._taped.tape.ops)
            self._memory.wrong_ops[known] = self._taped.wrong_ops(self._slots.present())

    # --- the backward -----------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            msg = (
                "a backward with create_graph=True, for a second derivative, cannot run through "
                "frames. Call the plain model for that step."
            )
            raise BackwardError(msg)
        if isinstance(packed, Slot):
            if self._memory.backward_order != self.order:
                self._memory.begin_backward(self)
            if self._derived:
                self._derive()
            saved = self._slots.found(packed.index)
            if isinstance(saved, TwoValued):
                saved = self._made_whole(packed.index, saved)
            elif saved is None:
                saved = self._make_again(packed.index)
        else:
            saved = packed
        return checked(saved, self.key)

    # --- giving up --------------------------------------------------------------------------------

    @property
    def extra_bytes(self) -> int:
        """That are live while what was given up is made again, beside all that was saved."""
        return 0 if self.taken is None else self.taken.extra_bytes

    @property
    def next_offer(self) -> Offer | None:
        """What would be dropped next; None if nothing more can be dropped."""
        if self.is_made_again or not self.num_bytes or self._cannot_repeat():
            return None
        following = iter(self.offers)
        if self.taken is None:
            if self.planned is not None and self._can_give_up(self.planned):
                return self.planned
        else:
            taken, last = self.taken, self.offers[-1]
            following = (
                each for each in self.offers
                if each.num_bytes > taken.num_bytes or (each is last and each is not taken)
            )  # fmt: skip
        found = next(filter(self._can_give_up, following), None)
        # A menu is of other calls of the path, which may have saved less: all of this one remains.
        is_partly_held = self.taken is not None and self._num_prefix < len(self._slots)
        return self.everything() if found is None and is_partly_held else found

    def _cannot_repeat(self) -> bool:
        return self._call.cannot_repeat or self._call.has_changed_inputs()

    def _can_give_up(self, offer: Offer) -> bool:
        if offer.by_itself:
            if self.taken is not None or not offer.derived:
                return self.taken is None
            taped = self._taped
            return taped is not None and taped.can_make(offer.derived, self._slots.present)
        if self.taken is not None and self.taken.by_itself:
            return offer is self.offers[-1]
        if offer.prefix and not offer.parts:
            return self.taken is None or offer.prefix > self.taken.prefix
        if self.taken is not None and self.taken.prefix:
            return False
        parts = [part for key in offer.parts if (part := self._parts.get(key)) is not None]
        if len(parts) < len(offer.parts) or not all(p.is_dropped or p.can_run for p in parts):
            return False
        slots = {slot for part in parts for slot in part.slots} | set(range(offer.prefix))
        return all(part.slots <= slots for part in self._parts.values() if part.is_dropped)

    def drop(self, offer: Offer) -> None:
        """Gives up what the next offer says, until the backward reads it."""
        self.taken = offer
        self._derived = offer.derived
        self._slots.let_go_of(offer.derived)
        self._slots.pack(offer.packed)
        self._drop_parts(offer.parts)
        if offer.prefix:
            is_last = bool(self.offers) and offer is self.offers[-1]
            first = min((self._parts[key].begin_slot for key in offer.parts), default=offer.prefix)
            length = len(self._slots) if is_last else min(offer.prefix, first)
            self._drop_prefix(length, but=offer.parts)

    def everything(self) -> Offer:
        """The offer of all that is saved, where no menu is known."""
        return Offer(self.num_bytes, self.seconds, frozenset(), len(self._slots))

    def drop_all(self) -> None:
        """Gives up everything, if that can be made again, and as it was."""
        if not self._cannot_repeat():
            if self._memory.recorder is not None:
                self._slots.note_digests()
            self._drop_prefix(len(self._slots))

    def _drop_prefix(self, length: int, but: Set[PartKey] = frozenset()) -> None:
        """Gives up the first tensors.

        Args:
            length: how many, at least.
            but: parts of what follows, which run by themselves.
        """
        self._derived = frozenset()
        others = (part for key, part in self._parts.items() if key not in but and part.is_dropped)
        length = max(length, 1 + max((slot for each in others for slot in each.slots), default=-1))
        self._parts = {key: part for key, part in self._parts.items() if key in but}
        length = min(length, len(self._slots))  # another run may save fewer
        last = max(filter(self._slots.is_needed, range(length)), default=-1)
        self._num_prefix = last + 1
        for index in range(self._num_prefix):
            self._slots.let_go(index)

    def _drop_parts(self, keys: Set[PartKey]) -> None:
        chosen = [self._parts[key] for key in keys]
        dropped: set[int] = set()
        for part in chosen:
            part.is_dropped = True
            dropped |= self._slots.let_go_of(part.slots)
        # A part whose inputs are given up, or that lies within a dropped one, cannot run by itself.
        for key, part in list(self._parts.items()):
            is_inner = any(part.profile.is_within(each.profile) for each in chosen)
            if is_inner or (not part.is_dropped and not dropped.isdisjoint(part.profile.inputs)):
                del self._parts[key]

    # --- making again -----------------------------------------------------------------------------

    def _derive(self) -> None:
        """Has the ops of the tape make what was given up, when the backward begins."""
        begin = self._memory.clock()
        slots, self._derived = self._derived, frozenset()
        self.is_made_again = True
        for index, each in self._slots.packed():
            self._made_whole(index, each)
        taped = self._taped
        assert taped is not None
        needed = set(filter(self._slots.is_needed, slots))
        made = self._with_room(lambda: taped.make(needed, self._slots.present()))
        for index, saved in made.items():
            self._slots.fill(index, saved)
        self._memory.note_made_again(self._memory.clock() - begin)

    def _made_whole(self, index: int, packed: TwoValued) -> Saved:
        """What was held as booleans."""
        self.is_made_again = True
        made = self._with_room(lambda: {index: packed.unpacked()})
        self._slots.let_go(index)
        self._slots.fill(index, made[index])
        return made[index]

    def _make_again(self, index: int) -> Saved:
        """Runs a forward again, for what was dropped."""
        begin = self._memory.clock()
        self.is_made_again = True
        if index < self._num_prefix:
            made = self._with_room(
                lambda: self._made_by(self._call, 0, range(self._num_prefix), results_of=None)
            )
        else:
            made = self._made_by_part(index)
        for each, saved in made.items():
            if not self._slots.is_as_noted(each, saved):
                first = f"a tensor {list(saved.tensor.shape)}"
                raise self._call.not_repeated(first, "one with other values")
            self._slots.fill(each, saved)
        self._memory.note_made_again(self._memory.clock() - begin)
        saved = self._slots.found(index)
        assert isinstance(saved, Saved)
        return saved

    def _made_by_part(self, index: int) -> dict[int, Saved]:
        """What the dropped part with a slot makes."""
        part = next(
            each for each in self._parts.values() if each.is_dropped and index in each.slots
        )
        call, slots = part.call, part.profile.slots
        assert call is not None
        results_of = part if part.results else None
        made = self._with_room(
            lambda: self._made_by(call, part.begin_slot, slots, results_of=results_of)
        )
        part.is_dropped, part.call = False, None
        return made

    def _with_room(self, make: Callable[[], dict[int, Saved]]) -> dict[int, Saved]:
        """What a second run makes; where memory runs out, others are dropped, and it runs anew."""
        while True:
            try:
                return make()
            except Exception as error:
                if not self._memory.has_made_room(error, self.order, but=self):
                    raise

    def _made_by(
        self, call: Call, first: int, slots: Iterable[int], *, results_of: Part | None
    ) -> dict[int, Saved]:
        """What a second run saves.

        Args:
            call: what runs.
            first: position of the first tensor that it saves.
            slots: positions to fill.
            results_of: the part whose results fill slots, too.
        """
        wanted = self._slots.missing(slots)
        last = max(wanted if results_of is None else slots, default=first - 1)
        collector = Collector(call, first, self._slots.shapes, None if results_of else last)
        made = collector.run(self._call.outside_storages().keys(), last, results_of)
        if results_of is not None:
            wanted |= results_of.slots
        return {index: made[index] for index in wanted & made.keys()}
