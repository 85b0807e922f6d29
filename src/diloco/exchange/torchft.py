"""Learners over torchft's reconfigurable process group: no syncer, and members may be lost and may come back.

A torchft lighthouse says who is there. Before every round all members ask it for a quorum; when that has changed, torchft's
`ProcessGroupGloo` is configured anew. Then one round of one fragment, on a background thread:

    greet     a frame of plain values from everybody: what it wants to merge, and the version of every fragment that it holds
    heal      whoever is behind gets fragments, outer state and error feedback from the most advanced member, as raw bytes
    exchange  the encoded contributions of those who want to merge this round go to all of them
    close     everybody merges them in order of the replica names, takes the outer step and encodes the answer
    compare   digests of the new version; only then has it arrived

A member that dies in the middle breaks the round for the others. They keep their contributions, form a new quorum and repeat it; should
some of them have finished it, the rest are healed with its result. Nobody ever goes on with its own gradient alone because an exchange
failed, and a joiner, which has nothing to merge, counts in no divisor.

What differs from `Collective`: every member receives all contributions and keeps the whole outer state, so that nothing is lost with a
member; that takes M − 1 payloads per round instead of about two. Of torchft the lighthouse and the process group are used and its
checkpoint transport is not: that unpickles what a peer sends.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from diloco.core.contributions import encoded_of, merge_weights
from diloco.core.fragments import Layout, digest
from diloco.core.method import Method
from diloco.core.quorum import AllLive
from diloco.core.update import MISSED, OUTLIER, Contribution, Update, advance, close_round, update_of
from diloco.errors import CheckpointError, ConfigError, DigestError, ExchangeError, LayoutError
from diloco.exchange.base import Arrived, Event, Exchange, Model, Opened, Rejected, required_method
from diloco.exchange.group import Group, reason_of, split, to_bytes, to_tensor

log = logging.getLogger("diloco")

HEARTBEAT_S = 0.5


@dataclass
class _Held:
    """What every member keeps of a fragment, and how its version came about."""

    version: int
    theta: Tensor
    outer_state: Mapping[str, Tensor]
    residual: Tensor | None
    digest: str
    update: Update | None = None
    mean: Tensor | None = None
    merged_rounds: dict[str, int] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


class TorchFT(Exchange):
    """An exchange over torchft's managed process group; each process is one learner.

    Arguments:
        replica: this learner's name, unique and the same after a restart. Contributions are merged in the order of the names.
        lighthouse: address of the `torchft_lighthouse`, "http://host:port". Its `min_replicas` is how many learners a run starts with.
        host: name or address under which the other learners reach this machine.
        timeout_s: how long a learner waits for the slowest of the others before it takes them for lost.

    Raises:
        ConfigError: torchft is not installed (`pip install "diloco[torchft]"`), or a method that needs a syncer.
        ExchangeError: (from any method but `close`) no quorum within `timeout_s`.

    Example:
        >>> learner = diloco.Learner(model, inner_optimizer, method=diloco.DiLoCo(), exchange=TorchFT("a", lighthouse=url, host="10.0.0.5"))
    """

    gradients = False

    def __init__(self, replica: str, *, lighthouse: str, host: str, timeout_s: float = 600.0) -> None:
        try:
            from torchft import ProcessGroupGloo
            from torchft.coordination import LighthouseClient
        except ImportError as error:
            raise ConfigError('torchft is not installed; pip install "diloco[torchft]".') from error
        self._replica = replica
        self._timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._lighthouse_url = lighthouse
        self._client_kind: Any = LighthouseClient
        self._client: Any = LighthouseClient(lighthouse, self._timeout)
        self._pg: Any = ProcessGroupGloo(timeout=self._timeout)
        self._store: Any = vars(dist)["TCPStore"](host, 0, is_master=True, wait_for_workers=False)
        self._store_address = f"{host}:{self._store.port}"
        self._group: _QuorumGroup | None = None
        self._quorum_key: tuple[Any, ...] = ()
        self._failed = 0  # attempts in a row
        self._fragments: list[_Held] = []
        self._static: Mapping[str, Tensor] = {}
        self._step = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="diloco-torchft")
        self._offers: deque[Future[tuple[Event, ...]]] = deque()
        self._closing = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="diloco-torchft-heartbeat", daemon=True)
        self._num_bytes = {"contributions": 0, "updates": 0, "joins": 0, "control": 0}

    # --- joining ----------------------------------------------------------------------------------------------------------

    def method(self, given: Method | None) -> Method:
        return required_method(given)

    def open(self, layout: Layout, method: Method, initial: Callable[[], Model]) -> Opened:
        if not method.wait or not method.quorum.scheduled:
            raise ConfigError(
                f"wait={method.wait} with {type(method.quorum).__name__} needs a syncer; use AllLive and wait=True."
            )
        if isinstance(method.quorum, AllLive) and method.quorum.drop > 0:
            raise ConfigError("AllLive(drop=…) needs a syncer that drops contributions; use run_local or a syncer.")
        self._layout, self._method = layout, method
        model = initial()
        self._static = model.static
        self._fragments = [
            _Held(-1, theta.contiguous(), method.outer.init(theta.numel()), None, "") for theta in model.fragments
        ]
        self._heart.start()
        self._worker.submit(self._join).result()
        states = tuple(held.outer_state for held in self._fragments) if method.outer_at == "learners" else ()
        return Opened(
            self._replica, 1, self._step, tuple(held.version for held in self._fragments),
            Model(tuple(held.theta for held in self._fragments), self._static), outer_states=states,
        )  # fmt: skip

    def _join(self) -> None:
        """With everybody who starts now, or into a run that is under way."""
        started = time.monotonic()
        while True:
            try:
                frames = self._greet(None)
                if all(frame["versions"][0] < 0 for frame in frames):
                    self._adopt_first(frames)
                self._heal(frames)
                self._merge_wanted(frames, torch.empty(0, dtype=torch.uint8))
                self._succeeded()
                return
            except ExchangeError as error:
                self._give_up_after(started, error)

    def _adopt_first(self, frames: list[dict[str, Any]]) -> None:
        """A new run: everybody takes the model of the first replica, and calls it version 0."""
        assert self._group is not None
        first = self._group.rank == 0
        raw = self._state_bytes(range(len(self._fragments))) if first else b""
        self._load_state_bytes(self._from_rank(0, raw, "the first model"))
        for held in self._fragments:
            held.version, held.digest = 0, digest(held.theta)
        for frame in frames:
            frame["versions"] = [0] * len(self._fragments)

    # --- the training thread ----------------------------------------------------------------------------------------------

    def offer(self, contribution: Contribution, payload: Callable[[], Tensor]) -> None:
        self._offers.append(self._worker.submit(self._round, contribution, payload))

    def poll(self) -> Sequence[Event]:
        events: list[Event] = []
        while self._offers and self._offers[0].done():
            events += self._offers[0].result()
            self._offers.popleft()
        return events

    def wait(self) -> None:
        if not self._offers:
            raise ExchangeError(
                "nothing is on its way, so nothing can arrive; a learner waits only for what it has sent."
            )
        wait([self._offers[0]])

    @property
    def num_live(self) -> int:
        return 1 if self._group is None else self._group.size

    @property
    def num_bytes(self) -> Mapping[str, int]:
        return dict(self._num_bytes)

    def state_dict(self) -> dict[str, Any]:
        """Fragments, outer state and error feedback, as everybody has them. Waits for what is sent."""
        wait(self._offers)
        return {"run": to_tensor(self._state_bytes(range(len(self._fragments)))), "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Whoever has an older one, or none, is healed in the next round.

        Raises:
            CheckpointError: it was written over another kind of exchange.
        """
        if set(state) != {"run", "step"}:
            raise CheckpointError(
                "this checkpoint was written over another kind of exchange; resume it over the same kind."
            )
        self._worker.submit(self._load, state).result()

    def _load(self, state: Mapping[str, Any]) -> None:
        self._load_state_bytes(to_bytes(state["run"]))
        self._step = max(self._step, state["step"])

    def close(self) -> None:
        """Finish what is on its way, then leave; the others go on without this learner."""
        if self._closing.is_set():
            return
        wait(self._offers)
        self._closing.set()
        self._worker.shutdown(wait=True)
        if self._heart.is_alive():
            self._heart.join()
        self._pg.shutdown()

    # --- the background thread --------------------------------------------------------------------------------------------

    def _round(self, c: Contribution, payload: Callable[[], Tensor]) -> tuple[Event, ...]:
        """Until the fragment is at the version that follows the contribution's round."""
        encoded, started = payload(), time.monotonic()
        self._step = max(self._step, c.step)
        while True:
            try:
                frames = self._greet(c)
                self._heal(frames)
                self._merge_wanted(frames, encoded)
                self._succeeded()
                held = self._fragments[c.fragment]
                if held.version > c.round:  # merged now, or before by those who had everything, or without this learner
                    return self._result(c, held)
                if sum(frame["wants"] is not None for frame in frames) < self._method.quorum.at_least:
                    self._closing.wait(HEARTBEAT_S)
            except ExchangeError as error:
                self._give_up_after(started, error)

    def _result(self, c: Contribution, held: _Held) -> tuple[Event, ...]:
        assert held.update is not None
        merged_round = held.merged_rounds.get(self._replica, -1)
        arrived = Arrived(
            held.update, held.theta, merged_round, held.mean, None if held.mean is not None else held.outer_state
        )
        if self._method.outer_at == "syncer":
            arrived = Arrived(held.update, held.theta, merged_round)
        if merged_round >= c.round:
            return (arrived,)
        is_outlier = held.version == c.round + 1 and self._replica in held.refused
        return Rejected(c.fragment, c.round, OUTLIER if is_outlier else MISSED), arrived

    def _merge_wanted(self, frames: Sequence[dict[str, Any]], encoded: Tensor) -> None:
        """Merge, if all who want to merge want the same round; everybody comes to the same conclusion and takes part in the exchange.

        If not, somebody was a round behind and is healed now, and asks for the next one in the next quorum.
        """
        wanted = {tuple(frame["wants"][:2]) for frame in frames if frame["wants"] is not None}
        num_wanting = sum(frame["wants"] is not None for frame in frames)
        if len(wanted) != 1 or num_wanting < self._method.quorum.at_least:
            return
        [(fragment, round_)] = wanted
        if max(frame["versions"][fragment] for frame in frames) == round_:
            self._merge(fragment, round_, encoded, frames)

    def _merge(self, fragment: int, round_: int, encoded: Tensor, frames: Sequence[dict[str, Any]]) -> None:
        """All contributions to everybody, the same arithmetic everywhere, and the same digest."""
        assert self._group is not None
        held, place = self._fragments[fragment], f"round {round_} of fragment {fragment}"
        num_bytes = self._method.up.encoded_bytes(held.theta.numel())
        sizes = [0 if frame["wants"] is None else num_bytes for frame in frames]
        parts = split(self._group.gather(encoded, sizes, place), sizes)
        self._num_bytes["contributions"] += sum(sizes) + encoded.numel() * (len(sizes) - 2)
        contributions, payloads = [], []
        for frame, part in zip(frames, parts, strict=True):
            if frame["wants"] is not None:
                _, _, base, tokens, steps, step, tensors = frame["wants"]
                contributions.append(
                    Contribution(frame["replica"], 1, fragment, round_, base, tokens, steps, step=step,
                                 tensors=None if tensors is None else tuple(tensors))
                )  # fmt: skip
                payloads.append(part)
        order = sorted(range(len(contributions)), key=lambda i: contributions[i].learner)
        contributions, payloads = [contributions[i] for i in order], [payloads[i] for i in order]
        weights = merge_weights(
            self._method.weight, [each.tokens for each in contributions], [each.steps for each in contributions],
            [each.round - each.base for each in contributions],
        )  # fmt: skip
        brought = encoded_of(contributions, weights, payloads, round_)
        closed = close_round(
            self._method, held.theta, held.outer_state, held.residual, brought, self._layout.fragments[fragment].tensors
        )
        update = update_of(self._method, fragment, round_, brought, closed, 1.0, digest(closed.theta))
        said = self._group.gather_frames({"digest": update.digest}, f"the result of {place}")
        for frame in said:
            if frame["digest"] != update.digest:
                raise DigestError(
                    f"learners hold version {update.version} of fragment {fragment} with different bits (digests "
                    f"{update.digest[:12]} and {frame['digest'][:12]}); start them again from one checkpoint."
                )
        mean = advance(self._method, held.theta, held.outer_state, closed.payload).mean
        merged = dict(held.merged_rounds) | dict.fromkeys(update.contributors, round_)
        self._fragments[fragment] = _Held(
            update.version,
            closed.theta,
            closed.outer_state,
            closed.residual,
            update.digest,
            update,
            mean,
            merged,
            closed.refused,
        )

    def _greet(self, c: Contribution | None) -> list[dict[str, Any]]:
        """A quorum, and what each of its members has and wants, in rank order.

        Raises:
            LayoutError, ConfigError: a member has another model or method.
        """
        self._reconfigure()
        assert self._group is not None
        wants = None if c is None else [c.fragment, c.round, c.base, c.tokens, c.steps, c.step, c.tensors]
        mine = {"replica": self._replica, "wants": wants, "versions": [held.version for held in self._fragments], "step": self._step,
                "layout": self._layout.to_dict() if c is None else self._layout.digest(), "method": self._method.to_dict()}  # fmt: skip
        frames: list[dict[str, Any]] = self._group.gather_values(mine, "greeting the others")
        self._num_bytes["control"] += len(json.dumps(mine)) * 2 * (len(frames) - 1)
        for frame in frames:
            layout = frame["layout"]
            theirs = layout if isinstance(layout, str) else Layout.from_dict(layout).digest()
            if theirs != self._layout.digest():
                raise LayoutError(
                    f"{self._replica} and {frame['replica']} do not hold the same model; give both the same one."
                )
            if difference := self._method.difference(Method.from_dict(frame["method"])):
                raise ConfigError(f"{self._replica} and {frame['replica']} use different methods: {difference}.")
        return frames

    def _heal(self, frames: Sequence[dict[str, Any]]) -> None:
        """Every fragment becomes the newest version that anybody has. Fragments of one version have the same bits everywhere."""
        assert self._group is not None
        by_source: dict[int, list[int]] = {}
        for fragment in range(len(self._fragments)):
            versions = [frame["versions"][fragment] for frame in frames]
            if min(versions) < max(versions):
                by_source.setdefault(versions.index(max(versions)), []).append(fragment)
        for source, fragments in sorted(by_source.items()):
            raw = self._state_bytes(fragments) if self._group.rank == source else b""
            healed = self._from_rank(source, raw, "healing")
            if any(frames[self._group.rank]["versions"][f] < frames[source]["versions"][f] for f in fragments):
                self._load_state_bytes(healed)
        self._step = max(self._step, *(frame["step"] for frame in frames))

    def _from_rank(self, source: int, raw: bytes, what: str) -> bytes:
        """What one member has, on all."""
        assert self._group is not None
        sizes = [int(frame["bytes"]) for frame in self._group.gather_frames({"bytes": len(raw)}, what)]
        joined = self._group.gather(to_tensor(raw), sizes, what)
        self._num_bytes["joins"] += len(raw) * (len(sizes) - 1) if self._group.rank == source else joined.numel()
        return to_bytes(joined)

    def _reconfigure(self) -> None:
        """Ask the lighthouse who is there; a process group of those, if it is another one than before."""
        try:
            quorum = self._client.quorum(
                self._replica, self._timeout, address="", store_address=self._store_address, step=0, world_size=1
            )
        except (RuntimeError, TimeoutError) as error:
            raise ExchangeError(
                f"the lighthouse at {self._lighthouse_url} gave no quorum ({reason_of(error)}); is it running?"
            ) from error
        members = sorted(quorum.participants, key=lambda each: each.replica_id)
        key = (quorum.quorum_id, *(each.replica_id for each in members))
        if key == self._quorum_key and self._group is not None:
            return
        rank = [each.replica_id for each in members].index(self._replica)
        prefix = f"{members[0].store_address}/diloco/{quorum.quorum_id}"
        try:
            self._pg.configure(prefix, self._replica, rank, len(members), quorum.quorum_id)
        except (RuntimeError, TimeoutError) as error:  # a member died while the group was made
            self._forget_group()
            raise ExchangeError(
                f"the process group of {len(members)} learners could not be made ({reason_of(error)})."
            ) from error
        self._group, self._quorum_key = _QuorumGroup(self._pg, rank, len(members), self._timeout_s), key

    def _forget_group(self) -> None:
        self._group, self._quorum_key = None, ()

    def _give_up_after(self, started: float, error: ExchangeError) -> None:
        """After a failed attempt: the next quorum has a new group; for ever is too long."""
        log.log(
            logging.DEBUG if self._failed else logging.WARNING,
            "%s: an exchange failed and is tried again with whoever is there: %s", self._replica, error,
        )  # fmt: skip
        self._forget_group()
        if time.monotonic() - started > self._timeout_s:
            raise ExchangeError(
                f"no round could be finished within {self._timeout_s:g} s; see whether the others are alive ({error})"
            ) from error
        self._closing.wait(min(HEARTBEAT_S, 0.05 * 2**self._failed))
        self._failed += 1

    def _succeeded(self) -> None:
        if self._failed:
            log.warning("%s: exchanging again, with %d in the group", self._replica, self.num_live)
        self._failed = 0

    def _beat(self) -> None:
        """The lighthouse takes a silent learner for dead. A client of its own: asking for a quorum blocks the other."""
        client = self._client_kind(self._lighthouse_url, self._timeout)
        while not self._closing.is_set():
            try:
                client.heartbeat(self._replica)
            except (RuntimeError, TimeoutError):  # the next quorum says what is wrong
                self._closing.wait(HEARTBEAT_S)
            self._closing.wait(HEARTBEAT_S)

    # --- healing ------------------------------------------------------------------------------------------------------------

    def _state_bytes(self, fragments: Sequence[int]) -> bytes:
        """Fragments as one safetensors file; how they came about is in its header, as JSON."""
        tensors: dict[str, Tensor] = {f"static.{name}": value.contiguous() for name, value in self._static.items()}
        told: dict[str, Any] = {}
        for f in fragments:
            held = self._fragments[f]
            tensors[f"{f}.theta"] = held.theta
            tensors |= {f"{f}.outer.{name}": value for name, value in held.outer_state.items()}
            tensors |= {} if held.residual is None else {f"{f}.residual": held.residual}
            update = None if held.update is None else held.update.as_dict()
            told[str(f)] = {"version": held.version, "update": update, "merged_rounds": held.merged_rounds,
                            "refused": held.refused}  # fmt: skip
        text = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        return save({name: value.contiguous() for name, value in tensors.items()} | {"told": text})

    def _load_state_bytes(self, raw: bytes) -> None:
        tensors = load(raw)
        told = json.loads(to_bytes(tensors.pop("told")))
        self._static = {
            name.removeprefix("static."): value for name, value in tensors.items() if name.startswith("static.")
        }
        for key, values in told.items():
            outer = {
                name.removeprefix(f"{key}.outer."): value
                for name, value in tensors.items()
                if name.startswith(f"{key}.outer.")
            }
            theta, update = tensors[f"{key}.theta"], values["update"]
            if update is not None:
                update = Update.from_dict(update)
            self._fragments[int(key)] = _Held(
                values["version"],
                theta,
                outer,
                tensors.get(f"{key}.residual"),
                digest(theta),
                update,
                None,
                values["merged_rounds"],
                tuple(values["refused"]),
            )


class _QuorumGroup(Group):
    """`Group`'s operations over the process group that torchft has configured for one quorum."""

    def __init__(self, pg: Any, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._gloo = _Wrapped(pg)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Membership is not fixed here: the next quorum is without whoever is gone."""
        try:
            yield
        except RuntimeError as error:
            raise ExchangeError(
                f"{what} did not get through, because another learner is gone or silent for more than {self._timeout_s:g} s "
                f"({reason_of(error)})."
            ) from error


class _Wrapped:
    """torchft's process group with the one primitive that `Group` needs."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def alltoall_base(self, received: Tensor, sent: Tensor, receive_bytes: list[int], send_bytes: list[int]) -> Any:
        return self._pg.alltoall_base(received, sent, receive_bytes, send_bytes, dist.AllToAllOptions())
