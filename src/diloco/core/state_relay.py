"""The inner optimizer's state of one learner for another one: the syncer's part. It decides who is asked, and when who
is given up; the bytes go through a room of the driver's (`run.inner_rooms`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.errors import PayloadError

ANSWER_STEPS, ANSWER_FLOOR_S, ANSWER_CAP_S = 5.0, 10.0, 120.0
"""How long a peer has to begin its upload: this many of its own steps, within a floor and a cap. It takes a snapshot
after its next step."""

UPLOAD_S = 1800.0
"""How long an upload may take. The joiner's own patience ends most of them earlier."""

SILENT_S = 15.0
"""A joiner asks about twice a second. One that has been silent for so long has given up."""

HELD_S = 1800.0
"""How long a state is held for a joiner that fetches it."""

AGAIN_S, MOST_ASKED = 60.0, 2
"""A learner that was given a state gets no other one for so long, and one for which others were asked so often within
that time, but which took none, has to wait: one that asks without end cannot keep the others uploading. Asked for twice
is a joiner that was started again."""


@dataclass(frozen=True)
class Peer:
    """A healthy learner that can be asked.

    Attributes:
        tokens: trained by this incarnation: those with more have older moments, and are asked first.
        step_s: seconds of its inner step; None: not measured yet.
    """

    learner: str
    incarnation: int
    tokens: int
    step_s: float | None


@dataclass(frozen=True)
class HealAnswer:
    """What a joiner is told.

    Attributes:
        state: "wait": ask again soon. "ready": a peer's state can be fetched. "refused": there is none. "none": it is
            not needed, since the run has published no version yet.
        number: of the state that is ready.
        num_bytes, sha256: of its bytes.
        peer: whose it is.
        reason: why there is none.
    """

    state: Literal["wait", "ready", "refused", "none"]
    number: int = 0
    num_bytes: int = 0
    sha256: str = ""
    peer: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Relayed:
    """How the healing of one joiner ended at the syncer.

    Attributes:
        peer: whose state it was given; None: none.
        reason: why it was given none.
        seconds: since it first asked.
    """

    joiner: str
    peer: str | None
    num_bytes: int
    seconds: float
    reason: str = ""


@dataclass
class _Transfer:
    """A state on its way from a peer to a joiner.

    Attributes:
        digest: of the joiner's optimizers, which the peer's must equal.
        tried: learners that were asked, and why they gave nothing.
        peer, number: asked now; the number is of this request. None: no peer is asked yet.
        ends_at: when the peer is given up, or the state that is held is dropped.
        heard_at: of the joiner.
        is_fetching: the joiner fetches it. was_asked: any peer was asked.
        sha256: of the whole state, once it is here.
    """

    joiner: str
    process: int
    digest: str
    began_at: float
    heard_at: float
    tried: dict[str, str]
    phase: Literal["asking", "uploading", "held", "refused"] = "asking"
    peer: Peer | None = None
    number: int = 0
    ends_at: float = math.inf
    num_bytes: int = 0
    sha256: str = ""
    is_fetching: bool = False
    was_asked: bool = False


