"""`report.html`: one self-contained page with the demo's numbers and pictures."""

from __future__ import annotations

import html
from collections import Counter
from pathlib import Path
from typing import Any

from diloco.demo.plots import bytes_chart, loss_chart
from diloco.demo.served import PROMPT
from diloco.demo.story import DemoResult
from diloco.demo.timeline_chart import timeline_chart
from diloco.planning.pages import page, table, values_table

STYLE = """
.cards{display:grid;grid-template-columns:repeat(3,1fr);gap:.8rem;margin:1.4rem 0}
.card{border:1px solid #e5e7eb;border-radius:10px;padding:.8rem 1rem}
.card b{display:block;font-size:1.7rem;line-height:1.3}
.card span{color:#6b7280;font-size:.85rem;line-height:1.35;display:block}
pre{background:#f6f8fa;border-radius:8px;padding:.9rem;font-size:.85rem;white-space:pre-wrap;overflow-wrap:anywhere}
pre b{color:#1f6feb}
@media(max-width:640px){.cards{grid-template-columns:repeat(2,1fr)}}
"""


def write_report(path: Path, outcome: DemoResult, summary: dict[str, Any]) -> None:
    """Write the page; nothing in it is loaded from elsewhere."""
    path.write_text(page("diloco demo", _body(outcome, summary), STYLE), encoding="utf-8")


def _body(outcome: DemoResult, summary: dict[str, Any]) -> str:
    config, timeline = outcome.config, outcome.timeline
    full = config.tokens_per_full_step
    return f"""<h1>One model, three learners{", a kill" if summary["kills_survived"] else ""}</h1>
<p class="lead">A byte-level language model of {summary["num_parameters"]:,} parameters learns the source text of
Python's standard library. One learner warms up alone for {config.warm_start.steps} steps and initialises the run; two
more join, and the three exchange 4-bit outer gradients through a syncer. {_killed(summary)} The yardstick is data
parallel on the same {summary["baseline_tokens"]:,} tokens with the same total batch.</p>
<div class="cards">{_cards(summary)}</div>
<h2>Loss</h2>
<p>On held-out files; of the global model, never of one learner's own.{_isolated_note(summary)}</p>
{loss_chart(timeline, full, (outcome.served.tokens, outcome.global_loss))}
<h2>Bytes on the wire</h2>
<p>{_counted(summary)} Data parallel would have needed a ring all-reduce in bf16 at every step: 2·(m−1)/m·2·N bytes a
learner and step, over the steps in which m ≥ 2 learners trained. The warm start costs neither of them anything.</p>
{bytes_chart(summary)}
<h2>Who took part</h2>
<p>A row per process. A band is a learner's presence in the run, a tick a merge that it is in;
<b style="color:#dc2626">✖</b> is a <code>kill -9</code>, <b style="color:#16a34a">▶</b> the return. In the syncer's row
every merge is a tick, and <b style="color:#d97706">amber</b> where a planned learner is missing from it.</p>
{timeline_chart(timeline)}
{_participation(summary)}
<h2>Where the tokens went</h2>
<p>Per fragment, every token that was trained after the warm start is merged into the global model, or accounted for
otherwise: overwritten while an answer was on its way, lost with a learner that was killed or left before its next
exchange, or pending.</p>
{_ledger(summary)}
<h2>What the model writes</h2>
<pre><b>{html.escape(PROMPT)}</b>{html.escape(outcome.sample)}</pre>
<h2>The method, resolved</h2>
{values_table(summary["method"])}
<h2>How it was measured</h2>
<p>The syncer, the learners and the controls were separate processes on this machine, one torch thread each, joined by
loopback. All losses are means over the same {config.evaluate.sequences} held-out sequences of
{config.data.sequence_length} bytes. The final loss is that of the model which the syncer served when the run was over;
the curve before it was evaluated by learner-0 on the global model it held. The baseline sees the union of the learners'
data in the same order, with the same seed and schedule. The isolated learner starts from the same warm-started model
and makes as many steps as the longest learner of the run. Seed {summary["seed"]}; it took {summary["seconds"]:.0f} s.
The same numbers are in <code>summary.json</code>, every event in the <code>events.jsonl</code> files.</p>"""


def _killed(summary: dict[str, Any]) -> str:
    if not summary["killed"]:
        return "No process was killed."
    counts = Counter(summary["killed"])
    names = ", ".join(name if number == 1 else f"{name} ({number} times)" for name, number in counts.items())
    return f"Killed with <code>kill -9</code> on the way, and back: {html.escape(names)}."


def _cards(summary: dict[str, Any]) -> str:
    isolated, kills, gap = summary["isolated_loss"], summary["kills_survived"], summary["loss_gap_percent"]
    alone = "a learner that never communicates" if isolated is not None else "no isolated learner with --quick"
    cards = [
        (f"{summary['global_loss']:.3f}", "held-out loss of the global model, nats per byte"),
        (f"{summary['baseline_loss']:.3f}", f"data parallel; the global model is at {gap:+.1f} %"),
        (f"{summary['bytes_ratio']:.0f}×", "fewer bytes on the wire than data parallel, joins included"),
        ("–" if isolated is None else f"{isolated:.3f}", alone),
        (f"{kills}", "process killed, and back" if kills == 1 else "times a process was killed, and back"),
        (f"{summary['merges']}", "merges of a fragment"),
    ]
    return "".join(f'<div class="card"><b>{number}</b><span>{text}</span></div>' for number, text in cards)


def _isolated_note(summary: dict[str, Any]) -> str:
    if summary["isolated_loss"] is None:
        return ""
    return (
        " The isolated learner goes on alone after the warm start, on a third of the tokens: its curve is drawn at the "
        "run's step."
    )


def _counted(summary: dict[str, Any]) -> str:
    if summary["counted_on"] == "sockets":
        return "Counted by the kernel on the syncer's sockets, framing and retransmissions included."
    return "Message sizes as the learners counted them, without framing: this system does not count bytes per socket."


def _participation(summary: dict[str, Any]) -> str:
    rows = []
    for name, share in summary["participation"].items():
        steps, blocked_s = summary["learner_steps"].get(name, 0), summary["blocked_s"].get(name, 0.0)
        rows.append((name, f"{100 * share:.0f} %", f"{steps:,}", f"{blocked_s:.1f}"))
    note = "Blocked seconds are of the learner's last process. They include waiting for a processor."
    return table(("learner", "in merges", "at step", "seconds blocked"), rows) + f'<p class="note">{note}</p>'


def _ledger(summary: dict[str, Any]) -> str:
    rows = []
    for index, ledger in enumerate(summary["ledger"]):
        tokens = (ledger["trained"], ledger["merged"], sum(ledger["discarded"].values()), ledger["lost"])
        shown = (f"{each:,}" for each in (*tokens, ledger["pending"]))
        rows.append((f"fragment {index}", f"{summary['versions'][index]}", *shown))
    return table(("", "version", "trained", "merged", "overwritten", "lost", "pending"), rows)
