"""A chaos run on one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco.chaos.facts import Facts
from diloco.chaos.schedule import kinds
from diloco.chaos.story import Told
from diloco.errors import StoreError, translated
from diloco.events import Event
from diloco.planning.pages import page, plain, table
from diloco.report.timeline import Kill, Timeline

BAD = '<b style="color:#dc2626">broken</b>'
GOOD = '<b style="color:#16a34a">holds</b>'

RECOVERIES = {
    "survivor": "a survivor's next version after a learner's kill -9",
    "learner": "a learner that was ended: until a version has its work again",
    "learner_from_its_start": "the same, from when its process was started again",
    "syncer": "a syncer that was ended: until the next one serves",
    "syncer_from_its_start": "the same, from when its process was started again",
    "takeover": "a takeover: from the first's fault until its standby serves, nothing else wrong meanwhile",
    "takeover_amid_faults": "all takeovers, whatever else was wrong",
    "takeover_published": "the same, until the new first has published a version",
}
"""What is measured, for people."""


def write_page(path: Path, told: Told, facts: Facts, found: dict[str, Any]) -> None:
    """Write the page; nothing in it is loaded from elsewhere. Raises StoreError where it cannot be written."""
    with translated(OSError, StoreError, f"cannot write {path}", "choose another directory with --out"):
        path.write_text(page(f"chaos, seed {found['seed']}", _body(told, facts, found)), encoding="utf-8")


def headline(found: dict[str, Any]) -> str:
    """The run in one sentence."""
    ratio = found["goodput"]["ratio"]
    goodput = "not measured" if ratio is None else f"{ratio:.0%}"
    verdict = "all invariants hold" if found["holds"] else "something does not hold"
    return (
        f"{found['num_faults']} faults in {found['seconds']:,.0f} s on {_syncers(found)} and {found['learners']} "
        f"learners: {found['num_survived']} survived, {found['versions_published']:,} versions published, "
        f"{found['versions_lost']} lost, goodput {goodput} of a stretch "
        f"without faults; {verdict}."
    )


def _syncers(found: dict[str, Any]) -> str:
    return "a syncer" if found["syncers"] == 1 else "two syncers"


def _body(told: Told, facts: Facts, found: dict[str, Any]) -> str:
    goodput, ledger = found["goodput"], found["ledger"]
    bound = found["survivor_bound_s"]
    return f"""<h1>Chaos, seed {found["seed"]}</h1>
<p class="lead">{plain(headline(found))}</p>
<h2>What must hold</h2>
{_invariants(found)}
<h2>Faults, by kind</h2>
<p>Survived: versions were published after it, and in the end every learner merged again. All of them, with
their times, are in <code>faults.jsonl</code>.</p>
{table(("fault", "injected", "survived"), _kinds(told, found))}
{_timeline(told, facts)}
<h2>Time to come back</h2>
<p>Seconds. {plain(_bound(bound))} A takeover is due within the deadline of the lost, {found["lost_deadline_s"]:g} s,
and 5 s.</p>
{table(("", "times", "median", "worst"), recovery_rows(found))}
<h2>Goodput and participation</h2>
<p>Tokens merged a second: {goodput["calm"]:,.0f} without faults, {goodput["troubled"]:,.0f} with them. All processes
share one machine, where a process that starts takes processor time from the others.</p>
{table(("learner", "in merges"), [(name, f"{share:.0%}") for name, share in found["participation"].items()])}
<h2>Tokens</h2>
{_tokens(ledger)}
<p class="note">{found["versions_given_up"]} versions were given up on purpose, where the state was damaged or an older
one restored. {found["missing_events"]} events are missing, which full disks have refused.
{found["bytes_resumed"]:,} bytes of cut transfers were not sent again.</p>
<h2>Faults, by time</h2>
{_faults(told)}"""


def _bound(bound: float | None) -> str:
    if bound is None:
        return "The step time was not measured."
    return f"A survivor's next version is due within two step times and the deadline of the lost: {bound:.2f} s."


def _invariants(found: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{plain(name)}</th><td>{BAD if broken else GOOD}</td>"
        f"<td>{plain(found['seen'][name])}{''.join(f'<br>{plain(each)}' for each in broken[:20])}</td></tr>"
        for name, broken in found["invariants"].items()
    )
    return f"<table>{rows}</table>"


def _kinds(told: Told, found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"{each.name}: {each.what}", *(str(found["faults"][each.name][key]) for key in ("injected", "survived")))
        for each in kinds(told.lost_s)
        if each.name in found["faults"]
    ]


def recovery_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row for each kind of recovery: how many, the median and the worst."""
    rows: list[tuple[str, ...]] = []
    for key, what in RECOVERIES.items():
        each = found["recovery"][key]
        numbers = ("0", "not measured", "") if each is None else (
            str(each["num"]), f"{each['median']:.2f}", f"{each['worst']:.2f}",
        )  # fmt: skip
        rows.append((what, *numbers))
    return rows


def _tokens(ledger: dict[str, int] | None) -> str:
    if ledger is None:
        return "<p>The syncer has said nothing of its tokens.</p>"
    return table(tuple(ledger), [tuple(f"{tokens:,}" for tokens in ledger.values())])


def _timeline(told: Told, facts: Facts) -> str:
    """Who took part, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return '<p class="note">With matplotlib installed there is a picture of who took part here.</p>'
    from diloco.chaos.timeline_chart import timeline_chart

    timeline = timeline_of(facts.syncer)
    if not timeline.syncer_starts:
        return ""
    timeline.kills = [Kill(each.name, each.t) for each in told.ends]
    return f"""<h2>Who took part</h2>
<p>A band is a learner's presence in the run, a tick a merge that it is in, <b style="color:#dc2626">✕</b> an end,
<b style="color:#16a34a">▶</b> a return. In the syncer's row every merge is a tick, and
<b style="color:#d97706">amber</b> where a learner is missing from it.</p>
{timeline_chart(timeline)}"""


def timeline_of(events: Sequence[Event]) -> Timeline:
    """The syncers' events in order."""
    timeline = Timeline()
    for event in events:
        timeline.take("syncer", event)
    return timeline


def _faults(told: Told) -> str:
    first = told.troubled[0]
    rows = [
        (
            each.fault.kind if each.hit else f"{each.fault.kind} (nothing to hit)", each.fault.target,
            f"{each.began_at - first:.1f}", f"{each.ended_at - each.began_at:.1f}",
        )
        for each in sorted(told.injected, key=lambda each: each.began_at)
    ]  # fmt: skip
    return table(("fault", "on", "at, s", "for, s"), rows)
