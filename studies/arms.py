"""An arm of a study: one resolved configuration, trained once per seed and kept in `cache/` under the hash of that
configuration."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diloco.core.choices import Choice
from diloco.core.codecs import Codec
from diloco.core.method import Method
from diloco.core.quorum import AllLive
from studies import world
from studies.world import LR

CACHE = Path(__file__).parent / "cache"
FORMAT = 1
DIVERGED = 20.0
"""Stands for a loss that is not finite or beyond it."""


@dataclass(frozen=True)
class Arm:
    """What is trained. Equal tokens by default; with `budget_s` equal virtual wall-clock instead.

    Attributes:
        kind: "method"; or the controls "data parallel" (one model on the global batch) and "isolated" (learner 0 alone
            on its share).
        method: `Method.to_dict()` where there is one.
        learners: M.
        warm: share of the steps that one model takes on the global batch before.
        lr, inner: of the inner optimizer, "adamw" or "muon".
        seed: of initial values and data order.
        split: what is evaluated, "report" or "select".
        speeds: relative speed of each learner where they differ; a step takes 1 s ÷ speed of virtual time, ± 10 % at
            random.
        budget_s: virtual seconds after the warm start, instead of a number of steps.
        starts: when each learner starts, as a share of the common part; default: at its beginning.
        ends: when each learner leaves, likewise.
        topics: every learner has its own topic of the text.
        shared_fraction: share of the text that every learner reads beside its topic.
        examples: a learner's tokens are credited in proportion to the size of its topic.
        attack: what the last learner's outer gradients become: "noise", "flipped", "scaled".
        batch: sequences of a learner's step, where not BATCH ÷ M.
        common: steps of a control after the warm start, where not all the others: its lr schedule ends with them.
    """

    kind: str = "method"
    method: Mapping[str, Any] | None = None
    learners: int = 4
    warm: float = 0.25
    lr: float = LR
    inner: str = "adamw"
    seed: int = 0
    split: str = "report"
    speeds: tuple[float, ...] | None = None
    budget_s: float | None = None
    starts: tuple[float, ...] | None = None
    ends: tuple[float, ...] | None = None
    topics: bool = False
    shared_fraction: float = 0.0
    examples: bool = False
    attack: str = ""
    batch: int | None = None
    common: int | None = None

    def key(self) -> str:
        """Name of the run: a hash of what it depends on, where that is not the default."""
        values = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        if self.kind != "method":  # a control has no method, speeds or members
            for name in ("method", "speeds", "budget_s", "starts", "ends", "attack"):
                values.pop(name, None)
        if self.kind == "data parallel":  # it is the same run whatever M, its warm start and its shards are
            for name in ("learners", "warm", "topics", "shared_fraction"):
                values.pop(name, None)
        if self.method is not None and "method" in values:
            method = Method.from_dict(self.method)
            values["method"] = _sparse(method)
            if in_flight_at_the_end(method):
                values["evaluated"] = "published"
        return hashlib.sha256(json.dumps([FORMAT, values], sort_keys=True).encode()).hexdigest()[:20]


def _sparse(value: Any) -> Any:
    """A method or one of its choices in plain values, without defaults: a field that is added later changes no key."""
    if isinstance(value, Codec):
        return value.name
    if isinstance(value, Method | Choice):
        changed = {f.name: now for f in fields(value) if (now := getattr(value, f.name)) != f.default}
        if isinstance(value, Method):
            del changed["name"], changed["paper"]
            return {name: _sparse(now) for name, now in changed.items()}
        return {"type": type(value).__name__, **{name: _sparse(now) for name, now in changed.items()}}
    return [_sparse(each) for each in value] if isinstance(value, tuple) else value


def in_flight_at_the_end(method: Method) -> bool:
    """Whether the run has a newer global model at its last step than its learners have adopted."""
    quorum = method.quorum
    return isinstance(quorum, AllLive) and not quorum.drop and method.overlap > 0


@dataclass(frozen=True)
class Outcome:
    """A finished run: held-out loss of the global model in nats per byte, and what it took."""

    loss: float
    seconds: float
    steps: tuple[int, ...] = ()
    merges: int = 0
    date: str = ""


def outcome(arm: Arm) -> Outcome:
    """Of a run that is in the cache, or is trained now."""
    found = _read(arm)
    if found is not None and found.get("text", world.fingerprint()) == world.fingerprint():
        return _outcome(found)
    from studies.train import train

    started = time.monotonic()
    result = replace(train(arm), seconds=round(time.monotonic() - started, 1))
    CACHE.mkdir(exist_ok=True)
    result = replace(result, date=time.strftime("%Y-%m-%d"))
    values = {"arm": asdict(arm), "text": world.fingerprint(), "outcome": asdict(result)}
    temporary = CACHE / f"{arm.key()}.{time.time_ns()}.part"
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    temporary.replace(CACHE / f"{arm.key()}.json")
    return result


def cached(arm: Arm) -> Outcome | None:
    """The outcome of a run that was made before."""
    found = _read(arm)
    return None if found is None else _outcome(found)


def _read(arm: Arm) -> dict[str, Any] | None:
    file = CACHE / f"{arm.key()}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _outcome(record: Mapping[str, Any]) -> Outcome:
    values = record["outcome"]
    return Outcome(**{"date": record.get("date", ""), **values, "steps": tuple(values["steps"])})


def outcomes(arms: Iterable[Arm], jobs: int = 1, say: Callable[[Arm, Outcome], None] | None = None) -> None:
    """Train what is missing, in `jobs` processes of one thread each; `say` is called after each run that was
    missing."""
    missing = list({arm.key(): arm for arm in arms if cached(arm) is None}.values())
    say = say or (lambda *_: None)
    if jobs == 1:
        for arm in missing:
            say(arm, outcome(arm))
        return
    from studies.train import warm_started

    for arm in {(each.warm, each.inner, each.lr, each.seed): each for each in missing}.values():
        warm_started(arm)  # once, and not by several at the same time
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(outcome, arm): arm for arm in missing}
        for done in as_completed(running):
            say(running[done], done.result())
