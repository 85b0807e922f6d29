"""How much of the run's tokens is spent, between two reports of it."""

from collections.abc import Mapping


class Budget:
    """Estimates the tokens of the whole run now, from what was last heard of it and from what this learner did since.

    A learner hears of the run's tokens about once a second; until then it takes the others to go on at the pace that
    the last report showed: run(now) ≈ run(heard) + own(since) · Δrun / Δown. Where reports come at every step it is
    exact.
    """

    def __init__(self, own: int, heard: int) -> None:
        self._own = own
        self._heard = heard
        self._pace = 1.0

    def spent(self, own: int, heard: int) -> int:
        """Tokens of the run now; `own` is this learner's count now, `heard` the run's as last reported."""
        if heard != self._heard:
            if own > self._own:
                # At least its own pace: a learner that left takes its tokens with it, which looks like a negative pace.
                self._pace = max(1.0, (heard - self._heard) / (own - self._own))
            self._own, self._heard = own, heard
        return heard + int((own - self._own) * self._pace)

    def state_dict(self) -> dict[str, float]:
        """The last report, its time in own tokens, and the pace."""
        return {"own": self._own, "heard": self._heard, "pace": self._pace}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict`, where the run has not gone on."""
        self._own, self._heard, self._pace = int(state["own"]), int(state["heard"]), state["pace"]
