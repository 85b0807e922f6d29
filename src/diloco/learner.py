"""`Learner`: the object users hold. It ties a model and an inner optimizer to a method and an exchange.

`step()` is one boundary: report, send what is due, take in what has arrived, adopt what is due. The training thread pays for a
snapshot of what is sent and a copy of what is adopted; encoding, sending, receiving and decoding happen on the exchange's threads.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.core.adopt import Adopt, Eager
from diloco.core.fragments import Layout, gather, make_layout, scatter
from diloco.core.learner import LearnerCore, Send, mode_of
from diloco.core.method import Method
from diloco.core.update import Contribution, Update
from diloco.eager import EagerSteps
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Arrived, Called, Exchange, Model, Opened, Rejected, Rejoined, Report
from diloco.residuals import Residuals
from diloco.snapshot import Snapshots
from diloco.static import StaticTensors
from diloco.trainable import check_trainable, trained_tensors


class Learner:
    """One island's part in a run.

    Call `step` after every inner optimizer step. With a method that exchanges gradients (`DataParallel`) the exchange happens
    inside `inner_optimizer.step()`, through a hook.

    Arguments:
        model: an `nn.Module`, or one wrapped in `DistributedDataParallel` (its ranks form one learner; rank 0 speaks for them).
            Parameters on CPU or CUDA in fp32, bf16 or fp16. Its parameters are overwritten with the run's when the learner joins.
        inner_optimizer: the optimizer that trains `model` here. Its state stays here and is never reset.
        method: what to run. None: the exchange's own (a syncer brings one); a different one is refused.
        exchange: from `diloco.connect(…)`, `diloco.Collective(…)` or `diloco.run_local(…)`.
        trains: names of the parameters that this learner trains, as shell patterns; None: all. Others are adopted and never sent,
            and a merge divides by those who train a tensor. It is for the caller to see that only these change.

    Raises:
        ConfigError: a combination that cannot work: FSDP parameters, private master weights, averaging parameters under a
            stateful inner optimizer, a method that differs from the run's.
        LayoutError: the run holds another model.

    Example:
        >>> with diloco.Learner(model, inner_optimizer, method=diloco.DiLoCo(sync_every=100), exchange=exchange) as learner:
        ...     for batch in loader:
        ...         model(**batch).loss.backward(); inner_optimizer.step(); inner_optimizer.zero_grad()
        ...         learner.step(tokens=batch["input_ids"].numel())
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        *,
        method: Method | None = None,
        exchange: Exchange,
        trains: Sequence[str] | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            from diloco.exchange.ranks import Ranks

            exchange, model = Ranks(exchange, model.process_group), model.module
        self.model = model
        self.inner_optimizer = inner_optimizer
        self.method = exchange.method(method)
        self._exchange = exchange
        check_trainable(model, inner_optimizer, self.method, exchange)
        self.layout: Layout = make_layout(model, self.method.fragments)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._trained = trained_tensors(self.layout, trains)
        self._aliases = _aliases(model)
        self._snapshots = Snapshots(self.layout)
        self._static = StaticTensors(model, self.layout)
        self._blocked_s = 0.0
        self._num_blocked = 0
        self._blocked = Histogram()
        self._last_step_at: float | None = None
        self._step_s: float | None = None
        self._closed = False
        self._merges = 0
        self._received: dict[tuple[int, int], Arrived] = {}
        self._start_model: Opened | None = None
        self._start(exchange.open(self.layout, self.method, self._own_model))
        self._hook = None
        if self.method.exchanged == "gradients":
            self._hook = inner_optimizer.register_step_pre_hook(lambda *_: self._exchange_gradients())

    # --- one boundary -----------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int) -> None:
        """After an inner step on `tokens` tokens (of this rank): send, take in, adopt.

        Blocks only where the method waits for an answer that is due.
        """
        self._require_open()
        self._measure_step()
        self._start_model = None  # from here on the anchors are all that is needed of it
        tokens = self._exchange.sum_tokens(tokens)
        blocked_s = self._blocked_s
        if self.method.exchanged == "gradients":
            self._core.credit(tokens)
            self._report(waiting=False)
            self._exchange.boundary()
        else:
            for send in self._core.stepped(tokens, sync_every=self._exchange.sync_every):
                self._send(send, self._parameters)
            self._report(waiting=False)
            self._settle()
            while self._exchange.boundary():
                self._settle()
            self._keep_origins()
        self._blocked.add(self._blocked_s - blocked_s)
        self._last_step_at = time.monotonic()

    def _send(self, send: Send, tensors: Mapping[str, Tensor]) -> None:
        self._sent[send.fragment] = send
        self._static.check(send.fragment, len(self.layout.fragments))
        if not self._exchange.sends and self._eager is None:
            return
        fragment = self.layout.fragments[send.fragment]
        snapshot = self._snapshots.take(fragment, tensors)
        anchors = self._anchors if self._eager is None else self._eager.anchors
        measured = self._origins.get(send.fragment, anchors[send.fragment])
        contribution = Contribution(
            self._name, self._incarnation, send.fragment, send.round, send.base, send.tokens, send.steps,
            self._core.tokens, send.discarded, step=self._core.step, tensors=self._trained[send.fragment],
        )  # fmt: skip

        residuals = self._residuals  # a new incarnation has others
        tentative = residuals.offered(send.fragment, send.round)

        def payload() -> Tensor:
            given = None if self.method.exchanged == "gradients" else measured
            outer_gradient = self._snapshots.displacement(fragment, given, snapshot)
            encoded = residuals.encode(tentative, outer_gradient)
            self._snapshots.give_back(snapshot)
            return encoded

        if self._eager is None:
            self._exchange.offer(contribution, payload)
        else:  # the learner steps with it at this very boundary
            encoded = payload()
            self._eager.sent(send, encoded, fragment.numel)
            self._exchange.offer(contribution, lambda: encoded)

    def _settle(self) -> None:
        """Take in what has come, wait for what is due, adopt."""
        self._take_in()
        self._wait_while(lambda: bool(self._core.waiting()))
        arrived = {}
        for fragment, version in self._core.adoptions():
            arrived[fragment] = self._received[fragment, version]
            self._adopt(fragment, version)
        if self._eager is not None:
            for fragment, send in self._sent.items():
                anchor = self._eager.step(send, arrived.get(fragment), self._name, self._exchange.num_live)
                self._write(fragment, anchor, self._parameters)
            self._sent.clear()

    def _keep_origins(self) -> None:
        """The end of a boundary: what is measured next of a fragment that was sent and has not been adopted starts from here."""
        if self.method.adopt.needs_origin or (self._core.schedule.intervals_in_flight and self._eager is None):
            for fragment in self._sent:
                self._origins[fragment] = gather(self.layout.fragments[fragment], self._parameters).cpu()
        self._sent.clear()

    def _wait_while(self, missing: Callable[[], bool]) -> None:
        """Block until the answers that are missing are here."""
        if not missing():
            return
        started = time.monotonic()
        while missing():
            self._report(waiting=True)
            self._exchange.wait()
            self._take_in()
        self._report(waiting=False)
        self._blocked_s += time.monotonic() - started
        self._num_blocked += 1

    def _take_in(self) -> None:
        for event in self._exchange.poll():
            match event:
                case Arrived(update=update):
                    self._received[update.fragment, update.version] = event
                    listed = self._core.received(update.fragment, update.version, event.merged_round)
                    self._merges += len(listed)
                    for flight in listed:
                        self._residuals.commit(update.fragment, flight.round)
                    if self._core.mode == "scheduled" and event.merged_round < update.base:
                        self._residuals.roll_back(update.fragment, update.base)
                case Called(fragment=fragment, version=version):
                    if (send := self._core.called(fragment, version)) is not None:
                        self._send(send, self._parameters)
                case Rejected(fragment=fragment, round=round_, reason=reason):
                    if self._core.rejected(fragment, round_, reason):
                        self._residuals.roll_back(fragment, round_)
                case Rejoined(opened=opened):
                    self._rejoin(opened)

    def _adopt(self, fragment: int, version: int) -> None:
        arrived = self._received[fragment, version]
        if self.method.exchanged == "gradients":
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._write(fragment, arrived.theta, gradients)
        elif self._eager is not None:
            self._eager.adopted(fragment, arrived)
        else:
            self._write(fragment, arrived.theta, self._parameters, self.method.adopt)
        self._anchors[fragment] = arrived.theta
        self._origins.pop(fragment, None)
        if self._eager is None:
            self._sent.pop(fragment, None)
        for flight in self._core.adopted(fragment, version):
            if not flight.listed:
                self._residuals.roll_back(fragment, flight.round)
        self._received = {key: value for key, value in self._received.items() if key[0] != fragment or key[1] > version}

    @torch.no_grad()
    def _write(self, fragment: int, flat: Tensor, tensors: Mapping[str, Tensor], adopt: Adopt | None = None) -> None:
        """A fragment's tensors become `adopt` of themselves and `flat`, or `flat`.

        Tensor by tensor, so that what is made on the way stays in a processor's cache.
        """
        layout = self.layout.fragments[fragment]
        device = tensors[layout.names[0]].device
        origins = {}
        if adopt is not None and adopt.needs_origin and fragment not in self._sent:
            origins = scatter(layout, self._origins.get(fragment, self._anchors[fragment]).to(device))
        for name, value in scatter(layout, flat.to(device)).items():
            own = tensors[name]
            if adopt is None:
                own.copy_(value)
            else:
                local = own.float()  # where the fragment was sent at this very boundary, nothing was trained since
                own.copy_(adopt.adopt(local, value.to(own.device), origins.get(name, local)))

    def _exchange_gradients(self) -> None:
        """Before an inner step: every gradient becomes the mean over learners."""
        self._require_open()
        gradients = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients[name] = parameter.grad
        for send in self._core.stepped(0):
            self._send(send, gradients)
        self._settle()
        self._sent.clear()

    def _measure_step(self) -> None:
        """The inner step's own time, without what `step` itself takes: what deadlines are measured in."""
        if self._last_step_at is not None:
            taken_s = time.monotonic() - self._last_step_at
            self._step_s = taken_s if self._step_s is None else 0.9 * self._step_s + 0.1 * taken_s

    def _report(self, *, waiting: bool) -> None:
        self._exchange.report(Report(self._core.step, self._core.tokens, self._step_s, waiting))

    # --- joining ----------------------------------------------------------------------------------------------------------

    def _start(self, opened: Opened) -> None:
        self._core = LearnerCore(
            self.method.schedule(len(self.layout.fragments)),
            opened.versions,
            wait=self.method.wait,
            keeps_pending=self.method.adopt.keeps_pending,
            step=opened.step,
            mode=mode_of(self.method),
        )
        self._take_model(opened)
        self._start_model = opened

    def _rejoin(self, opened: Opened) -> None:
        self._core.rejoined(opened.versions, opened.step)
        self._take_model(opened)

    def _take_model(self, opened: Opened) -> None:
        """A new incarnation: parameters, frozen ones and buffers become the run's, and nothing is on its way."""
        self._name, self._incarnation = opened.learner, opened.incarnation
        self._received.clear()
        self._residuals = Residuals(self.method, len(self.layout.fragments))
        self._anchors = list(opened.model.fragments)
        self._origins: dict[
            int, Tensor
        ] = {}  # parameters when they were sent, where that is what the next is measured from
        self._sent: dict[int, Send] = {}  # at this boundary
        self._eager = EagerSteps(self.method, opened) if isinstance(self.method.adopt, Eager) else None
        # Where gradients are exchanged, a fragment's later versions are gradients, and the model is the learners' own.
        if self.method.exchanged != "gradients" or not any(opened.versions):
            for fragment, theta in enumerate(opened.model.fragments):
                self._write(fragment, theta, self._parameters)
        self._static.adopt(opened.model.static)

    def _own_model(self) -> Model:
        fragments = tuple(gather(fragment, self._parameters).cpu() for fragment in self.layout.fragments)
        return Model(fragments, self._static.values())

    # --- state ------------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """This learner's id in the run."""
        return self._name

    @property
    def steps(self) -> int:
        """Inner steps on the run's schedule; a late joiner starts at the run's."""
        return self._core.step

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner holds."""
        return self._core.versions

    @property
    def run_tokens(self) -> int:
        """Tokens trained by the whole run as last heard; this learner's own where nobody counts them."""
        known = self._exchange.run_tokens
        return self._core.tokens if known is None else known

    def global_state_dict(self) -> dict[str, Tensor]:
        """The global model as this learner last adopted it, in the shape of `model.state_dict()`: what to evaluate and export.

        Host tensors, in the parameters' dtypes. With gradients exchanged it is the model itself.
        """
        values: dict[str, Tensor] = {}
        if self.method.exchanged != "gradients":
            for fragment, anchor in zip(self.layout.fragments, self._newest(), strict=True):
                values.update(scatter(fragment, anchor))
        state = {}
        for name, own in self.model.state_dict().items():
            source = values.get(self._aliases.get(name, name))
            state[name] = own.to("cpu", copy=True) if source is None else source.to(own.dtype, copy=True)
        return state

    def _newest(self) -> list[Tensor]:
        """The global fragments adopted; where learners push, those that have come and wait for this one's own push too."""
        newest = list(self._anchors)
        if self._core.mode == "pushed":
            for (fragment, _), arrived in sorted(self._received.items(), key=lambda each: each[0]):
                newest[fragment] = arrived.theta
        return newest

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: steps, tokens, versions, merges this learner was in, seconds blocked in `step` (in all, and how many calls
        were blocked for how long), bytes, ledger."""
        return {
            "learner": self._name,
            "incarnation": self._incarnation,
            "steps": self._core.step,
            "tokens": self._core.tokens,
            "run_tokens": self.run_tokens,
            "versions": list(self._core.versions),
            "merges": self._merges,
            "step_s": self._step_s,
            "blocked_s": self._blocked_s,
            "num_blocked": self._num_blocked,
            "blocked_histogram": self._blocked.as_dict(),
            "num_bytes": dict(self._exchange.num_bytes),
            "ledger": [book.ledger.as_dict() for book in self._core.books],
        }

    def state_dict(self) -> dict[str, Any]:
        """Anchors, versions, counters, answers on their way and error feedback; tensors and plain values in nested dicts.

        Waits for answers that are on their way, so that a resumed run continues with the same bits. Take the model's and the
        inner optimizer's state at the same boundary.
        """
        self._take_in()
        self._wait_while(lambda: not self._all_answered())
        return {
            "layout": self.layout.digest(),
            "method": self.method.to_dict(),
            "core": self._core.state_dict(),
            "anchors": {str(f): anchor for f, anchor in enumerate(self._anchors)},
            "origins": {str(f): origin for f, origin in self._origins.items()},
            "received": {f"{f}.{v}": _arrived_out(arrived) for (f, v), arrived in self._received.items()},
            "eager": {} if self._eager is None else self._eager.state_dict(),
            "residuals": self._residuals.state_dict(),
            "exchange": self._exchange.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Continue from `state_dict`; load the model and the inner optimizer first.

        Returns:
            True where the learner continues exactly as it was. False where the run has gone on without it: it keeps its step
            count and adopts the run's newest model, like any learner that rejoins.

        Raises:
            CheckpointError: the state belongs to another model or method.
            ConfigError: this learner has taken a step already.
        """
        opened = self._start_model
        if opened is None:
            raise ConfigError("load_state_dict was called after a step; load the state before the first one.")
        if state["layout"] != self.layout.digest():
            raise CheckpointError(
                "the checkpoint is of another model or another cut of it; use the run file it was saved with."
            )
        if difference := self.method.difference(Method.from_dict(state["method"])):
            raise CheckpointError(
                f"the checkpoint (there) was saved under another method: {difference}; use the method it was saved with."
            )
        newest = [book["held"] for book in state["core"]["books"]]
        for fragment, version in map(_fragment_and_version, state["received"]):
            newest[fragment] = max(newest[fragment], version)
        if not state["exchange"] and tuple(newest) != opened.versions:
            self._core.rejoined(opened.versions, max(opened.step, state["core"]["step"]))
            self._take_model(opened)
            return False
        self._exchange.load_state_dict(state["exchange"])
        self._core.load_state_dict(state["core"])
        if not state["exchange"]:  # a syncer keeps the books, by incarnation, and this is a new one
            self._core.reincarnated()
        self._anchors = [state["anchors"][str(f)] for f in range(len(self._anchors))]
        self._residuals.load_state_dict(state["residuals"])
        self._origins = {int(f): origin for f, origin in state["origins"].items()}
        if self._eager is not None:
            self._eager.load_state_dict(state["eager"])
        self._received = {_fragment_and_version(key): _arrived_in(saved) for key, saved in state["received"].items()}
        for fragment, version in self._received:
            self._core.received(fragment, version, -1)  # its flight knows already
        return True

    def _all_answered(self) -> bool:
        return all(
            (f, flight.round + 1) in self._received
            for f, book in enumerate(self._core.books)
            for flight in book.flights
            if self._core.mode == "scheduled"  # elsewhere nobody knows when an answer comes
        )

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the run. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._hook is not None:
                self._hook.remove()
            self._exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("this learner is closed; make a new one to train on.")


