"""A learner's part of a checkpoint: the content of `Learner.state_dict`, and resuming from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import index
from typing import Any

from torch import Tensor

from diloco.core.global_fragment import GlobalFragment
from diloco.core.layout import Layout, digest
from diloco.core.method import Method
from diloco.core.update import Update
from diloco.errors import AuthError, CheckpointError, StoppedError, translated
from diloco.escaping import MALFORMED
from diloco.exchange.base import Arrived, StartingState
from diloco.learner.driver import LearnerDriver
from diloco.protocol.in_flight import require_whole_numbers
from diloco.protocol.lineage import Lineage, refusal

KEYS = (
    *("rank", "layout", "method", "core", "anchors", "origins", "parameters", "counters"),
    *("received", "eager", "residuals", "exchange", "lineage", "rewarm"),
)


def learner_state(learner: LearnerDriver) -> dict[str, Any]:
    """Wait for the updates of scheduled rounds in flight, then return the state that continues the learner exactly.

    A learner that is interrupted, or refused by the syncer, ends the wait: contributions without an answer become
    pending again. The parameters are included, because joining overwrites those that the caller has loaded.
    """
    try:
        learner.receive()
        learner.wait_while(lambda: [it for it in learner.core.answers_on_their_way() if it not in learner.received])
    except (StoppedError, AuthError):
        learner.take_back()
    learner.read_routed()
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


def resume(learner: LearnerDriver, opened: StartingState, state: Mapping[str, Any]) -> bool:
    """Continue from `learner_state` in the run that `opened` describes (`Learner.load_state_dict`).

    Raises:
        CheckpointError: the state belongs to another run, model, method, number of ranks or parallelism, or the syncer
            serves an older state of the run; or it is damaged. The learner is as before.
    """
    core = learner.core
    with translated(MALFORMED, CheckpointError, "the learner's state in the checkpoint is damaged", "use another one"):
        _check(learner, state)
        _check_tensors(learner, state)
        core.check_state_dict(state["core"])
        exchange, rewarm = state["exchange"], state["rewarm"]
        require_whole_numbers(rewarm["num_steps"], rewarm["num_taken"])
        has_gone_on = _has_gone_on(opened, state)
        received = {key: _arrived_in(saved) for key, saved in _by_version(state["received"])}
        for key, it in received.items():
            if key != (it.update.fragment, it.update.version):
                raise ValueError(f"version {it.update.version} of fragment {it.update.fragment} as {key}")
        has_gone_on = has_gone_on or not learner.exchange.load_state_dict(exchange)
    learner.rewarm.begin(rewarm["num_steps"], rewarm["num_taken"])
    if has_gone_on:
        learner.rejoin(opened, step=state["core"]["step"])
        learner.tensors.frozen.load_counters(state["counters"])  # the learner's own
        return False
    core.load_state_dict(state["core"])
    learner.discard_routed()
    learner.tensors.load_state_dict(state)
    learner.digests = [digest(anchor) for anchor in learner.tensors.anchors]
    learner.tensors.measure_from(core.forget_in_flight(keep_work=bool(exchange)), here=not exchange)
    if not exchange:  # a syncer accounts by incarnation, and this is a new one
        core.reincarnated()
    learner.residuals.load_state_dict(state["residuals"])
    if learner.eager is not None:
        learner.eager.load_state_dict(state["eager"])
    learner.received = received
    for fragment, version in learner.received:
        core.received(fragment, version, 0)  # 0: contributions in flight are marked as merged already
    return True


def require_layout(saved: object, layout: Layout) -> None:
    """Raise CheckpointError unless `saved`, a state's layout, is that of this model."""
    if saved != layout.digest():
        raise CheckpointError(
            "the checkpoint is of another model, another cut of it, or other experts that its learner holds; use the "
            "run file it was saved with."
        )


