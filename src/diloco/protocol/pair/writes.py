"""The order of a first's writes, which its standby confirms: a version that is here and not confirmed comes first."""

from __future__ import annotations

from dataclasses import dataclass

from diloco.errors import StoreError


@dataclass(frozen=True)
class WriteKey:
    """A version to be written: of which fragment, and with which digest."""

    fragment: int
    version: int
    digest: str


class PairedWrites:
    """Of one driver. A write is durable here first, then at the standby; while the standby has not confirmed it, it is
    refused, as by a full disk, and tried again."""

    def __init__(self) -> None:
        self._unconfirmed: WriteKey | None = None

    def begins(self, key: WriteKey | None) -> bool:
        """A version is to be written, or a record alone (None); returns whether that version is here already, from a
        try before this one: its record is to be written alone.

        Raises:
            StoreError: another version is here and not confirmed. The record that goes with that one is the newest that
                may be durable: one of another version would say that its contributions are open.
        """
        if self._unconfirmed not in (None, key):
            it = self._unconfirmed
            raise StoreError(
                f"version {it.version} of fragment {it.fragment} comes first, which the standby has not confirmed."
            )
        return self._unconfirmed is not None

    def wrote(self, key: WriteKey | None) -> None:
        """It is durable here."""
        self._unconfirmed = key

    def confirmed(self) -> None:
        """It is at the standby too, where there is one."""
        self._unconfirmed = None
