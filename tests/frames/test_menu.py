"""What a frame may give up: each offer against a count of its own, and the order of offers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from rockmate.frames.menu import FrameProfile, Offer, PartKey, PartProfile, menu, smoothed


def random_profile(seed: int) -> FrameProfile:
    """Tensors of a frame with parts within parts; some share storages."""
    draw = random.Random(seed)
    num_slots = draw.randint(1, 14)
    storages = [[draw.randint(0, num_slots)] for _ in range(num_slots)]
    saved_s = sorted(draw.random() for _ in range(num_slots))
    sizes = {key: draw.randint(1, 9) for keys in storages for key in keys}
    parts: dict[PartKey, PartProfile] = {}

    def add(begin: int, end: int, path: str) -> None:
        begin_s = saved_s[begin] - 0.001
        end_s = saved_s[end - 1] + 0.001
        inputs = {draw.choice(storages)[0]} if draw.random() < 0.7 else {100}
        slots = [i for i in range(begin, end) if not inputs.issuperset(storages[i])]
        later = [i for i in range(end, num_slots) if draw.random() < 0.2]
        parts[PartKey(path, 0)] = PartProfile(begin_s, inputs, end_s, slots, later)
        if end - begin > 2:
            middle = draw.randint(begin + 1, end - 1)
            add(begin, middle, f"{path}.0")
            add(middle, end, f"{path}.1")

    if num_slots > 1:
        add(0, num_slots // 2, "a")
        add(num_slots // 2, num_slots, "b")
    return FrameProfile(storages, saved_s, sizes, {100}, parts)


def slots_of(profile: FrameProfile, offer: Offer) -> set[int]:
    if offer.prefix:
        return set(range(offer.prefix))
    parts = [profile.parts[key] for key in offer.parts]
    return {slot for part in parts for slot in (*part.slots, *part.result_slots)}


def freed_bytes(profile: FrameProfile, offer: Offer) -> int:
    """Counted storage by storage: freed is what nobody needs afterwards."""
    given_up = slots_of(profile, offer)
    inputs = set().union(*(profile.parts[key].inputs for key in offer.parts))
    freed = 0
    for key, size in profile.num_bytes.items():
        holders = {slot for slot, keys in enumerate(profile.storages) if key in keys}
        if holders <= given_up and not (not offer.prefix and key in inputs):
            freed += size
    return freed


def test_offers_free_what_they_say_at_rising_prices() -> None:
    num_with_parts = 0
    for seed in range(300):
        profile = random_profile(seed)
        offers = menu(profile)
        last = 0
        for offer in offers:
            assert offer.num_bytes == freed_bytes(profile, offer)
            # The last offer gives up what is shared with other frames, too: they may do so as well.
            assert offer.num_bytes > last or offer is offers[-1]
            last = offer.num_bytes
            num_with_parts += bool(offer.parts)
        assert offers[-1].prefix
        assert last == sum(profile.num_bytes.values())
        points = [(0, 0.0), *((each.num_bytes, each.seconds) for each in offers)]
        prices = [(t1 - t0) / max(1, b1 - b0) for (b0, t0), (b1, t1) in pairwise(points)]
        by_parts = [price for price, offer in zip(prices, offers, strict=True) if offer.parts]
        assert by_parts == sorted(by_parts)
    assert num_with_parts > 100


def test_a_prefix_holds_what_parts_before_it_have_given_up() -> None:
    for seed in range(300):
        profile = random_profile(seed)
        given_up: set[int] = set()
        for offer in menu(profile):
            slots = slots_of(profile, offer)
            if offer.prefix:
                assert given_up <= slots
            given_up |= slots


def test_a_cheap_part_comes_first() -> None:
    """Storages 0 to 3: a product's input, the product, what an activation makes of it."""
    part = PartProfile(begin_s=0.9, inputs={1}, end_s=1.0, slots=[1], result_slots=[2])
    profile = FrameProfile(
        storages=[[1], [2], [3]], saved_s=[0.8, 0.95, 1.0], num_bytes={1: 4, 2: 4, 3: 4},
        others=set(), parts={PartKey("act", 0): part},
    )  # fmt: skip
    first, last = menu(profile)
    assert (first.parts, first.num_bytes) == (frozenset(profile.parts), 8)
    assert 0.09 < first.seconds < 0.11
    assert (last.prefix, last.num_bytes, last.seconds) == (3, 12, 1.0)


def test_a_part_whose_input_is_nowhere_else_is_no_offer() -> None:
    part = PartProfile(begin_s=0.5, inputs={9}, end_s=0.6, slots=[0], result_slots=[])
    profile = FrameProfile([[1]], [0.6], {1: 4}, set(), {PartKey("act", 0): part})
    (only,) = menu(profile)
    assert only.prefix == 1


def test_times_are_medians_over_frames_of_the_same_structure() -> None:
    one, other = random_profile(3), random_profile(4)
    noisy = [
        replace(
            one,
            saved_s=[factor * each for each in one.saved_s],
            parts={
                key: replace(part, begin_s=factor * part.begin_s, end_s=factor * part.end_s)
                for key, part in one.parts.items()
            },
        )
        for factor in (1.0, 30.0, 1.2)
    ]
    *alike, apart = smoothed([*noisy, other])
    assert apart == other
    assert [menu(each) for each in alike] == [menu(noisy[2])] * 3


def test_times_of_larger_frames_of_the_same_structure_are_their_own() -> None:
    one = random_profile(3)
    larger = replace(
        one,
        saved_s=[4 * each for each in one.saved_s],
        num_bytes={key: 4 * num_bytes for key, num_bytes in one.num_bytes.items()},
    )
    assert smoothed([one, larger, larger]) == [one, larger, larger]


def test_a_frame_that_alone_holds_nothing_offers_nothing() -> None:
    assert menu(FrameProfile([[]], [0.1], {}, {5}, {})) == ()