class Histogram:
    """How many calls of `step` were blocked for how long."""

    BOUNDS_S = (0.0, 0.001, 0.01, 0.1, 1.0, 10.0)

    def __init__(self) -> None:
        self._counts = [0] * (len(self.BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        """One call."""
        self._counts[bisect_left(self.BOUNDS_S, seconds)] += 1

    def as_dict(self) -> dict[str, int]:
        """By upper bound in seconds; "0" were not blocked."""
        names = [*(f"{bound:g}" for bound in self.BOUNDS_S), "inf"]
        return dict(zip(names, self._counts, strict=True))


def _arrived_out(arrived: Arrived) -> dict[str, Any]:
    tensors = {"theta": arrived.theta} | ({} if arrived.mean is None else {"mean": arrived.mean})
    return {"update": asdict(arrived.update), "merged_round": arrived.merged_round, **tensors}


def _arrived_in(saved: Mapping[str, Any]) -> Arrived:
    listed = {key: tuple(saved["update"][key]) for key in ("contributors", "weights")}
    return Arrived(Update(**(saved["update"] | listed)), saved["theta"], saved["merged_round"], saved.get("mean"))


def _fragment_and_version(key: str) -> tuple[int, int]:
    fragment, version = key.split(".")
    return int(fragment), int(version)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a tied parameter in `state_dict`, to the one name it has in the layout."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(value)]
        for name, value in model.state_dict(keep_vars=True).items()
        if id(value) in first and first[id(value)] != name
    }
