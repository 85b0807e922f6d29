"""The versions of the global model that a learner holds, those that are published, and what to fetch next."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.protocol.session.requests import Fetch, Identity

NOTHING = -1
"""The version of a fragment that is not fetched yet."""


class ModelCache:
    """A learner's cache of the global model: its versions only, the executor holds the tensors.

    Attributes:
        held: the version of each fragment that is fetched.
    """

    def __init__(self, num_fragments: int) -> None:
        self.held = [NOTHING] * num_fragments
        self._published = [NOTHING] * num_fragments
        self._behind: list[int] = []  # fragments with newer versions: those first that have waited longest for a fetch
        self._whole: set[int] = set()  # fragments whose next update led to a wrong digest
        self._calls = set[tuple[int, int]]()
        self._has_static = False

    @property
    def is_complete(self) -> bool:
        """Whether there is a whole model."""
        return self._has_static and NOTHING not in self.held

    def published(self, versions: Sequence[int]) -> None:
        """These versions of the fragments are published."""
        for fragment, version in enumerate(versions):
            if version > self._published[fragment]:
                self._published[fragment] = version
                if fragment not in self._behind:
                    self._behind.append(fragment)

    def called(self, calls: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Take in the open calls, as (fragment, version). Returns the new ones that are for the newest version."""
        news = [(f, v) for f, v in calls if (f, v) not in self._calls and v >= self._published[f]]
        self._calls = set(calls)
        return news

    def next(self, who: Identity) -> Fetch | None:
        """The next fetch; None: the newest published versions are fetched."""
        if NOTHING in self.held:
            return Fetch(who, self.held.index(NOTHING), NOTHING, joining=True)
        if not self._has_static:
            return Fetch(who, None, NOTHING, joining=True)
        self._behind = [fragment for fragment in self._behind if self.held[fragment] < self._published[fragment]]
        if not self._behind:
            return None
        fragment = self._behind[0]
        return Fetch(who, fragment, NOTHING if fragment in self._whole else self.held[fragment])

    def fetched(self, fetch: Fetch, version: int) -> None:
        """A fetch brought this version."""
        if fetch.fragment is None:
            self._has_static = True
            return
        self.held[fetch.fragment] = version
        self._whole.discard(fetch.fragment)
        if fetch.fragment in self._behind:  # with a newer version still it is fetched again after the others
            self._behind.remove(fetch.fragment)
            self._behind.append(fetch.fragment)

    def restored(self, versions: Sequence[int]) -> None:
        """The learner holds these versions, from a checkpoint."""
        self.held = list(versions)

    def distrust(self, fragment: int) -> None:
        """The update led to other bits than the published ones: fetch the fragment whole."""
        self._whole.add(fragment)
