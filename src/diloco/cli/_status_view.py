"""The text of `diloco status`: a run in 80 columns, or with `wide` in more detail."""

import io
import textwrap
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.cli._output import cell
from diloco.errors import StoreError, translated
from diloco.escaping import printable, shortened
from diloco.planning.units import SIZE
from diloco.protocol.contribution import UNMERGED
from diloco.protocol.groups import ENDS
from diloco.protocol.units import numbers
from diloco.report.drawing import short
from diloco.run.status import state_of
from diloco.whole_files import write_whole

MAX_NAMES, MAX_REASONS = 6, 3

LEGEND_COLUMNS = 80

PAGE_COLUMNS = 160

LONG_CUT = 160
"""Of a longer description of how the model is cut, the middle is omitted."""

LONG_EXPERTS = 12
LONG_NAME = 28
"""A terminal shows longer lists of experts, and names, without their middle."""

LEGEND = (
    "share: of the last merges while it trained, those with its work; silent: time since its last message. Tokens "
    "trained = merged + pending + discarded + lost with their learner, for each fragment."
)
MORE_LEGEND = (
    "behind: versions that its oldest fragment is behind; stale: versions between the base of its last contribution "
    "and the merge that used it; drained: told to leave the run; sent, received: since this syncer started; merge of: "
    "learners in the newest merge."
)

DISCARDED = {
    "overlap": "trained between a send and the update that replaced it",
    "missed": "for a round that was merged without it",
    "late": "received after its round, and the method drops late contributions",
    "outlier": "rejected by the screen for its norm",
    "not finite": "its round gave non-finite numbers",
    "twice in one round": "an earlier incarnation of its learner is in the round",
    UNMERGED: "discarded, since it was in flight or not sent when its learner finished or left",
    "version": "measured from a version that neither the learner nor the syncer holds",
}
"""Explanations of the ledger's reasons for discarded tokens."""


def view(status: dict[str, Any], *, wide: bool = False, whole_names: bool = False) -> Group:
    """A snapshot of the run as text. `status`: of `Driver.status` with the syncer's part, or `stored_status`."""
    lines: list[RenderableType] = [_headed(status["run"], _run(status))]
    if reason := status.get("waits_for"):
        lines.append(_headed("contributions wait with their learners", reason))
    if missing := status.get("missing_events"):
        lines.append(_headed(f"{missing} events could not be written", "free disk space on the syncer's machine"))
    store = status["store"]
    if _is_stored(status):
        lines.append(_headed("made from", _source(store)))
    elif store["is_shared"]:
        lines.append(_headed("this syncer is", _standing(store)))
    lines += [_headed(*order) for order in _orders(status["steering"] or {})]
    if not status["initialised"]:
        if store["standing"] == "serving":
            lines.append("no model yet: the run waits for a learner that initialises it")
        return Group(*lines)
    lines.append(shortened(printable(f"cut into {status['cut']}"), LONG_CUT))
    lines.append(printable(_participation(status)))
    if (fates := _fates([it["ledger"] for it in status["fragments"]])) is not None:
        lines.append(printable(f"trained tokens: {fates}"))
    lines += [printable(line) for line in _waiting(status["fragments"])]
    if status["experts"] is not None and (untrained := status["experts"]["untrained"]):
        lines.append(f"no live learner trains experts {numbers(untrained)}: nothing is merged into them")
    if status["data"] is not None:
        lines.append(printable(_data(status["data"])))
    if status["groups"] is not None:
        lines += _groups(status["groups"])
    learners = _learners(status, wide=wide, whole_names=whole_names)
    lines.append(learners if learners.row_count else "no learner is in the run")
    if wide:
        lines.append(_fragments(status))
    legend = printable(_legend(status, wide=wide))
    lines.append(Text("\n".join(textwrap.wrap(legend, LEGEND_COLUMNS)), style="dim"))
    return Group(*lines)


def write_page(status: dict[str, Any], page: Path) -> None:
    """Write a snapshot of the run as one HTML file.

    Raises:
        StoreError: the disk refuses.
    """
    console = Console(record=True, file=io.StringIO(), width=PAGE_COLUMNS, highlight=False, markup=False)
    console.print(view(status, wide=True, whole_names=True))
    with translated(OSError, StoreError, f"cannot write {page}", "choose another file with --out"):
        write_whole(page, console.export_html())


def _run(status: dict[str, Any]) -> str:
    tokens, budget = status["tokens"], status.get("budget_tokens")
    of = "" if budget is None else f" of {short(budget, 3)} ({_percent(min(tokens, budget), budget)})"
    if _is_stored(status):
        seen = "the run is over" if status["store"]["is_over"] else "no syncer was asked"
    else:
        seen = f"this syncer started {timedelta(seconds=round(status['uptime_s']))} ago"
    run = f"{status['method']['name']}, step {status['step']:,}, {short(tokens, 3)} tokens{of}"
    return f"{run}; epoch {status['epoch']}, {seen}"


