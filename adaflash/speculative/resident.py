# SPDX-License-Identifier: Apache-2.0
"""The drafter versions in memory, at most two: what new requests get, and what older ones still draft with."""

from __future__ import annotations

from collections import Counter

from adaflash.speculative.base import Drafter


class ResidentDrafters:
    """Hands out versions to requests, which keep theirs; forgets a version that nobody uses any more.

    `good` is the last good version. A new one is introduced at once, or as a candidate that gets a share of the new
    requests until it is promoted or rolled back. Versions differ in weights only: block size, mask token, taps and
    draft vocabulary are the same.

    Args:
        drafter: What came with the checkpoint.
        keeps_addresses: Whether a new version takes the place of a forgotten one in memory: captured graphs read the
            weights where they were.
    """

    MAX_VERSIONS = 2

    def __init__(self, drafter: Drafter, keeps_addresses: bool = False) -> None:
        self.good = drafter.version
        self.candidate: int | None = None
        self.candidate_share = 0.0
        self._drafters = {drafter.version: drafter}
        self._num_users: Counter[int] = Counter()
        self._credit = 0.0
        self._keeps_addresses = keeps_addresses
        self._spare: Drafter | None = None

    def __getitem__(self, version: int) -> Drafter:
        return self._drafters[version]

    def __contains__(self, version: int) -> bool:
        return version in self._drafters

    @property
    def current(self) -> Drafter:
        """The last good drafter."""
        return self._drafters[self.good]

    @property
    def versions(self) -> list[int]:
        """Resident versions, oldest first."""
        return sorted(self._drafters)

    @property
    def has_room(self) -> bool:
        """Whether a new version can be introduced now."""
        return len(self._drafters) < self.MAX_VERSIONS

    @property
    def draining(self) -> int | None:
        """The version that only older requests use, if any."""
        return next((v for v in self._drafters if v not in (self.good, self.candidate)), None)

    def acquire(self) -> int:
        """Return the version of a new request; every share-th one gets the candidate."""
        version = self.good
        if self.candidate is not None:
            self._credit += self.candidate_share
            if self._credit >= 1.0:
                self._credit -= 1.0
                version = self.candidate
        self._num_users[version] += 1
        return version

    def release(self, version: int) -> None:
        """Count a request of `version` as ended."""
        assert self._num_users[version] > 0, "a version is released once per request"
        self._num_users[version] -= 1
        self._forget_unused()

    def introduce(self, drafter: Drafter, candidate_share: float | None = None) -> None:
        """Add a version: as a candidate with this share of the new requests, or (None) as the good one at once.

        Args:
            drafter: Of a version that is not resident; an older one to go back to.
            candidate_share: In (0, 1).
        """
        assert self.has_room, "a third version waits until one of the two is gone"
        assert drafter.version not in self._drafters, "a version is resident once"
        assert self.candidate is None, "one candidate at a time"
        self._drafters[drafter.version] = self._in_place(drafter)
        if candidate_share is None:
            self.good = drafter.version
        else:
            self.candidate, self.candidate_share, self._credit = drafter.version, candidate_share, 0.0
        self._forget_unused()

    def reinstate(self, version: int) -> None:
        """Make a resident version the good one again."""
        assert self.candidate is None, "a candidate is promoted or rolled back"
        assert version in self._drafters, "it is resident"
        self.good = version
        self._forget_unused()

    def promote(self) -> None:
        """Make the candidate the good version; requests of the old one keep it."""
        assert self.candidate is not None, "there is a candidate to promote"
        self.good, self.candidate = self.candidate, None
        self._forget_unused()

    def roll_back(self) -> None:
        """Give the candidate up; requests that use it must be moved over with `move`."""
        assert self.candidate is not None, "there is a candidate to roll back"
        self.candidate = None
        self._forget_unused()

    def move(self, version: int) -> int:
        """Count a request of `version` as one of the good version, which is returned."""
        self._num_users[self.good] += 1
        self.release(version)
        return self.good

    def _forget_unused(self) -> None:
        for version in list(self._drafters):
            if version not in (self.good, self.candidate) and not self._num_users[version]:
                forgotten = self._drafters.pop(version)
                del self._num_users[version]
                if self._keeps_addresses:
                    self._spare = forgotten

    def _in_place(self, drafter: Drafter) -> Drafter:
        """Return the version in the memory of one that is not used any more, if there is such memory."""
        if self._spare is None:
            return drafter
        spare, self._spare = self._spare, None
        spare.take_weights(drafter)
        return spare
