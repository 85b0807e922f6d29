"""`Learner`: the object users hold. It ties a model and an inner optimizer to a method and an exchange.

`step()` is one boundary: report, send what is due, take in what has arrived, adopt what is due. The training thread pays for a
snapshot of what is sent and a copy of what is adopted; encoding, sending, receiving and decoding happen on the exchange's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.core.adopt import Eager
from diloco.core.flights import Send
from diloco.core.fragments import Layout, make_layout
from diloco.core.learner import LearnerCore, mode_of
from diloco.core.method import Method
from diloco.core.update import KEPT, Contribution, Update
from diloco.eager import EagerSteps
from diloco.errors import CheckpointError, ConfigError
from diloco.exchange.base import Arrived, Called, Exchange, Opened, Rejected, Rejoined, Report
from diloco.histogram import Histogram
from diloco.residuals import Residuals
from diloco.trainable import check_trainable, trained_tensors
from diloco.values import Values


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
        self._values = Values(model, self.layout, self.method)
        if trains is not None and isinstance(self.method.adopt, Eager):
            raise ConfigError(
                f"{self.method.name} replaces a learner's own part of every mean, and where learners train parts that is another "
                "part for every tensor; train all of the model, or use DelayedDiLoCo."
            )
        self._trained = trained_tensors(self.layout, trains)
        self._blocked_s = 0.0
        self._num_blocked = 0
        self._blocked = Histogram()
        self._last_step_at: float | None = None
        self._step_s: float | None = None
        self._closed = False
        self._merges = self._updates = 0
        self._received: dict[tuple[int, int], Arrived] = {}
        self._start_model: Opened | None = None
        self._start(exchange.open(self.layout, self.method, self._values.own_model))
        self._hook = None
        if self.method.exchanged == "gradients":
            self._hook = inner_optimizer.register_step_pre_hook(lambda *_: self._exchange_gradients())

    # --- one boundary -----------------------------------------------------------------------------------------------------

    def step(self, *, tokens: int) -> None:
        """After an inner step on `tokens` tokens (of this rank): send, take in, adopt.

        Blocks only where the method waits for an answer that is due.
        """
        self._require_open()
        if self.method.exchanged != "gradients":
            self._exchange.stepped()
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
                self._send(send, self._values.parameters)
            self._report(waiting=False)
            self._settle()
            while self._exchange.boundary():
                self._settle()
            self._values.end_boundary(self._sent, keep=self._keeps_origins)
            self._sent.clear()
        self._blocked.add(self._blocked_s - blocked_s)
        self._last_step_at = self._exchange.now_s

    def _send(self, send: Send, tensors: Mapping[str, Tensor]) -> None:
        self._sent[send.fragment] = send
        self._values.static.check(send.fragment, len(self.layout.fragments))
        if not self._exchange.sends and self._eager is None:
            return
        fragment = self.layout.fragments[send.fragment]
        snapshot = self._values.snapshots.take(fragment, tensors)
        if self.method.exchanged == "gradients":
            measured = None
        else:
            anchors = self._values.anchors if self._eager is None else self._eager.anchors
            measured = self._values.origins.get(send.fragment, anchors[send.fragment])
        contribution = Contribution(
            self._name, self._incarnation, send.fragment, send.round, send.base, send.tokens, send.steps,
            self._core.tokens, send.discarded, step=self._core.step, tensors=self._trained[send.fragment],
        )  # fmt: skip

        residuals = self._residuals  # a new incarnation has others
        tentative = residuals.offered(send.fragment, send.round)

        def payload() -> Tensor:
            outer_gradient = self._values.snapshots.displacement(fragment, measured, snapshot)
            encoded = residuals.encode(tentative, outer_gradient)
            self._values.snapshots.give_back(snapshot)
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
                self._values.write(fragment, anchor)
            self._sent.clear()

    @property
    def _keeps_origins(self) -> bool:
        """Whether what is measured next may start from the parameters as they were sent."""
        return self.method.adopt.needs_origin or (self._core.schedule.intervals_in_flight > 0 and self._eager is None)

    def _wait_while(self, missing: Callable[[], bool]) -> None:
        """Block until the answers that are missing are here."""
        if not missing():
            return
        started = self._exchange.now_s
        while missing():
            self._report(waiting=True)
            self._exchange.wait()
            self._take_in()
        self._report(waiting=False)
        self._blocked_s += self._exchange.now_s - started
        self._num_blocked += 1

    def _take_in(self) -> None:
        for event in self._exchange.poll():
            match event:
                case Arrived(update=update):
                    self._received[update.fragment, update.version] = event
                    self._updates += update.version > self._core.versions[update.fragment]
                    listed = self._core.received(update.fragment, update.version, event.merged_round)
                    self._merges += bool(listed)
                    for flight in listed:
                        self._residuals.commit(update.fragment, flight.round)
                    if self._core.mode == "scheduled" and event.merged_round < update.base:
                        self._residuals.roll_back(update.fragment, update.base)
                case Called(fragment=fragment, version=version):
                    if (send := self._core.called(fragment, version)) is not None:
                        self._send(send, self._values.parameters)
                case Rejected(fragment=fragment, round=round_, reason=reason):
                    if self._core.rejected(fragment, round_, reason):
                        self._residuals.roll_back(fragment, round_)
                        if reason in KEPT:
                            self._sent.pop(fragment, None)
                            self._values.measure_from((fragment,), here=False)
                case Rejoined(opened=opened):
                    self._rejoin(opened)

    def _adopt(self, fragment: int, version: int) -> None:
        arrived = self._received[fragment, version]
        if self.method.exchanged == "gradients":
            self._values.write(fragment, arrived.theta, self._values.gradients())
        elif self._eager is not None:
            self._eager.adopted(fragment, arrived)
        elif not self._core.keeps_own(fragment, version):
            self._values.adopt(fragment, arrived.theta, just_sent=fragment in self._sent)
            self._sent.pop(fragment, None)
        self._values.adopted(fragment, arrived.theta)
        for flight in self._core.adopted(fragment, version):
            if not flight.listed:
                self._residuals.roll_back(fragment, flight.round)
        self._received = {key: value for key, value in self._received.items() if key[0] != fragment or key[1] > version}

    def _exchange_gradients(self) -> None:
        """Before an inner step: every gradient becomes the mean over learners."""
        self._require_open()
        self._exchange.stepped()
        gradients = self._values.gradients()
        for send in self._core.stepped(0):
            self._send(send, gradients)
        self._settle()
        self._sent.clear()

    def _measure_step(self) -> None:
        """The inner step's own time, without what `step` itself takes: what deadlines are measured in."""
        if self._last_step_at is not None:
            taken_s = self._exchange.now_s - self._last_step_at
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
        self._sent: dict[int, Send] = {}  # at this boundary
        self._eager = EagerSteps(self.method, opened) if isinstance(self.method.adopt, Eager) else None
        # Where gradients are exchanged, a fragment's later versions are gradients, and the model is the learners' own.
        self._values.take(opened.model, write=self.method.exchanged != "gradients" or not any(opened.versions))

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
        return self._values.state_dict(None if self.method.exchanged == "gradients" else self._newest())

    def _newest(self) -> list[Tensor]:
        """The global fragments adopted; where learners push, those that have come and wait for this one's own push too."""
        newest = list(self._values.anchors)
        if self._core.mode == "pushed":
            for (fragment, _), arrived in sorted(self._received.items(), key=lambda each: each[0]):
                newest[fragment] = arrived.theta
        return newest

    def metrics(self) -> dict[str, Any]:
        """Plain numbers: steps, tokens, versions, updates received and merges among them this learner was in, seconds blocked in `step`
        (in all, and how many calls were blocked for how long), bytes, ledger."""
        return {
            "learner": self._name,
            "incarnation": self._incarnation,
            "steps": self._core.step,
            "tokens": self._core.tokens,
            "run_tokens": self.run_tokens,
            "versions": list(self._core.versions),
            "updates": self._updates,
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

        Waits for the answers that a schedule has on their way, so that a resumed run continues with the same bits. Where nobody
        waits for a round, work on its way becomes pending again or, over a syncer, stays with it. Take the model's and the inner
        optimizer's state at the same boundary.
        """
        self._take_in()
        self._wait_while(lambda: not self._all_answered())
        return {
            "layout": self.layout.digest(),
            "method": self.method.to_dict(),
            "core": self._core.state_dict(),
            **self._values.learner_state(),
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
        has_gone_on = any(now > saved for now, saved in zip(opened.versions, newest, strict=True))
        if has_gone_on or (not state["exchange"] and tuple(newest) != opened.versions):
            self._core.rejoined(opened.versions, max(opened.step, state["core"]["step"]))
            self._take_model(opened)
            return False
        self._exchange.load_state_dict(state["exchange"])
        self._core.load_state_dict(state["core"])
        self._values.load_learner_state(state)
        self._values.measure_from(
            self._core.forget_flights(keep_work=bool(state["exchange"])), here=not state["exchange"]
        )
        if not state["exchange"]:  # a syncer keeps the books, by incarnation, and this is a new one
            self._core.reincarnated()
        self._residuals.load_state_dict(state["residuals"])
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


def _arrived_out(arrived: Arrived) -> dict[str, Any]:
    tensors: dict[str, Any] = {"theta": arrived.theta} | ({} if arrived.mean is None else {"mean": arrived.mean})
    if arrived.outer_state is not None:
        tensors["outer_state"] = dict(arrived.outer_state)
    return {"update": arrived.update.as_dict(), "merged_round": arrived.merged_round, **tensors}


def _arrived_in(saved: Mapping[str, Any]) -> Arrived:
    return Arrived(
        Update.from_dict(saved["update"]),
        saved["theta"],
        saved["merged_round"],
        saved.get("mean"),
        saved.get("outer_state"),
    )


def _fragment_and_version(key: str) -> tuple[int, int]:
    fragment, version = key.split(".")
    return int(fragment), int(version)
