"""Learners over a `torch.distributed` process group: one rank is one learner, membership is fixed, and there is no syncer.

Every rank acts as the syncer of a shard of each fragment: a run of whole codec segments, with its outer state and error feedback.
One contribution of every rank makes one round:

    agree       a small frame from everybody: fragment, round, base, tokens, the digest held, and whether encoding worked
    scatter     encoded shard r of every contribution goes to rank r              (all-to-all)
    close       rank r merges its shard in rank order, takes the outer step and encodes the answer
    gather      everybody gets all encoded shards, and advances the whole fragment
    compare     digests of the new version; only then has it arrived

Merging is this library's own and in rank order, never the group's reduction, so the bits are those of any other exchange.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.core.codecs import SEGMENT_ELEMENTS, Codec
from diloco.core.contributions import Encoded, encoded_of, merge_weights, shard_of
from diloco.core.fragments import Layout, digest
from diloco.core.layout import Placement
from diloco.core.method import Method
from diloco.core.quorum import AllLive
from diloco.core.update import OUTLIER, Closed, Contribution, advance, close_round, update_of
from diloco.errors import CheckpointError, ConfigError, DigestError, DilocoError, ExchangeError, LayoutError
from diloco.exchange.base import Arrived, Event, Exchange, Model, Opened, Rejected, required_method
from diloco.exchange.group import (
    FRAME_BYTES,
    TEXT_CHARACTERS,
    Group,
    as_bytes,
    error_of,
    require_process_group,
    split,
)  # fmt: skip


@dataclass(frozen=True)
class Shards:
    """How a vector is divided over ranks: rank r owns a run of whole segments; a short vector leaves some ranks with none.

    `owner`: the one rank that owns all of it, where a merge needs whole fragments.
    """

    num_elements: int
    num_shards: int
    owner: int | None = None

    def segments(self, rank: int) -> tuple[int, int]:
        """First segment, and the one behind the last."""
        num_segments = -(-self.num_elements // SEGMENT_ELEMENTS)
        if self.owner is not None:
            return (0, num_segments) if rank == self.owner else (num_segments, num_segments)
        return rank * num_segments // self.num_shards, (rank + 1) * num_segments // self.num_shards

    def elements(self, rank: int) -> slice:
        """Of the fp32 vector."""
        start, stop = (min(segment * SEGMENT_ELEMENTS, self.num_elements) for segment in self.segments(rank))
        return slice(start, stop)

    def sizes_bytes(self, codec: Codec) -> list[int]:
        """Of every rank's part of the payload."""
        spans = (codec.segment_span(self.num_elements, *self.segments(rank)) for rank in range(self.num_shards))
        return [span.stop - span.start for span in spans]


@dataclass
class _Fragment:
    """What this rank keeps of a fragment: the whole of it, and of its own shard (`places`, `tensors`: `shard_of`) what a syncer keeps.

    Where the outer optimizer is on the learners, every rank keeps its whole state.
    """

    shards: Shards
    version: int
    theta: Tensor
    digest: str
    outer_state: Mapping[str, Tensor]
    places: tuple[Placement, ...]
    tensors: range
    residual: Tensor | None = None


@dataclass(frozen=True)
class _Round:
    """A finished round: what the learner gets, and the tokens of all learners when they sent their contributions."""

    events: tuple[Event, ...]
    run_tokens: int


@dataclass
class _Offer:
    """A contribution on its way, and how many boundaries this learner had behind it when it was offered."""

    result: Future[_Round]
    boundaries: int = field(default=0)