def _is_stored(status: dict[str, Any]) -> bool:
    """Whether this is what a store has, without a syncer's word."""
    return status["uptime_s"] is None


def _source(store: dict[str, Any]) -> str:
    """What a page without a syncer is made from."""
    served = f"claimed by the syncer at {store['address'] or 'an unknown address'}, which may serve it"
    if store["standing"] == "released":
        served = "no syncer serves it"
    return (
        f"{store['place']}, manifest {store['serial']}, {served}. It has versions, members and tokens; open rounds, "
        "who is live, bytes, training losses and events are known to a syncer and its events.jsonl only"
    )


def _headed(head: str, text: str) -> Text:
    return Text.assemble((printable(head), "bold"), ": ", printable(text))


def _standing(store: dict[str, Any]) -> str:
    """What this syncer may do with the run in its bucket."""
    at = f" by {store['address']}" if store["address"] else ""
    answers = ", which does not answer" if store["is_refusing"] else ""
    return f"{store['standing']}; {store['place']}{answers}, was claimed{at} in epoch {store['epoch']}"


def _orders(steering: dict[str, Any]) -> list[tuple[str, str]]:
    """The orders of admins that are in force."""
    orders = [("the run is", steering[key]) for key in ("paused", "ended") if steering.get(key)]
    return [*orders, *(("out", why) for _, why in sorted(steering.get("out", {}).items()))]


def _participation(status: dict[str, Any]) -> str:
    """Live learners and the contributors of the newest merge; a difference hints at a fault."""
    learners = status["learners"].values()
    line = f"{len(learners)} in the run"
    if not _is_stored(status):
        line = f"{sum(it['live'] for it in learners)} live, {sum(it['healthy'] for it in learners)} healthy"
    merge = status["newest_merge"]
    if merge is None:
        return f"{line}; nothing merged yet"
    names = merge["contributors"]
    who = ", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} learners"
    part = "" if merge["scale"] == 1 else f", with {merge['scale']:.2f} of the live weight"
    return f"{line}; newest merge: version {merge['version']} of fragment {merge['fragment']} by {who}{part}"


def _groups(groups: dict[str, Any]) -> list[RenderableType]:
    """Groups of reinforcement learning, and who generates and scores them."""
    states = {"waiting": groups["waiting"], "leased": groups["leased"], **{end: groups[end] for end in ENDS}}
    found = " + ".join(f"{num:,} {state}" for state, num in states.items() if num)
    rewards = ", ".join(f"{task} {mean:.3f}" for task, mean in groups["rewards"].items())
    stale = ", ".join(f"{versions}: {num:,}" for versions, num in groups["staleness"].items())
    lines: list[RenderableType] = [
        printable(f"groups: {groups['acknowledged']:,} = {found or 0}; {groups['prompts']:,} prompts are generated"),
        printable(f"mean reward of the newest: {rewards or '–'}; groups by staleness: {stale or '–'}"),
    ]
    table = Table(box=SIMPLE, pad_edge=False)
    for head in ("worker", "role", "generated", "scored", "refused", "holds", "version"):
        table.add_column(head, justify="left" if head in ("worker", "role") else "right")
    for it in groups["workers"]:
        name = it["name"] if it["live"] else f"{it['name']} (absent)"
        numbers_ = (f"{it[key]:,}" for key in ("generated", "scored", "refused", "holds"))
        table.add_row(cell(name), it["role"], *numbers_, str(sum(it["versions"]) if it["versions"] else "–"))
    lines += [table] if groups["workers"] else []
    return [*lines, *(printable(f"{worker} was refused: {why}") for worker, why in groups["refusals"][-MAX_REASONS:])]


def _data(data: dict[str, Any]) -> str:
    """Leased data: finished passes, and the units of the passes under way."""
    of = "" if data["num_passes"] is None else f" of {data['num_passes']}"
    line = f"data: {data['passes_done']}{of} passes of {data['num_units']:,} units done"
    for it in data["passes"]:
        line += f"; pass {it['pass'] + 1}: {it['done']:,} done, {it['leased']:,} leased, {it['free']:,} free"
    repeated = sum(it["repeated"] for it in data["fragments"])
    lost = f" ({data['lost']:,} of them with versions that a repair lost)" if data["lost"] else ""
    return f"{line}; {data['returned']:,} returned{lost}, {repeated:,} merged into a fragment a second time"


def _waiting(fragments: Sequence[dict[str, Any]]) -> list[str]:
    """What the open rounds with contributions wait for."""
    reasons: dict[str, list[int]] = {}
    for it in fragments:
        if it["contributed"]:
            reasons.setdefault(it["reason"], []).append(it["fragment"])
    lines = [f"fragment {', '.join(map(str, which))}: {reason}" for reason, which in reasons.items()]
    return lines if len(lines) <= MAX_REASONS else [*lines[:MAX_REASONS], f"… and {len(lines) - MAX_REASONS} more"]


