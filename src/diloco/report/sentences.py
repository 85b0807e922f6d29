"""Events of a run as sentences."""

from __future__ import annotations

from typing import Literal

from diloco import events as ev

Tone = Literal["good", "bad", "plain"]
MAX_NAMES = 4


def sentence(event: ev.Event) -> tuple[Tone, str] | None:
    """An event as a sentence; None: the event is too frequent for a sentence."""
    match event:
        case ev.SyncerStarted(versions=()):
            return "plain", "the syncer started and waits for a model"
        case ev.SyncerStarted():
            return "plain", "the syncer restarted at its last published versions"
        case ev.Initialised(learner=learner, num_parameters=number, source=source, cut=cut):
            cut = f", in {cut}" if cut else ""
            return "good", f"{learner} gave the run its model of {number:,} parameters (from {source}){cut}"
        case ev.Joined(learner=learner, incarnation=incarnation, step=step, holds=holds):
            experts = ("–".join(map(str, sorted({first, stop - 1}))) for first, stop in holds or ())
            part = "" if holds is None else f", with experts {', '.join(experts)}"
            return "good", f"{learner} {'joined' if incarnation == 1 else 'rejoined'} at step {step:,}{part}"
        case ev.Left(learner=learner, tokens=tokens):
            return "plain", f"{learner} left after {tokens:,} tokens"
        case ev.Evicted(reason=reason) if reason.startswith("evicted by "):  # the event `Steered` has the sentence
            return None
        case ev.Steered(order=order, text=text):
            return "good" if order in ("admit", "resume") else "bad" if order == "evict" else "plain", text
        case ev.Evicted(learner=learner, reason=reason):
            return "bad", f"{learner} was evicted: {reason}"
        case ev.Rejected(learner=learner, fragment=fragment, reason=reason):
            return "bad", f"a contribution of {learner} to fragment {fragment} was rejected: {reason}"
        case ev.Refused(name=name, peer=peer, text=text, times=times):
            again = "" if times == 1 else f" ({times} times)"
            return "bad", f"{name or peer} was refused: {text}{again}"
        case ev.Reported(by=by, loss=loss, step=step, scores=scores):
            results = [*(() if loss is None else (f"held-out loss {loss:.4f}",)), *map(_score, scores.items())]
            at = "" if step is None else f" of step {step:,}"
            return "plain", f"{by} evaluated the global model{at}: {named(results, 'results')}"
        case ev.StandingChanged(standing=standing, why=why):
            return "plain", f"this syncer is {standing}: {why}"
        case ev.Copied(place=place, versions=versions):
            return "plain", f"versions {list(versions)} were copied to {place}"
        case ev.CopyRefused(place=place, error=error):
            return "bad", f"the run could not be copied to {place}: {error}"
        case ev.Gap(missing=missing):
            return "bad", f"{missing:,} events could not be written"
        case ev.Finished(who="syncer", reason=reason):
            return "plain", f"the syncer ended: {reason}"
    return None


def named(names: list[str], what: str = "learners") -> str:
    """The names, or their number if there are many."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} {what}"


def _score(score: tuple[str, float]) -> str:
    return f"{score[0]} {score[1]:.4f}"
