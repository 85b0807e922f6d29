"""A learner's part of a checkpoint: what `Learner.state_dict` contains, and how a learner resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from diloco.core.held import HeldFragment
from diloco.core.layout import digest
from diloco.core.lineage import Lineage, refusal
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import CheckpointError, StoppedError
from diloco.exchange.base import Arrived, Opened
from diloco.learner.boundary import Boundary

KEYS = (
    *("rank", "layout", "method", "core", "anchors", "origins", "parameters", "counters"),
    *("received", "eager", "residuals", "exchange", "lineage", "rewarm"),
)


def learner_state(learner: Boundary) -> dict[str, Any]:
    """Wait for the updates of scheduled rounds in flight, then return all that the learner needs to continue exactly. A
    learner that is told to stop waits no longer: what it has not heard of is pending again.

    The parameters are part of it: joining a run overwrites those that the caller has loaded into the model before.
    """
    learner.receive()
    try:
        learner.wait_while(lambda: _unanswered(learner))
    except StoppedError:
        learner.take_back()
    return {
        "rank": list(learner.exchange.rank),
        "layout": learner.layout.digest(),
        "method": learner.method.to_dict(),
        "core": learner.core.state_dict(),
        **learner.tensors.state_dict(),
        "received": {f"{f}.{v}": _arrived_out(arrived) for (f, v), arrived in learner.received.items()},
        "eager": {} if learner.eager is None else learner.eager.state_dict(),
        "residuals": learner.residuals.state_dict(),
        "exchange": learner.exchange.state_dict(),
        "lineage": None if (lineage := learner.exchange.lineage) is None else asdict(lineage),
        "rewarm": learner.rewarm.state_dict(),
    }


def resume(learner: Boundary, opened: Opened, state: Mapping[str, Any]) -> bool:
    """Continue from `learner_state` in the run that `opened` describes (`Learner.load_state_dict`).

    Raises:
        CheckpointError: the state belongs to another run, model, method, number of ranks or parallelism, or the syncer
            serves an older state of the run.
    """
    _check(learner, state)
    exchange, core = state["exchange"], learner.core
    learner.rewarm.load_state_dict(state["rewarm"])
    if _has_gone_on(opened, state) or not learner.exchange.load_state_dict(exchange):
        learner.rejoin(opened, step=state["core"]["step"])
        learner.tensors.frozen.load_counters(state["counters"])  # the learner's own, wherever the run is
        return False
    core.load_state_dict(state["core"])
    learner.tensors.load_state_dict(state)
    learner.digests = [digest(anchor) for anchor in learner.tensors.anchors]
    learner.tensors.measure_from(core.forget_in_flight(keep_work=bool(exchange)), here=not exchange)
    if not exchange:  # a syncer keeps the books, by incarnation, and this is a new one
        core.reincarnated()
    learner.residuals.load_state_dict(state["residuals"])
    if learner.eager is not None:
        learner.eager.load_state_dict(state["eager"])
    learner.received = {_fragment_and_version(key): _arrived_in(saved) for key, saved in state["received"].items()}
    for fragment, version in learner.received:
        core.received(fragment, version, 0)  # the contribution in flight knows already
    return True


def _check(learner: Boundary, state: Mapping[str, Any]) -> None:
    if missing := [key for key in KEYS if key not in state]:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]!r}; load what Learner.state_dict of this version of diloco returned."
        )
    if state["layout"] != learner.layout.digest():
        raise CheckpointError(
            "the checkpoint is of another model or another cut of it; use the run file it was saved with."
        )
    if difference := learner.method.difference(Method.from_dict(state["method"])):
        raise CheckpointError(
            f"the checkpoint (there) was saved under another method: {difference}; use the method it was saved with."
        )
    seen, served = state["lineage"], learner.exchange.lineage
    error = None if seen is None or served is None else refusal(Lineage(**seen), served)
    if error is not None:
        raise CheckpointError(f"the checkpoint cannot be continued here: {error}")
    learner.exchange.require_rank(state["rank"], state["core"]["step"])
    learner.tensors.require_pieces(state["parameters"])


def _has_gone_on(opened: Opened, state: Mapping[str, Any]) -> bool:
    """Whether the run holds other versions than those that the learner knew of.

    An exchange whose state is in the checkpoint is restored from it, so there the run may also hold earlier versions.
    """
    newest = [work["version"] for work in state["core"]["fragments"]]
    for fragment, version in map(_fragment_and_version, state["received"]):
        newest[fragment] = max(newest[fragment], version)
    if any(now > saved for now, saved in zip(opened.versions, newest, strict=True)):
        return True
    return not state["exchange"] and tuple(newest) != opened.versions


def _unanswered(learner: Boundary) -> list[tuple[int, int]]:
    return [answer for answer in learner.core.answers_on_their_way() if answer not in learner.received]


def _arrived_out(arrived: Arrived) -> dict[str, Any]:
    mean = {} if arrived.mean is None else {"mean": arrived.mean}
    held = arrived.held.state_dict()
    return {"update": arrived.update.as_dict(), "merged": arrived.merged, "held": held, **mean}


def _arrived_in(saved: Mapping[str, Any]) -> Arrived:
    update = Update.from_dict(saved["update"])
    held = HeldFragment.from_state_dict(update.fragment, saved["held"])
    return Arrived(update, held, saved["merged"], saved.get("mean"))


def _fragment_and_version(key: str) -> tuple[int, int]:
    fragment, version = key.split(".")
    return int(fragment), int(version)