def _fates(ledgers: Sequence[dict[str, Any]]) -> str | None:
    """The shares of trained tokens by fate, over these fragments; None: nothing is trained yet."""
    trained = sum(it["trained"] for it in ledgers)
    if not trained:
        return None
    fates = Counter[str]()
    for it in ledgers:
        fates.update(merged=it["merged"], pending=it["pending"])
        for reason, tokens in sorted(it["discarded"].items()):
            fates[reason if reason == UNMERGED else f"discarded ({reason})"] += tokens
    fates["lost"] = sum(it["lost"] for it in ledgers)
    return ", ".join(f"{_percent(tokens, trained)} {fate}" for fate, tokens in fates.items() if tokens)


def _percent(part: int, whole: int) -> str:
    """A percentage; 0% and 100% are exact."""
    share = 100 * part / whole if whole else 0.0
    return "<1%" if 0 < share < 1 else ">99%" if 99 < share < 100 else f"{share:.0f}%"


def _learners(status: dict[str, Any], *, wide: bool, whole_names: bool) -> Table:
    """A row for each learner, in 80 columns; `wide`: more columns, and rows of learners that left."""
    num_bytes: dict[str, dict[str, dict[str, int]]] = status["num_bytes"]
    more = ("s/step", "tokens", "behind", "stale", "sent", "received") if wide else ()
    trains = ("experts",) if status["experts"] is not None else ()
    table = _table(("learner", "state"), ("step", "share", "silent", *trains, *more))
    for name, it in status["learners"].items():
        state = state_of(it) if not _is_stored(status) else "finished" if it["finished"] else "in the run"
        if state == "lost":
            state = f"lost, {it['given_up_in_s']:.0f} s left"
        shown = printable(name) if whole_names else shortened(printable(name), LONG_NAME)
        silent = f"{it['silent_s']:.1f} s" if it["heard"] else "?"
        share = "" if it["share"] is None else f"{it['share']:.0%}"
        row = [f"{it['step']:,}", share, silent]
        if trains:
            own = "?" if it["experts"] is None else numbers(it["experts"])
            row.append((own if whole_names else shortened(own, LONG_EXPERTS)) + "*" * it["holds_part"])
        if wide:
            step_s = "" if it["step_s"] is None else f"{it['step_s']:.2g}"
            behind, stale = ("" if it[key] is None else str(it[key]) for key in ("versions_behind", "staleness"))
            row += [step_s, short(it["tokens"], 3), behind, stale, *_traffic(num_bytes, name)]
        table.add_row(cell(shown), state, *row)
    if wide:
        for name in sorted(name for name in num_bytes if name not in status["learners"] and name != "viewers"):
            blank = [""] * (len(table.columns) - 4)
            table.add_row(cell(name), "gone", *blank, *_traffic(num_bytes, name))
    return table


def _traffic(num_bytes: dict[str, dict[str, dict[str, int]]], name: str) -> tuple[str, str]:
    """Bytes sent and received by a learner; a store has none."""
    if not num_bytes:
        return "", ""
    kinds = num_bytes.get(name, {}).values()  # counted by the syncer: what it received, the learner sent
    sent, received = (sum(kind.get(way, 0) for kind in kinds) for way in ("received", "sent"))
    return SIZE.show(sent), SIZE.show(received)


def _fragments(status: dict[str, Any]) -> Table:
    """A row for each fragment: its version, the fates of its tokens, and the state of its round."""
    table = _table(("fragment",), ("version", "merged", "pending", "discarded", "lost", "merge of"))
    table.add_column("now", overflow="fold")
    for it in status["fragments"]:
        ledger = it["ledger"]
        counts = (ledger["merged"], ledger["pending"], sum(ledger["discarded"].values()), ledger["lost"])
        merge = str(len(it["last_contributors"])) if it["version"] else ""
        shares = (_percent(count, ledger["trained"]) if ledger["trained"] else "" for count in counts)
        table.add_row(str(it["fragment"]), str(it["version"]), *shares, merge, cell(it["reason"]))
    return table


def _table(text_heads: tuple[str, ...], heads: tuple[str, ...]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for head in text_heads:
        table.add_column(head, no_wrap=True, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _legend(status: dict[str, Any], *, wide: bool) -> str:
    """Explanations of the columns, and of the reasons for discarded tokens that occur in this run."""
    reasons = sorted({reason for fragment in status["fragments"] for reason in fragment["ledger"]["discarded"]})
    explained = "".join(f" {reason}: {DISCARDED[reason]}." for reason in reasons if reason in DISCARDED)
    part = " *: it holds no other experts." if any(it["holds_part"] for it in status["learners"].values()) else ""
    return f"{LEGEND}{part}{explained}{f' {MORE_LEGEND}' if wide else ''}"
