"""Which learner reads which documents, and a reader that goes through them pass after pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diloco.core.permutation import permute
from diloco.errors import ConfigError
from diloco.training.rows import Document, Documents, Rows

BATCH_CHARACTERS = 1 << 18
BATCH_DOCUMENTS = 1024


@dataclass(frozen=True)
class Deal:
    """The documents that one learner of several reads, of those from `begin` until before `end`: (part, row).

    Row r of part p is dealt to shard (p + r) mod `num_shards`; with `by_parts`, part p to shard p mod `num_shards`.
    """

    shard: int = 0
    num_shards: int = 1
    by_parts: bool = False
    begin: tuple[int, int] = (0, 0)
    end: tuple[int, int] | None = None

    def opens(self, part: int) -> bool:
        """Whether anything of this part may be dealt to this shard."""
        if part < self.begin[0] or (self.end is not None and (part, 0) >= self.end):
            return False
        return not self.by_parts or part % self.num_shards == self.shard

    def is_over(self, part: int, row: int) -> bool:
        """Whether nothing from this row of a part on is dealt."""
        return self.end is not None and (part, row) >= self.end

    def takes(self, part: int, row: int) -> bool:
        """Whether a row of a part that this shard opens is dealt to it."""
        return (part, row) >= self.begin and (self.by_parts or (part + row) % self.num_shards == self.shard)


class Reader:
    """Reads the documents of a deal, pass after pass.

    Arguments:
        seed: gives each pass an order of its own to the parts; None: they stay in order.
        state: where a reader of the same documents and deal was.
    """

    def __init__(
        self, documents: Documents, deal: Deal, seed: int | None = None, state: dict[str, Any] | None = None
    ) -> None:
        self._parts, self._deal, self._seed = documents.parts, deal, seed
        state = state or {"pass": 0, "place": 0, "row": 0, "cursor": None}
        self._pass, self._place, self._row = int(state["pass"]), int(state["place"]), int(state["row"])
        self._cursor = state["cursor"]
        self._rows: Rows | None = None

    @property
    def at(self) -> tuple[int, int]:
        """Part and row that are read next, where parts stay in order."""
        return self._place, self._row

    def next(self) -> Document | None:
        """The next document; None at the end of a pass, after which the next one begins."""
        while self._place < len(self._parts):
            part = self._part_at(self._place)
            row = None
            if self._deal.opens(part) and not self._deal.is_over(part, self._row):
                if self._rows is None:
                    self._rows = self._parts[part].rows(self._cursor)
                row = self._rows.next()
            if row is None:
                self._place, self._row, self._cursor, self._rows = self._place + 1, 0, None, None
                continue
            number, self._row = self._row, self._row + 1
            if self._deal.takes(part, number):
                return self._parts[part].document(row, number)
        self._pass, self._place = self._pass + 1, 0
        return None

    def batch(self) -> tuple[list[Document], bool]:
        """Documents of together about `BATCH_CHARACTERS`, and whether the pass is over after them."""
        batch: list[Document] = []
        num_characters = 0
        while num_characters < BATCH_CHARACTERS and len(batch) < BATCH_DOCUMENTS:
            document = self.next()
            if document is None:
                return batch, True
            batch.append(document)
            num_characters += len(document.text)
        return batch, False

    def one_pass(self) -> Iterator[list[Document]]:
        """The batches until the end of the pass."""
        is_over = False
        while not is_over:
            batch, is_over = self.batch()
            if batch:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where reading goes on, as plain values."""
        cursor = self._cursor if self._rows is None else self._rows.cursor()
        return {"pass": self._pass, "place": self._place, "row": self._row, "cursor": cursor}

    def _part_at(self, place: int) -> int:
        if self._seed is None:
            return place
        key = self._seed.to_bytes(8, "little") + b"part" + self._pass.to_bytes(8, "little")
        return permute(place, len(self._parts), key)


def held_out_end(documents: Documents, num_held_out: int) -> tuple[int, int]:
    """Where the first so many documents end, as `Deal` counts. Raises ConfigError when there are not more of them."""
    reader = Reader(documents, Deal())
    end = reader.at
    for count in range(num_held_out + 1):
        end = reader.at
        if reader.next() is None:
            raise ConfigError(
                f"the data has {count} documents, and the first {num_held_out} are held out; lower "
                "data.held_out_documents, or name a held-out part"
            )
    return end