def _check(learner: LearnerDriver, state: Mapping[str, Any]) -> None:
    if missing := [key for key in KEYS if key not in state]:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]!r}; load what Learner.state_dict of this version of diloco returned."
        )
    _require_mappings(state, *(key for key in KEYS if key not in ("rank", "layout", "lineage")))
    require_layout(state["layout"], learner.layout)
    if difference := learner.method.difference(Method.from_dict(state["method"]), "now", "in the checkpoint"):
        raise CheckpointError(
            f"the checkpoint was saved under another method: {difference}; use the method it was saved with."
        )
    saved, served = state["lineage"], learner.exchange.lineage
    seen = None if saved is None else Lineage(str(saved["run_id"]), int(saved["epoch"]), int(saved["boot"]))
    error = None if seen is None or served is None else refusal(seen, served)
    if error is not None:
        raise CheckpointError(f"the checkpoint cannot be continued here: {error}")
    learner.exchange.require_rank([index(each) for each in state["rank"]], index(state["core"]["step"]))
    learner.tensors.require_pieces(state["parameters"])


def _check_tensors(learner: LearnerDriver, state: Mapping[str, Any]) -> None:
    """Raise one of `MALFORMED` unless the tensors fit this model."""
    anchors = learner.tensors.anchors
    flat = [(int(f), each) for part in ("origins", "residuals") for f, each in state[part].items()]
    flat += [(f, state["anchors"][str(f)]) for f in range(len(anchors))]
    flat += [(key[0], saved["held"]["theta"]) for key, saved in _by_version(state["received"])]
    if learner.eager is not None:
        flat += [(f, state["eager"]["anchors"][str(f)]) for f in range(len(anchors))]
        flat += [(_fragment_and_version(key)[0], each) for key, each in state["eager"]["added"].items()]
        flat += [(f, saved["mean"]) for (f, _), saved in _by_version(state["received"]) if "mean" in saved]
        for f in range(len(anchors)):
            _require_tensors(state["eager"]["states"][str(f)].values())
    for f, each in flat:
        _require_tensors([each])
        if not 0 <= f < len(anchors) or each.shape != anchors[f].shape or not each.is_floating_point():
            raise ValueError(f"a tensor of fragment {f} has the shape {tuple(each.shape)}")
    own = learner.tensors.frozen.counters()
    if own.keys() != state["counters"].keys():
        raise ValueError(f"it has the counters {list(state['counters'])}")
    for name, each in state["counters"].items():
        _require_tensors([each])
        if each.shape != own[name].shape:
            raise ValueError(f"{name!r} has the shape {tuple(each.shape)}")


def _require_tensors(values: Iterable[object]) -> None:
    for each in values:
        if not isinstance(each, Tensor):
            raise TypeError(f"a {type(each).__name__} in place of a tensor")


def _has_gone_on(opened: StartingState, state: Mapping[str, Any]) -> bool:
    """Whether the run holds other versions than those that the learner had received.

    An exchange whose state is in the checkpoint is restored from it, so its run may also hold earlier versions.
    """
    newest = [work["version"] for work in state["core"]["fragments"]]
    for fragment, version in map(_fragment_and_version, state["received"]):
        newest[fragment] = max(newest[fragment], version)
    if any(now > saved for now, saved in zip(opened.versions, newest, strict=True)):
        return True
    return not state["exchange"] and tuple(newest) != opened.versions


def _arrived_out(arrived: Arrived) -> dict[str, Any]:
    mean = {} if arrived.mean is None else {"mean": arrived.mean}
    held = arrived.held.state_dict()
    return {"update": arrived.update.as_dict(), "merged": arrived.merged, "held": held, **mean}


def _arrived_in(saved: Mapping[str, Any]) -> Arrived:
    update = Update.from_dict(saved["update"])
    held = GlobalFragment.from_state_dict(update.fragment, saved["held"])
    mean = saved.get("mean")
    require_whole_numbers(update.base, held.version, saved["merged"])
    if held.version != update.version:
        raise ValueError(f"version {held.version} as {update.version}")
    _require_tensors([] if mean is None else [mean])
    return Arrived(update, held, saved["merged"], mean)


def _by_version(received: Mapping[str, Any]) -> list[tuple[tuple[int, int], Mapping[str, Any]]]:
    for saved in received.values():
        _require_mappings(saved, "update", "held")
    return [(_fragment_and_version(key), saved) for key, saved in received.items()]


def _require_mappings(values: object, *keys: str) -> None:
    """Raise TypeError unless these values are mappings: a tensor would accept a text as a sequence of indices."""
    if not isinstance(values, Mapping) or not all(isinstance(values[key], Mapping) for key in keys):
        raise TypeError(f"a {type(values).__name__} in place of names and values")


def _fragment_and_version(key: str) -> tuple[int, int]:
    fragment, version = key.split(".")
    return int(fragment), int(version)
