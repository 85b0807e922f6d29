"""A member's part of a round, repeated with new quorums until the fragment has the awaited version."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from diloco.core.fragments import Layout
from diloco.core.global_fragment import close, published_mean
from diloco.core.layout import SAME_MODEL
from diloco.core.method import Method
from diloco.errors import ConfigError, ExchangeError, LayoutError
from diloco.exchange.base import Arrived, Event
from diloco.exchange.group import Group, split
from diloco.exchange.peers import merge_inputs, require_same_digest
from diloco.exchange.torchft.quorum import HEARTBEAT_S, QuorumClient
from diloco.exchange.torchft.run_copy import Copy, RoundResult, adopt_first, heal
from diloco.protocol.contribution import MISSED, OUTLIER, Contribution, Rejection

log = logging.getLogger("diloco")


class ElasticRounds:
    """Joins the run, and runs rounds, on the background thread. Both methods block until they are done.

    Arguments:
        replica: this member's name.
        quorum: its client of the lighthouse.
        copy: its copy of the run.
        layout, method: of the run, the same on every member.
        timeout_s: how long it retries.
        num_bytes: bytes by kind; the bytes sent and received are added.

    Raises:
        LayoutError, ConfigError: (both methods) a member has another model or method.
        ExchangeError: (both methods) no round was finished within `timeout_s`.
    """

    def __init__(
        self, replica: str, quorum: QuorumClient, copy: Copy, layout: Layout, method: Method, timeout_s: float,
        num_bytes: dict[str, int],
    ) -> None:  # fmt: skip
        self._replica, self._quorum, self._copy = replica, quorum, copy
        self._layout, self._method = layout, method
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._failed = 0  # attempts in a row

    def join(self) -> None:
        """Join a run that starts now or is under way."""
        started = time.monotonic()
        while True:
            try:
                self._meet(None, torch.empty(0, dtype=torch.uint8))
                return
            except ExchangeError as error:
                self._give_up_after(started, error)

    def make(self, c: Contribution, payload: Callable[[], Tensor]) -> tuple[Event, ...]:
        """Run rounds until the fragment is at the version that follows the contribution's round."""
        encoded, started = payload(), time.monotonic()
        self._copy.step = max(self._copy.step, c.step)
        while True:
            try:
                frames = self._meet(c, encoded)
                # merged now, or earlier by members with all contributions, or without this learner
                if self._copy.fragments[c.fragment].version > c.round:
                    return self._events(c)
                if sum(frame["wants"] is not None for frame in frames) < self._method.quorum.at_least:
                    self._quorum.closing.wait(HEARTBEAT_S)
            except ExchangeError as error:
                self._give_up_after(started, error)

    def _events(self, c: Contribution) -> tuple[Event, ...]:
        held, result = self._copy.fragments[c.fragment], self._copy.results[c.fragment]
        is_merged = result.merged_rounds.get(self._replica, -1) >= c.round
        merged = c.number if is_merged else c.number - 1  # the earlier ones had events of their own
        starts_again = self._method.outer_at == "learners" and result.mean is None
        arrived = Arrived(
            result.update, replace(held, residual=None) if starts_again else held.bare, merged, result.mean
        )
        if is_merged:
            return (arrived,)
        is_outlier = held.version == c.round + 1 and self._replica in result.refused
        return Rejection(c.fragment, c.number, OUTLIER if is_outlier else MISSED), arrived

    # --- one quorum ---------------------------------------------------------------------------------------------------

    def _meet(self, c: Contribution | None, encoded: Tensor) -> list[dict[str, Any]]:
        """One attempt: greet, heal, merge. Returns every member's greeting, in rank order."""
        group = self._quorum.assemble()
        frames = self._greet(group, c)
        if all(frame["versions"][0] < 0 for frame in frames):
            adopt_first(group, self._copy, frames, self._num_bytes)
        heal(group, self._copy, frames, self._num_bytes)
        self._merge_wanted(group, frames, encoded)
        if self._failed:
            log.warning("%s: exchanging again, with %d in the group", self._replica, group.size)
        self._failed = 0
        return frames

    def _give_up_after(self, started: float, error: ExchangeError) -> None:
        """Prepare another attempt after a failed one. Raises ExchangeError once `timeout_s` is over."""
        log.log(
            logging.DEBUG if self._failed else logging.WARNING,
            "%s: an exchange failed and is repeated with the members that are left: %s", self._replica, error,
        )  # fmt: skip
        self._quorum.forget()
        if time.monotonic() - started > self._timeout_s:
            raise ExchangeError(
                f"no round could be finished within {self._timeout_s:g} s; check that the others are alive ({error})"
            ) from error
        self._quorum.closing.wait(min(HEARTBEAT_S, 0.05 * 2**self._failed))
        self._failed += 1

    def _greet(self, group: Group, c: Contribution | None) -> list[dict[str, Any]]:
        """Exchange the members' versions and the rounds that they want to merge; returns them in rank order.

        Raises:
            LayoutError, ConfigError: a member has another model or method.
        """
        wants = None
        if c is not None:
            wants = [c.fragment, c.round, c.number, c.base, c.tokens, c.steps, c.step, c.tensors, c.routed]
        mine = {"replica": self._replica, "wants": wants, "versions": self._copy.versions, "step": self._copy.step,
                "layout": self._layout.to_dict() if c is None else self._layout.digest(),
                "method": self._method.to_dict()}  # fmt: skip
        frames: list[dict[str, Any]] = group.gather_values(mine, "greeting the others")
        self._num_bytes["control"] += len(json.dumps(mine)) * 2 * (len(frames) - 1)
        for frame in frames:
            self._require_same_model(frame["replica"], frame["layout"])
            theirs = Method.from_dict(frame["method"])
            if difference := self._method.difference(theirs, f"on {self._replica}", f"on {frame['replica']}"):
                raise ConfigError(f"learners use different methods: {difference}.")
        return frames

    def _require_same_model(self, replica: str, layout: str | dict[str, Any]) -> None:
        """Compare another member's layout, or its digest while it trains, with this one's."""
        if isinstance(layout, str):
            difference = None if layout == self._layout.digest() else SAME_MODEL
        else:
            difference = self._layout.first_difference(Layout.from_dict(layout), f"on {self._replica}", f"on {replica}")
        if difference:
            raise LayoutError(f"{self._replica} and {replica} do not hold the same model: {difference}.")

    def _merge_wanted(self, group: Group, frames: Sequence[dict[str, Any]], encoded: Tensor) -> None:
        """Merge if all members with a contribution want the same round. All members decide alike.

        If they do not, a member was a round behind. It is healed now, and wants the next round in the next quorum.
        """
        wanted = {tuple(frame["wants"][:2]) for frame in frames if frame["wants"] is not None}
        num_wanting = sum(frame["wants"] is not None for frame in frames)
        if len(wanted) != 1 or num_wanting < self._method.quorum.at_least:
            return
        [(fragment, round_)] = wanted
        if max(frame["versions"][fragment] for frame in frames) == round_:
            self._merge(group, fragment, round_, encoded, frames)

    def _merge(
        self, group: Group, fragment: int, round_: int, encoded: Tensor, frames: Sequence[dict[str, Any]]
    ) -> None:
        """Send all contributions to all members; each computes the same merge, and the digests are compared."""
        held, place = self._copy.fragments[fragment], f"round {round_} of fragment {fragment}"
        method, places = self._method.for_fragment(fragment), self._layout.fragments[fragment].tensors
        num_bytes = method.up.encoded_bytes(held.theta.numel())
        each = [_contribution(frame) for frame in frames]
        sizes = [0 if c is None or c.is_empty else num_bytes for c in each]
        parts = split(group.gather(encoded, sizes, place), sizes)
        self._num_bytes["contributions"] += sum(sizes) + encoded.numel() * (len(sizes) - 2)
        pairs = [(c, part) for c, part in zip(each, parts, strict=True) if c is not None]
        contributions, payloads = zip(*sorted(pairs, key=lambda pair: pair[0].learner), strict=True)
        inputs = merge_inputs(self._method, contributions, payloads, round_, places)
        closed = close(method, held, inputs, places)
        update = closed.update
        results = group.gather_frames({"digest": closed.held.digest}, f"the result of {place}")
        require_same_digest(
            fragment,
            update.version,
            {frame["replica"]: each["digest"] for frame, each in zip(frames, results, strict=True)},
        )
        before = self._copy.results.get(fragment)
        merged = {} if before is None else dict(before.merged_rounds)
        merged |= dict.fromkeys(update.contributors, round_)
        mean = published_mean(method, closed.payload, held.theta.numel())
        self._copy.fragments[fragment] = closed.held
        self._copy.results[fragment] = RoundResult(update, merged, closed.refused, mean)


def _contribution(frame: dict[str, Any]) -> Contribution | None:
    """What a member wants to merge; None: nothing."""
    if frame["wants"] is None:
        return None
    fragment, round_, number, base, tokens, steps, step, *parts = frame["wants"]
    tensors, routed = (None if each is None else tuple(each) for each in parts)
    return Contribution(
        frame["replica"], 1, fragment, number, round_, base, tokens, steps, step=step, tensors=tensors, routed=routed
    )
