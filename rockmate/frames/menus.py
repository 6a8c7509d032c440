"""What each frame may give up, learned from frames that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from rockmate.frames.agreement import Agreement
from rockmate.frames.menu import (
    FrameProfile,
    Offer,
    choices,
    menu,
    of_least_bytes,
    prefixes,
    smoothed,
)
from rockmate.frames.needs import FrameKey


class Menus:
    """Offers of frames, by their calls.

    Attributes:
        version: counts how often they were made.
    """

    def __init__(self) -> None:
        self.version = 0
        self._profiles: dict[FrameKey, FrameProfile] = {}
        self._menus: dict[FrameKey, tuple[Offer, ...]] = {}
        self._menu_of_path: dict[str, tuple[Offer, ...]] = {}
        self._choices: dict[FrameKey, tuple[Offer, ...]] = {}
        self._made_from: dict[FrameKey, FrameProfile] = {}
        self._profile_of_path: dict[str, FrameProfile] = {}
        self._agreed: dict[FrameKey | str, tuple[Offer, ...]] = {}  # by calls and their paths

    def note(self, key: FrameKey, profile: FrameProfile) -> None:
        """Takes the profile of a frame, for `make`."""
        self._profiles[key] = profile

    def make(self, agreement: Agreement | None = None) -> None:
        """Makes menus from the profiles since the last time, if there are any.

        Args:
            agreement: with ranks that choose from the same prefixes of a call, and nothing else.
        """
        profiles, self._profiles = self._profiles, {}
        if not profiles:
            return
        self.version += 1
        for key, profile in zip(profiles, smoothed(list(profiles.values())), strict=True):
            self._menus[key] = self._menu_of_path[key.path] = menu(profile)
            self._made_from[key] = self._profile_of_path[key.path] = profile
        self._choices.clear()
        if agreement is not None:
            own = {key: prefixes(profile) for key, profile in profiles.items()}
            others = agreement.of_all(own)
            for key in profiles:
                agreed = of_least_bytes([each[key] for each in others if key in each])
                self._agreed[key] = self._agreed[key.path] = agreed

    def menu_of(self, key: FrameKey) -> tuple[Offer, ...] | None:
        """Nested offers, cheapest bytes first; None if no frame of the path is known."""
        return self._menus.get(key, self._menu_of_path.get(key.path))

    def menu_of_path(self, path: str) -> tuple[Offer, ...] | None:
        """Those of the last frame of a path that was measured; None if there was none."""
        return self._menu_of_path.get(path)

    def hooks_s(self, key: FrameKey) -> float:
        """Seconds of a frame's hooks; of one that is not known, those of its path."""
        profile = self._profile_of(key)
        return 0.0 if profile is None else profile.hooks_s

    def _profile_of(self, key: FrameKey) -> FrameProfile | None:
        return self._made_from.get(key, self._profile_of_path.get(key.path))

    def choices_of(self, key: FrameKey) -> Sequence[Offer]:
        """All that is worth giving up, one of them at a time."""
        if self._agreed:
            return self._agreed.get(key, self._agreed.get(key.path, ()))
        if key not in self._choices:
            profile = self._profile_of(key)
            self._choices[key] = () if profile is None else choices(profile)
        return self._choices[key]