class StateRelay:
    """Decides which learner gives its inner optimizer's state to a joiner, one joiner at a time.

        joiner      wanted, wanted, …                     fetches        took
        peer                asked   began      completed
        phase       asking ──────── uploading ─ held ──────────────────── (none)

    A peer is asked by what stands for it (`asks`), so that a lost message is repaired by the next one. One that
    declines, has other optimizers, breaks off or does not answer in time is followed by the next; after the last, the
    joiner is refused with the reasons. Nothing is durable: after a restart of the syncer a joiner asks anew.

    Arguments:
        boot: of the driver; requests of different drivers have different numbers.

    Attributes:
        wake_at: call `tick` at this time.
    """

    def __init__(self, boot: int) -> None:
        self._boot, self._count = boot, 0
        self._now: _Transfer | None = None
        self._asked_for: dict[
            str, list[tuple[float, bool]]
        ] = {}  # by joiner: when that ended, and whether it took a state
        self._ended: list[Relayed] = []

    # --- what stands --------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> tuple[str, int] | None:
        """Which incarnation is asked for its state; None: none."""
        it = self._now
        return (it.peer.learner, it.peer.incarnation) if it and it.peer and it.phase == "asking" else None

    def number_for(self, learner: str, incarnation: int) -> int:
        """The number of the request that stands for an incarnation; 0: there is none."""
        return self._now.number if self._now is not None and self.asks == (learner, incarnation) else 0

    @property
    def held(self) -> int:
        """The number of the state that is here, or comes, and takes room; 0: there is none."""
        return self._now.number if self._now is not None and self._now.phase in ("uploading", "held") else 0

    @property
    def wake_at(self) -> float:
        if (it := self._now) is None:
            return math.inf
        return it.ends_at if it.is_fetching else min(it.ends_at, it.heard_at + SILENT_S)

    def ended(self) -> list[Relayed]:
        """What ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- the joiner ---------------------------------------------------------------------------------------------------

    def wanted(self, now: float, joiner: str, process: int, digest: str, peers: Sequence[Peer]) -> HealAnswer:
        """A learner that is about to join wants a state, or asks again.

        Arguments:
            process: a random number of its process; another one under the same name begins anew.
            digest: of its optimizers.
            peers: all healthy learners.
        """
        it = self._now
        if it is not None and it.joiner != joiner:
            return HealAnswer("wait")
        if it is not None and (it.process, it.digest) != (process, digest):
            self._end(now, "another process has joined under its name")
            it = None
        if it is None:
            if reason := self._had_enough(now, joiner):
                return HealAnswer("refused", reason=reason)
            it = self._now = _Transfer(joiner, process, digest, now, now, {})
            self._ask_next(now, peers)
        it.heard_at = now
        if it.phase == "held" and it.peer is not None:
            return HealAnswer("ready", it.number, it.num_bytes, it.sha256, it.peer.learner)
        if it.phase == "refused":
            reason = "; ".join(f"{peer} {why}" for peer, why in it.tried.items()) or "no healthy learner can be asked"
            self._end(now, reason)
            return HealAnswer("refused", reason=reason)
        return HealAnswer("wait")

    def fetches(self, now: float, joiner: str, process: int, number: int) -> None:
        """The joiner fetches the state.

        Raises:
            PayloadError: it is not its, or not here any more.
        """
        it = self._now
        if it is None or it.phase != "held" or (it.joiner, it.process, it.number) != (joiner, process, number):
            raise PayloadError(f"no inner state {number} is held for {joiner!r}; ask for one.")
        it.is_fetching, it.ends_at = True, now + HELD_S

    def fetch_ended(self, now: float, joiner: str, process: int, number: int) -> None:
        """The joiner has fetched the state, or its connection broke; it says soon which (`took`), or fetches again."""
        it = self._now
        if it is not None and (it.joiner, it.process, it.number) == (joiner, process, number):
            it.is_fetching, it.heard_at = False, now

    def took(self, now: float, joiner: str, process: int, number: int) -> None:
        """The joiner has the state, or does without it; nothing is held for it any more."""
        it = self._now
        if it is not None and (it.joiner, it.process, it.number) == (joiner, process, number):
            self._end(now, "" if it.phase == "held" else "it gave up")

    # --- the peer -----------------------------------------------------------------------------------------------------

    def began(
        self, now: float, peer: str, incarnation: int, number: int, digest: str, num_bytes: int, most_bytes: int
    ) -> None:
        """The peer begins its upload.

        Arguments:
            digest: of its optimizers.
            most_bytes: that the state of this model can need.

        Raises:
            PayloadError: it was not asked, has other optimizers, or its state has an impossible size.
        """
        it = self._asked(peer, incarnation, number)
        if digest != it.digest:
            self._failed(now, "has another inner optimizer, trains other tensors or divides them over ranks otherwise")
            raise PayloadError(
                f"{it.joiner!r} has another inner optimizer than {peer!r}, trains other tensors or divides them over "
                "ranks otherwise."
            )
        if not 0 < num_bytes <= most_bytes:
            self._failed(now, f"has a state of {num_bytes} bytes, where this model needs {most_bytes} at most")
            raise PayloadError(
                f"an inner state of this model has at most {most_bytes} bytes, not {num_bytes}; it is not taken."
            )
        it.phase, it.num_bytes, it.ends_at = "uploading", num_bytes, now + UPLOAD_S

    def declined(self, now: float, peer: str, incarnation: int, number: int, reason: str) -> None:
        """The peer cannot give its state, or there is no room for it.

        Raises:
            PayloadError: it was not asked.
        """
        self._asked(peer, incarnation, number)
        self._failed(now, f"cannot give its state: {reason}")

    def cut(self, now: float, peer: str, incarnation: int, number: int) -> None:
        """The peer's upload broke off."""
        if self._is_uploading(peer, incarnation, number):
            self._failed(now, "broke its upload off")

    def completed(self, now: float, peer: str, incarnation: int, number: int, sha256: str) -> None:
        """All of the peer's state is here.

        Raises:
            PayloadError: the joiner has given up meanwhile.
        """
        it = self._now
        if it is None or not self._is_uploading(peer, incarnation, number):
            raise PayloadError(f"the inner state {number} is not wanted any more; it is dropped.")
        it.phase, it.sha256, it.ends_at = "held", sha256, now + HELD_S

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float, peers: Sequence[Peer]) -> None:
        """Time has passed; `peers`: all healthy learners."""
        it = self._now
        if it is None:
            return
        if not it.is_fetching and now >= it.heard_at + SILENT_S:
            self._end(now, "it gave up")
            return
        if it.phase == "held" and now >= it.ends_at:
            self._end(now, "it did not fetch the state in time")
            return
        if it.peer is not None and it.phase in ("asking", "uploading"):
            if (it.peer.learner, it.peer.incarnation) not in {(each.learner, each.incarnation) for each in peers}:
                self._failed(now, "is not healthy any more")
            elif now >= it.ends_at:
                what = "answer" if it.phase == "asking" else "finish its upload"
                self._failed(now, f"did not {what} in time")
        if it.peer is None and it.phase == "asking":
            self._ask_next(now, peers)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _ask_next(self, now: float, peers: Sequence[Peer]) -> None:
        it = self._now
        assert it is not None
        left = [each for each in peers if each.learner != it.joiner and each.learner not in it.tried]
        if not left:
            it.phase, it.peer, it.ends_at = "refused", None, math.inf
            return
        it.peer = min(left, key=lambda each: (-each.tokens, each.learner))
        self._count += 1
        it.number = (self._boot + self._count) % 2**63 or 1
        it.phase, it.was_asked = "asking", True
        it.ends_at = now + min(ANSWER_CAP_S, max(ANSWER_FLOOR_S, ANSWER_STEPS * (it.peer.step_s or 0.0)))

    def _failed(self, now: float, why: str) -> None:
        """The peer gives nothing: the next one is asked at the next tick, which is due now."""
        it = self._now
        assert it is not None
        assert it.peer is not None
        it.tried[it.peer.learner] = why
        it.phase, it.peer, it.number, it.ends_at = "asking", None, 0, now

    def _asked(self, peer: str, incarnation: int, number: int) -> _Transfer:
        if self._now is None or number == 0 or self.number_for(peer, incarnation) != number:
            raise PayloadError(f"{peer!r} was not asked for an inner state {number}; none is taken.")
        return self._now

    def _is_uploading(self, peer: str, incarnation: int, number: int) -> bool:
        it = self._now
        if it is None or it.peer is None or it.phase != "uploading":
            return False
        return (it.peer.learner, it.peer.incarnation, it.number) == (peer, incarnation, number)

    def _had_enough(self, now: float, joiner: str) -> str:
        """Why no other learner is asked for it; "": one is."""
        lately = [each for each in self._asked_for.get(joiner, ()) if now - each[0] < AGAIN_S]
        for then, is_given in lately:
            if is_given:
                return f"it was given a state {now - then:.0f} s ago, and is given one in {AGAIN_S:.0f} s at most"
        if len(lately) < MOST_ASKED:
            return ""
        return f"learners were asked for it {len(lately)} times within {AGAIN_S:.0f} s, and it took no state"

    def _end(self, now: float, reason: str) -> None:
        it, self._now = self._now, None
        assert it is not None
        peer = it.peer.learner if it.peer is not None and not reason else None
        if it.was_asked:
            lately = {name: [each for each in known if now - each[0] < AGAIN_S]
                      for name, known in self._asked_for.items()}  # fmt: skip
            self._asked_for = {name: known for name, known in lately.items() if known}
            self._asked_for.setdefault(it.joiner, []).append((now, peer is not None))
        num_bytes = it.num_bytes if peer is not None else 0
        self._ended.append(Relayed(it.joiner, peer, num_bytes, now - it.began_at, reason))
