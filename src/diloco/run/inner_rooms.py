"""Room for the inner states that are relayed: one, and another that is given up while its upload still runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from diloco.errors import NoRoomError
from diloco.run.ports import S

MOST = 2


@dataclass
class _Room(Generic[S]):
    slot: S
    num_users: int = 1  # uploads and downloads under way


class InnerRooms(Generic[S]):
    """The rooms by the number of their request. One is given back only when no transfer uses it."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room[S]] = {}

    def require_place(self) -> None:
        """Raises NoRoomError: earlier uploads still run."""
        if len(self._rooms) >= MOST:
            raise NoRoomError("earlier uploads of inner states have not ended yet; this one is not taken.")

    def add(self, number: int, slot: S) -> None:
        """Room for a state, which is uploaded from now on."""
        self._rooms[number] = _Room(slot)

    def slot(self, number: int) -> S:
        """The room of a state, for a transfer that uses it."""
        return self._rooms[number].slot

    def use(self, number: int) -> None:
        """A download begins."""
        self._rooms[number].num_users += 1

    def leave(self, number: int) -> None:
        """A transfer has ended."""
        self._rooms[number].num_users -= 1

    def unused(self, keep: int) -> list[S]:
        """Take out the rooms that no transfer uses, but for that of the request `keep`."""
        gone = [number for number, room in self._rooms.items() if room.num_users == 0 and number != keep]
        return [self._rooms.pop(number).slot for number in gone]