class Collective(Exchange):
    """An exchange over a `torch.distributed` process group, of any backend: each of its ranks is one learner.

    All communication runs on one background thread over connections of its own (`exchange.group`), in the order of the offers,
    which the schedule makes the same on every rank. Rank 0's model initialises the run.

    Arguments:
        process_group: whose ranks learn together; None: all ranks.
        timeout_s: how long a learner waits for the slowest of the others before it takes them for lost.

    Raises:
        ConfigError: torch.distributed is not initialised.
        ExchangeError: (from any method but `close`) a learner is gone or silent; names what did not get through.

    Example:
        >>> torch.distributed.init_process_group("gloo")
        >>> learner = diloco.Learner(model, inner_optimizer, method=diloco.DiLoCo(), exchange=diloco.Collective())
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> None:
        require_process_group()
        self._process_group = process_group
        self._timeout_s = timeout_s
        self._group: Group
        self._method: Method
        self._fragments: list[_Fragment] = []
        self._worker: ThreadPoolExecutor | None = None
        self._closed = False
        self._failed = False
        self._offers: deque[_Offer] = deque()
        self._heard: deque[tuple[int, int]] = deque()  # boundaries at the offer, run tokens at the offer
        self._boundaries = 0
        self._run_tokens = 0
        self._num_bytes = {"contributions": 0, "updates": 0, "joins": 0, "control": 0}

    # --- joining ----------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        if self._closed or self._worker is not None:
            raise ConfigError("this exchange was used already; make a new Collective for every Learner.")
        self._group = Group(self._process_group, timeout_s=self._timeout_s)
        self._method = method
        joined = False
        try:
            self._compare(layout, method)
            model = self._broadcast(layout, initial)
            joined = True
        finally:
            if not joined:
                self._closed = True
                self._group.disconnect()
        for fragment, theta in zip(layout.fragments, model.fragments, strict=True):
            owner = fragment.index % self._group.size if method.needs_whole_fragments else None
            shards = Shards(theta.numel(), self._group.size, owner)
            own = shards.elements(self._group.rank)
            outer_state = method.outer.init(theta.numel() if method.outer_at == "learners" else own.stop - own.start)
            places, tensors = shard_of(fragment.tensors, own)
            self._fragments.append(_Fragment(shards, 0, theta, digest(theta), outer_state, places, tensors))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="diloco-collective")
        states = tuple(held.outer_state for held in self._fragments) if method.outer_at == "learners" else ()
        return Opened(_name(self._group.rank), 1, 0, tuple(0 for _ in layout.fragments), model, outer_states=states)

    def _compare(self, layout: Layout, method: Method) -> None:
        """The same error on every rank if a method or a model differs from rank 0's, or the group cannot run the method."""
        theirs = self._group.gather_values({"method": method.to_dict(), "layout": layout.to_dict()}, "opening the run")
        methods = [Method.from_dict(each["method"]) for each in theirs]
        layouts = [Layout.from_dict(each["layout"]) for each in theirs]
        for rank in range(1, self._group.size):
            if difference := methods[0].difference(methods[rank]):
                raise ConfigError(f"{_name(0)} and {_name(rank)} use different methods: {difference}.")
            if difference := layouts[0].first_difference(layouts[rank]):
                raise LayoutError(f"{_name(0)} and {_name(rank)} do not hold the same model: {difference}.")
        if not method.wait:
            raise ConfigError(
                "wait=False needs a syncer that merges without a late learner; use wait=True over a group."
            )
        if not method.quorum.scheduled:
            raise ConfigError(f"{type(method.quorum).__name__} needs a syncer; use AllLive over a group.")
        if isinstance(method.quorum, AllLive) and method.quorum.drop > 0:
            raise ConfigError("AllLive(drop=…) needs a syncer that drops contributions; use run_local or a syncer.")
        if method.quorum.at_least > self._group.size:
            raise ConfigError(
                f"the quorum needs {method.quorum.at_least} learners and the process group has {self._group.size}; lower at_least."
            )

    def _broadcast(self, layout: Layout, initial: Callable[[], Model]) -> Model:
        """Rank 0's model, on every rank."""
        if self._group.rank == 0:
            model = initial()
            fragments = tuple(theta.contiguous() for theta in model.fragments)
            static = {name: value.contiguous() for name, value in model.static.items()}
        else:
            fragments = tuple(torch.empty(each.numel, dtype=torch.float32) for each in layout.fragments)
            static = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in layout.static}
        for index, theta in enumerate(fragments):
            self._group.broadcast(theta, f"fragment {index} of {_name(0)}'s model")
        for spec in layout.static:
            self._group.broadcast(static[spec.name], f"tensor {spec.name!r} of {_name(0)}'s model")
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*fragments, *static.values()))
        self._num_bytes["joins"] += num_bytes * (self._group.size - 1 if self._group.rank == 0 else 1)
        return Model(fragments, static)

    # --- the training thread ----------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._offers.append(_Offer(self._submit(lambda: self._round(contribution, payload)), self._boundaries))

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._offers and self._offers[0].result.done():
            round_ = self._offers[0].result.result()  # a failed one stays and is raised again
            self._heard.append((self._offers.popleft().boundaries, round_.run_tokens))
            events.extend(round_.events)
        return events

    def wait(self) -> None:
        if not self._offers:
            raise ExchangeError(
                "nothing is on its way, so nothing can arrive; a learner waits only for what it has sent."
            )
        wait([self._offers[0].result])

    def boundary(self) -> bool:
        # What was sent τ boundaries ago has been waited for. Counting only that keeps the number the same on every rank, so that
        # all of them stop after the same step when they train up to a number of tokens.
        while self._heard and self._heard[0][0] + self._method.overlap <= self._boundaries:
            self._run_tokens = self._heard.popleft()[1]
        self._boundaries += 1
        return False

    @property
    def num_live(self) -> int:
        return self._group.size

    @property
    def run_tokens(self) -> int | None:
        return self._run_tokens

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._num_bytes)

    def close(self) -> None:
        """Finish what is on its way (another rank may wait for it), then leave. Never raises what `poll` would."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._group.disconnect()

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        if self._worker is None or self._closed:
            raise ConfigError("this exchange is not open; attach it to a Learner first.")

        def run() -> Any:
            if self._failed:  # the ranks may be at different places now
                raise ExchangeError("an earlier exchange failed, so this one was not tried.")
            self._failed = True
            result = job()
            self._failed = False
            return result

        return self._worker.submit(run)

    # --- the background thread --------------------------------------------------------------------------------------------

    def _round(self, c: Contribution, payload: Callable[[], Tensor]) -> _Round:
        """One round of a fragment, from this rank's displacement to the version that everybody has."""
        held = self._fragments[c.fragment]
        place = f"of fragment {c.fragment} in round {c.round}"
        encoded, error = _attempt(payload)
        said = {"base": c.base, "tokens": c.tokens, "steps": c.steps, "trained": c.trained, "digest": held.digest,
                "part": c.tensors is not None}  # fmt: skip
        frames = self._agree(f"the contribution {place}", said, error)
        self._require_same_digest(c.fragment, held.version, [frame["digest"] for frame in frames])
        tensors = self._trained_tensors(c, place) if any(frame["part"] for frame in frames) else [None] * len(frames)
        contributions = [
            Contribution(_name(rank), 1, c.fragment, c.round, frame["base"], frame["tokens"], frame["steps"], frame["trained"],
                         step=c.step, tensors=tensors[rank])
            for rank, frame in enumerate(frames)
        ]  # fmt: skip
        weights = merge_weights(
            self._method.weight, [each.tokens for each in contributions], [each.steps for each in contributions],
            [each.round - each.base for each in contributions],
        )  # fmt: skip
        parts = self._scatter(held.shards, encoded, f"the contribution {place}")
        mine = encoded_of(contributions, weights, parts, c.round, held.tensors)
        closed, error = _attempt(lambda: self._close(held, mine))
        refused = (
            []
            if closed is None
            else [rank for rank, each in enumerate(contributions) if each.learner in closed.refused]
        )
        told = self._agree(f"the merge {place}", {"refused": refused}, error)
        refused = sorted({rank for frame in told for rank in frame["refused"]})
        answer = self._gather(held.shards, closed.payload, f"the merge {place}")
        advanced = advance(self._method, held.theta, held.outer_state, answer)
        closed = replace(closed, refused=tuple(_name(rank) for rank in refused))
        update = update_of(self._method, c.fragment, c.round, mine, closed, 1.0, digest(advanced.theta))
        digests = [frame["digest"] for frame in self._agree(f"the result {place}", {"digest": update.digest})]
        self._require_same_digest(c.fragment, update.version, digests)
        held.theta, held.digest, held.version = advanced.theta, update.digest, update.version
        held.outer_state = advanced.outer_state if self._method.outer_at == "learners" else closed.outer_state
        held.residual = closed.residual
        events: tuple[Event, ...] = (Arrived(update, advanced.theta, c.round, advanced.mean),)
        if self._group.rank in refused:
            events = (
                Rejected(c.fragment, c.round, OUTLIER),
                Arrived(update, advanced.theta, c.round - 1, advanced.mean),
            )
        return _Round(events, sum(each.trained for each in contributions))

    def _trained_tensors(self, c: Contribution, place: str) -> list[tuple[int, ...] | None]:
        """Which tensors every rank trains, of any number."""
        told = self._group.gather_values(c.tensors, f"the tensors that are trained {place}")
        sizes = [len(json.dumps(each)) + FRAME_BYTES for each in told]
        self._num_bytes["control"] += sizes[self._group.rank] * (self._group.size - 2) + sum(sizes)
        return [None if each is None else tuple(each) for each in told]

    def _close(self, held: _Fragment, contributions: Sequence[Encoded]) -> Closed:
        """As the syncer of this rank's shard."""
        own = held.shards.elements(self._group.rank)
        theta = held.theta[own]
        if theta.numel() == 0:
            return Closed(theta, held.outer_state, None, torch.empty(0, dtype=torch.uint8))
        state = held.outer_state
        if self._method.outer_at == "learners":
            state = {name: value[own] if value.dim() else value for name, value in state.items()}
        return close_round(self._method, theta, state, held.residual, contributions, held.places)

    def _scatter(self, shards: Shards, payload: Tensor, what: str) -> list[Tensor]:
        """Part r of the payload to rank r; returns everybody's part of this rank's shard."""
        sizes = shards.sizes_bytes(self._method.up)
        own_bytes = sizes[self._group.rank]
        received = self._group.all_to_all(payload, sizes, [own_bytes] * self._group.size, what)
        self._num_bytes["contributions"] += sum(sizes) - own_bytes + own_bytes * (self._group.size - 1)
        return split(received, [own_bytes] * self._group.size)

    def _gather(self, shards: Shards, part: Tensor, what: str) -> Tensor:
        """The whole answer from every rank's part of it."""
        sizes = shards.sizes_bytes(self._method.down)
        joined = self._group.gather(part, sizes, what)
        self._num_bytes["updates"] += part.numel() * (self._group.size - 1) + sum(sizes) - part.numel()
        return joined

    def _agree(self, doing: str, said: dict[str, Any], error: DilocoError | None = None) -> list[dict[str, Any]]:
        """What every rank says at this point. An error of one is raised by all; so is finding that they do different things."""
        told = None if error is None else [type(error).__name__, str(error)[:TEXT_CHARACTERS]]
        frames = self._group.gather_frames({"doing": doing, "said": said, "error": told}, doing)
        self._num_bytes["control"] += 2 * FRAME_BYTES * (self._group.size - 1)
        for rank, frame in enumerate(frames):
            if frame["error"] is not None:
                name, text = frame["error"]
                raise error_of(name, f"{frame['doing']} failed on {_name(rank)}: {text}") from error
        for rank, frame in enumerate(frames):
            if frame["doing"] != frames[0]["doing"]:
                raise ExchangeError(
                    f"{_name(0)} is at {frames[0]['doing']} and {_name(rank)} at {frame['doing']}; let every learner take the same "
                    "steps and load the same checkpoint."
                )
        return [frame["said"] for frame in frames]

    def _require_same_digest(self, fragment: int, version: int, digests: Sequence[str]) -> None:
        for rank, theirs in enumerate(digests):
            if theirs != digests[0]:
                raise DigestError(
                    f"{_name(0)} and {_name(rank)} hold version {version} of fragment {fragment} with different bits (digests "
                    f"{digests[0][:12]} and {theirs[:12]}); start all learners again from one checkpoint."
                )

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of every fragment, outer state and error feedback; each rank keeps its own. Waits for what is sent."""
        wait([offer.result for offer in self._offers])
        fragments = {}
        for index, held in enumerate(self._fragments):
            own = held.shards.elements(self._group.rank)
            fragments[str(index)] = {
                "version": held.version,
                "theta": held.theta[own].clone(),
                "outer": dict(held.outer_state),
                "residual": held.residual,
            }
        return {
            "world_size": self._group.size,
            "rank": self._group.rank,
            "run_tokens": self._run_tokens,
            "heard": [[tag - self._boundaries, tokens] for tag, tokens in self._heard],
            "fragments": fragments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; every rank loads its own, at the same time.

        Raises:
            CheckpointError: of another world size, rank or model, or the ranks' checkpoints are of different moments.
        """
        self._submit(lambda: self._load(state)).result()

    def _load(self, state: Mapping[str, Any]) -> None:
        doing = "the loading of a checkpoint"
        _, error = _attempt(lambda: self._check(state))
        versions = [] if error else [state["fragments"][str(f)]["version"] for f in range(len(self._fragments))]
        moment = hashlib.sha256(json.dumps(versions).encode()).hexdigest()
        moments = [frame["versions"] for frame in self._agree(doing, {"versions": moment}, error)]
        for rank, theirs in enumerate(moments):
            if theirs != moments[0]:
                raise CheckpointError(
                    f"the checkpoints of {_name(0)} and {_name(rank)} were not taken after the same step; load a pair that was."
                )
        for index, held in enumerate(self._fragments):
            saved = state["fragments"][str(index)]
            parts = [held.shards.elements(rank) for rank in range(self._group.size)]
            sizes = [4 * (part.stop - part.start) for part in parts]
            joined = self._group.gather(as_bytes(saved["theta"].contiguous()), sizes, doing)
            self._num_bytes["joins"] += sizes[self._group.rank] * (self._group.size - 2) + sum(sizes)
            held.theta = joined.view(torch.float32)
            held.version, held.digest = saved["version"], digest(held.theta)
            held.outer_state, held.residual = saved["outer"], saved["residual"]
        self._run_tokens = state["run_tokens"]
        self._heard = deque((self._boundaries + tag, tokens) for tag, tokens in state["heard"])

    def _check(self, state: Mapping[str, Any]) -> None:
        if (state.get("world_size"), state.get("rank")) != (self._group.size, self._group.rank):
            raise CheckpointError(
                f"the checkpoint is of rank {state.get('rank')} of {state.get('world_size')} and this is rank {self._group.rank} of "
                f"{self._group.size}; resume every learner from its own checkpoint, with as many learners as before."
            )
        for index, held in enumerate(self._fragments):
            own = held.shards.elements(self._group.rank)
            saved = state["fragments"].get(str(index))
            if saved is None or saved["theta"].shape != (own.stop - own.start,):
                raise CheckpointError(
                    f"the checkpoint does not fit fragment {index}; it is of another model or method."
                )


def _attempt(work: Callable[[], Any]) -> tuple[Any, DilocoError | None]:
    """A result or an error that the other ranks must hear of before it is raised."""
    try:
        return work(), None
    except DilocoError as error:
        return None, error


def _name(rank: int) -> str:
    return f"learner-{rank:03d}"
