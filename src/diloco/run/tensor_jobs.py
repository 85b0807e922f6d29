"""The tensor jobs of a run, on the calling thread: behind a syncer's threads and in virtual time alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

from torch import Tensor

from diloco.core.global_fragment import GlobalFragment, close
from diloco.core.layout import Layout, Placement
from diloco.core.memory import Each, one_by_one
from diloco.core.merges import Encoded
from diloco.core.method import Method
from diloco.core.weights import shares_of
from diloco.errors import PayloadError
from diloco.protocol.actions import MergeRound
from diloco.protocol.contribution import Contribution
from diloco.run.ports import InitialModel, MergedRound


class TensorSlot(Protocol):
    """Room for the payload of a contribution, filled."""

    @property
    def tensor(self) -> Tensor:
        """uint8."""


class TensorJobs:
    """Checks payloads and closes rounds.

    Arguments:
        method: the run's.
        seconds: tells the time for `MergedRound.merge_s`; None: it takes none.
        in_place: rounds are closed in place (`core.global_fragment.close`), which takes less memory. The run's disk
            must keep bytes of its own, and nothing but `StorePort` may read residuals and the syncer's outer states.
        each: works through the runs of a round.
    """

    def __init__(
        self, method: Method, seconds: Callable[[], float] | None = time.monotonic, *, in_place: bool = False,
        each: Each = one_by_one,
    ) -> None:  # fmt: skip
        self._method = method
        self._in_place, self._each = in_place, each
        self._seconds = seconds or (lambda: 0.0)

    def contribution_bytes(self, fragment: int, num_elements: int) -> int:
        """As `ports.JobsPort`."""
        return self._method.for_fragment(fragment).up.encoded_bytes(num_elements)

    def initial(
        self, layout: Layout, thetas: Sequence[Tensor], static: bytes, *, learner: str, source: str, run_id: str,
        step: int = 0, tokens: int = 0, epoch: int = 1,
    ) -> InitialModel[GlobalFragment]:  # fmt: skip
        """The initial model of a run. `thetas`: fp32 [n] of each fragment. Raises LayoutError for another cut than the
        method's into experts."""
        self._method.experts_of(layout)
        held = tuple(GlobalFragment.first(self._method.for_fragment(f), f, theta) for f, theta in enumerate(thetas))
        return InitialModel(layout, held, static, learner, source, run_id, step, tokens, epoch)

    def check(self, slot: TensorSlot, fragment: int, num_elements: int) -> PayloadError | None:
        """The error in a payload; None: it is valid."""
        try:
            self._method.for_fragment(fragment).up.check(slot.tensor, num_elements)
        except PayloadError as error:
            return error
        return None

    def close(
        self, action: MergeRound, layout: Layout, held: GlobalFragment, slots: Sequence[TensorSlot]
    ) -> MergedRound[GlobalFragment, Tensor] | PayloadError:
        """The round's result, or the reason why there is no usable one."""
        began_s = self._seconds()
        places = layout.fragments[action.fragment].tensors
        payloads = [slot.tensor for slot in slots]
        encoded = encoded_of(action.contributions, action.weights, payloads, action.round, places)
        method = self._method.for_fragment(action.fragment)
        try:
            closed = close(method, held, encoded, places, action.scale, in_place=self._in_place, each=self._each)
        except PayloadError as error:
            return error
        merge_s = self._seconds() - began_s
        return MergedRound(
            action, closed.update, closed.held, closed.payload, closed.payload.numel(), closed.refused, merge_s
        )


def encoded_of(
    contributions: Sequence[Contribution],
    weights: Sequence[float],
    payloads: Sequence[Tensor],
    round_: int,
    places: Sequence[Placement],
    tensors: range | None = None,
) -> list[Encoded]:
    """What each learner brings: its contributions (next to each other, late before fresh) become one.

    `weights` has one entry per learner, `payloads` one per contribution; `round_` is the one they are merged in.
    `places`: of the fragment, or of the shard that the payloads are of; `tensors`: the indices of the shard's tensors
    in the fragment (`shard_of`).
    """
    of_learners: dict[str, list[tuple[Contribution, Tensor]]] = {}
    for contribution, payload in zip(contributions, payloads, strict=True):
        of_learners.setdefault(contribution.learner, []).append((contribution, payload))
    encoded, here = [], tensors or range(len(places))
    for (learner, own), weight in zip(of_learners.items(), weights, strict=True):
        trained = [
            None if each.tensors is None else frozenset(index - here.start for index in each.tensors if index in here)
            for each, _ in own
        ]
        sent = [number for number, (each, _) in enumerate(own) if not each.is_empty]
        encoded.append(
            Encoded(
                learner,
                tuple(own[number][1] for number in sent),
                weight,
                max(round_ - each.base for each, _ in own),
                None if None in trained else frozenset(chain.from_iterable(each or () for each in trained)),
                parts=tuple(trained[number] for number in sent) if len(set(trained)) > 1 else (),
            )
        )
    if any(each.routed is None for each in contributions if each.tensors != ()):
        return encoded
    tokens = [sum(each.tokens for each, _ in own) for own in of_learners.values()]
    routed = [[sum(each.routed[i] for each, _ in own if each.routed) for i in here] for own in of_learners.values()]
    shares = shares_of(tokens, routed, [each.tensors for each in encoded], [p.spec.is_averaged for p in places])
    return [replace(each, shares=own) for each, own in zip(encoded, shares, strict=True)]
