"""How the inner optimizer's state of a learner of several ranks is put together and taken apart."""

from __future__ import annotations

import pytest

from diloco.errors import CorruptPayloadError
from diloco.exchange.island.inner_states import Pieces


def content(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def test_replicas_have_one_part() -> None:
    assert Pieces(("a", "b", "a", "b")).split(content(b"one", b"three")) == [b"one", b"three", b"one", b"three"]
    assert Pieces(("a", "a")).split(b"whole") == [b"whole", b"whole"]
    assert Pieces(("a", "a")).digest == Pieces(("a",)).digest == "a"


def test_another_division_has_another_digest() -> None:
    divisions = [("a", "b"), ("b", "a"), ("a", "b", "b"), ("a",)]
    assert len({Pieces(each).digest for each in divisions}) == len(divisions)


@pytest.mark.parametrize(
    "damaged", [b"", content(b"one"), content(b"one", b"two")[:-1], content(b"one", b"two") + b"x", b"\xff" * 40]
)
def test_a_state_of_other_parts_is_refused(damaged: bytes) -> None:
    with pytest.raises(CorruptPayloadError, match="2 parts"):
        Pieces(("a", "b")).split(damaged)
