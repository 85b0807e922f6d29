"""The text of dev/reliability.md, from the results that `benchmarks.reliability` keeps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from tests.chaos.invariants import INVARIANTS
from tests.chaos.measures import RECOVERIES
from tests.chaos.plan import LOST_S, kinds
from tests.chaos.roles import KINDS as FAULTS
from tests.chaos.standby import AND_REQUESTS, KINDS

from diloco.protocol.groups import ENDS

NOT_MEASURED = "not measured"

STORE_SINCE = "2026-11-27"
"""Day of the first results with the store of objects and a manifest."""

INTRODUCTION = """\
# Reliability

Faults that were injected into runs, and their results. `python -m benchmarks.reliability` writes this page from the
numbers in `benchmarks/results/`, which the commands below have left there. A fault is survived if versions were
published after it, and in the end every learner was in merges again. Times are of one machine, which other work shared.
"""


def page(results: dict[str, Any]) -> str:
    """The page, from results by name: lists of "chaos", "standby", "roles", "groups" and "storms"; "restart",
    "stopping", "floods", "control", "again", "fuzz" and "soak" may be absent; "made" says of each its name, commit and
    day."""
    parts = (
        INTRODUCTION, _summary(results), _real(results["chaos"]), _shared(results["standby"]),
        _roles(results["roles"]), _groups(results["groups"]), _virtual(results["storms"], results.get("again")),
        _recovery(results["chaos"]), _restart(results.get("restart")), _stopping(results.get("stopping")),
        _floods(results.get("floods")), _control(results.get("control")), _others(results),
        _made(results["made"]),
    )  # fmt: skip
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _summary(results: dict[str, Any]) -> str:
    chaos, standby, storms = (results[key] for key in ("chaos", "standby", "storms"))
    faults, survived = (sum(each[key] for each in chaos) for key in ("num_faults", "num_survived"))
    shared = sum(each["num_faults"] for each in standby)
    versions = sum(each["versions_published"] for each in chaos) + sum(sum(each["versions"]) for each in standby)
    num_storms = sum(each["storms"] for each in storms)
    virtual = sum(sum(each["faults"].values()) for each in storms)
    ledgers = [not each["invariants"]["every token is accounted for"] for each in chaos]
    rows = [
        ("faults of real processes, sockets and files", f"{faults:,} of 1,000", f"{survived:,} survived"),
        ("of two syncers over a bucket, or of the bucket", f"{shared:,} of 200", f"{shared:,} survived"),
        ("runs in virtual time", f"{num_storms:,} of 100,000", _failed(storms, results.get("again"))),
        ("faults in them", f"{virtual:,}", ""),
        ("published versions lost", f"of {versions:,}", str(sum(each["versions_lost"] for each in chaos))),
        ("published versions that were given up", "where the state was damaged or restored on purpose",
         f"{sum(each['versions_given_up'] for each in chaos):,}"),
        ("reported holdings compared by digest", f"{sum(each['holdings_compared'] for each in chaos):,}",
         f"{sum(len(each['invariants']['learners hold what was published']) for each in chaos)} foreign"),
        ("runs whose ledger adds up exactly", f"{sum(ledgers)} of {len(ledgers)}", ""),
        ("bad inputs tried", *_inputs(results.get("fuzz"))),
        ("longest soak", *_soaked(results.get("soak"))),
    ]  # fmt: skip
    return _table(("", "tried", "found"), rows)


def _failed(storms: Sequence[dict[str, Any]], again: dict[str, Any] | None) -> str:
    failed = _seeds_that_failed(storms)
    if again is None or again["tried"] != failed:
        return f"{len(failed)} failed"
    return f"{len(failed)} failed; tried again later, {len(again['failed'])} did"


def _inputs(fuzz: dict[str, Any] | None) -> tuple[str, str]:
    return (
        (NOT_MEASURED, "`make fuzz`") if fuzz is None else (f"{fuzz['tried']:,}", f"{fuzz['found']} defects of readers")
    )


def _soaked(soak: dict[str, Any] | None) -> tuple[str, str]:
    if soak is None:
        return NOT_MEASURED, "`make soak`"
    broken = [each for them in soak["invariants"].values() for each in them]
    found = "; ".join(broken) or "no leak, no stuck fragment, every token accounted for"
    return f"{soak['seconds'] / 3600:.2f} h", found


def _real(runs: Sequence[dict[str, Any]]) -> str:
    injected, survived = Counter[str](), Counter[str]()
    for run in runs:
        for kind, each in run["faults"].items():
            injected[kind] += each["injected"]
            survived[kind] += each["survived"]
    what = {kind.name: kind.what for kind in kinds(LOST_S)}
    rows = [(kind, what[kind], f"{injected[kind]:,}", f"{survived[kind]:,}") for kind in sorted(injected)]
    each = [
        (run["seed"], run["learners"], f"{run['seconds']:,.0f} s", run["num_faults"],
         f"{run['versions_published']:,}", run["versions_lost"], _percent(run["goodput"]["ratio"]),
         "yes" if run["holds"] else _broken(run))
        for run in runs
    ]  # fmt: skip
    heads = (
        "seed",
        "learners",
        "faults for",
        "faults",
        "versions",
        "lost",
        "goodput",
        "all invariants hold",
    )
    return f"""## Real faults

`python -m benchmarks.reliability chaos SEED --minutes M`, a run of `make chaos`. Goodput is tokens merged per second,
as a ratio to the part of the same run without faults. All processes share one machine, and a learner's start takes
seconds of its processor time. The invariants after a run:

{_invariants()}

{_table(heads, each)}
{_table(("fault", "what is done", "injected", "survived"), rows)}"""


def _shared(runs: Sequence[dict[str, Any]]) -> str:
    head = """## Two syncers

`python -m benchmarks.reliability standby SEED --faults K`, a run of `tests.chaos.standby`: two syncers as processes, a
bucket server, and two learners that train throughout. After each fault one syncer serves, the other one waits, and a
version is published. At the end no version is lost, none was published twice, one syncer served each epoch, no learner
was evicted, and each learner has the bits of a run in one process. A run in which one of these does not hold has no
result. During faults "with requests", the bucket also refuses requests, or executes them without an answer.
"""
    if not runs:
        return f"{head}\n{NOT_MEASURED}.\n"
    each = [
        (run["seed"], run["num_faults"], f"{run['seconds']:,.0f} s", sum(run["versions"]), 0, run["epoch"])
        for run in runs
    ]
    tried = sum((Counter(run["faults"]) for run in runs), Counter[str]())
    rows = [
        (kind, " ".join((does.__doc__ or "").split()).removesuffix("."), tried[kind], tried[f"{kind}{AND_REQUESTS}"])
        for kind, (_, does) in sorted(KINDS.items())
    ]  # fmt: skip
    times = defaultdict[str, list[float]](list)
    for kind, seconds in (takeover for run in runs for takeover in run["takeovers"]):
        times[kind].append(seconds)
    taken = [(kind, len(them), f"{median(them):.2f} s", f"{max(them):.2f} s") for kind, them in sorted(times.items())]
    leases = ", ".join(f"{each:g} s" for each in sorted({run["lease_s"] for run in runs}))
    return f"""{head}
{_table(("seed", "faults", "for", "versions", "lost", "epochs"), each)}
{_table(("fault", "what is done", "tried", "with requests"), rows)}
Time from the fault until the standby serves, with a lease of {leases}, with and without further faults:

{_table(("takeover after", "times", "median", "worst"), taken)}"""


def _roles(runs: Sequence[dict[str, Any]]) -> str:
    head = """## Roles of reinforcement learning

`python -m benchmarks.reliability roles SEED --faults K`, a run of `tests.chaos.roles`: a syncer, two trainers, two
rollout workers and two reward workers as processes, with a tiny model. Faults come one after the other, or two at once.
After each fault, every acknowledged group is in exactly one state in one status, no count is lower than before, more
groups are merged, each process that was hit works again, and none has ended by itself. Freezes are shorter or longer
than `lost_floor_s`, after which the syncer drops a silent worker.
"""
    if not runs:
        return f"{head}\n{NOT_MEASURED}.\n"
    each = [
        (run["seed"], run["num_faults"], f"{run['seconds']:,.0f} s", run["versions"],
         *(f"{run['groups'][state]:,}" for state in ("acknowledged", *ENDS)), "; ".join(run["violations"]) or "none")
        for run in runs
    ]  # fmt: skip
    tried: dict[str, Counter[str]] = {kind: Counter() for kind in FAULTS}
    for run in runs:
        for kind, by_role in run["faults"].items():
            tried[kind].update(by_role)
    roles = ("syncer", "trainer", "rollout", "reward")
    waits = sorted(wait for run in runs for wait in run["waits_s"])
    return f"""{head}
{_table(("seed", "faults", "for", "versions", "groups", *ENDS, "violations"), each)}
{_table(("fault", *roles), [(kind, *(num[role] for role in roles)) for kind, num in tried.items()])}
Time from the end of a fault until all processes that were hit work again, including the start of Python and torch:
median {median(waits):.1f} s, worst {waits[-1]:.1f} s.
"""


def _groups(runs: Sequence[dict[str, Any]]) -> str:
    num, events, failed = (sum(run[key] for run in runs) for key in ("storms", "events", "failed"))
    found = f"{num:,} storms with {events:,} events, {failed} failed" if num else NOT_MEASURED
    return f"""`python -m benchmarks.reliability groups FIRST-LAST`, storms of the state machine of groups alone
(`tests.protocol.group_storms`), which count all groups after each event: {found}.
"""


def _invariants() -> str:
    return "".join(f"- {name}: {' '.join((holds.__doc__ or '').split())}\n" for name, holds, _ in INVARIANTS)


def _broken(run: dict[str, Any]) -> str:
    return "no: " + ", ".join(name for name, broken in run["invariants"].items() if broken)


def _percent(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{ratio:.0%}"


def _virtual(runs: Sequence[dict[str, Any]], again: dict[str, Any] | None) -> str:
    faults = Counter[str]()
    for run in runs:
        faults.update(run["faults"])
    each = [
        (_seeds(run), f"{run['storms']:,}", f"{run['storms'] / run['seconds']:.1f}", run["processes"],
         len(run["failed"]))
        for run in runs
    ]  # fmt: skip
    return f"""## Virtual time

`python -m benchmarks.reliability storms FIRST-LAST`: whole runs of the same driver, sessions and state machines in
virtual time, each with a method, learners and up to six faults drawn from its seed. Every event is checked.

{_table(("seeds", "runs", "runs a second", "processes", "failed"), each)}
{_again(runs, again)}

{_table(("fault", "happened"), [(kind, f"{number:,}") for kind, number in sorted(faults.items())])}"""


def _again(runs: Sequence[dict[str, Any]], again: dict[str, Any] | None) -> str:
    failed = _seeds_that_failed(runs)
    if again is None or again["tried"] != failed:
        return f"`python -m benchmarks.reliability again`, those that failed on a later commit: {NOT_MEASURED}."
    still = ", ".join(map(str, again["failed"]))
    return (
        f"`python -m benchmarks.reliability again`: of the {len(failed)} that failed, {len(again['failed'])} "
        f"{f'({still}) ' if still else ''}fail on the commit of `again` in the last table."
    )


STORMS = {
    "leased": "leased data",
    "standby": "two syncers",
    "goes_back": "a run that goes back",
    "steered": "an operator's orders",
    "parts": "parts of a mixture",
    "held": "held parts of a mixture",
}
"""Of storms, by their names in results."""


def _seeds_that_failed(runs: Sequence[dict[str, Any]]) -> list[int]:
    return sorted(int(text.removeprefix("seed ").partition(":")[0]) for run in runs for text in run["failed"])


def _seeds(run: dict[str, Any]) -> str:
    named = [f", {words}" for kind, words in STORMS.items() if run.get(kind)]
    return f"{run['first']} to {run['first'] + run['storms'] - 1}{''.join(named)}"


def _recovery(runs: Sequence[dict[str, Any]]) -> str:
    rows = []
    for key, what in RECOVERIES.items():
        measured = [run for run in runs if run["recovery"].get(key) is not None]
        found = [run["recovery"][key] for run in measured]
        due = "two step times and the deadline" if key == "survivor" else ""
        if due and measured:
            num_met = sum(run["recovery"][key]["worst"] <= run["survivor_bound_s"] for run in measured)
            due += f"; the worst met it in {num_met} of {len(found)} runs"
        num = sum(each["num"] for each in found)
        medians = sorted(each["median"] for each in found for _ in range(each["num"]))
        median = f"{medians[len(medians) // 2]:.2f} s" if num else NOT_MEASURED
        rows.append((what, num, median, f"{max(each['worst'] for each in found):.2f} s" if num else "", due))
    bounds = [run["survivor_bound_s"] for run in runs if run["survivor_bound_s"] is not None]
    bound = f"The bound of a survivor's next version was {min(bounds):.2f} to {max(bounds):.2f} s." if bounds else ""
    return f"""## Recovery times

From the runs of chaos, if nothing else hit the process meanwhile. The median is over the runs' medians, each counted as
often as it was measured. The start of a process includes that of Python and torch. {bound}

{_table(("", "times", "median", "worst", "goal"), rows)}"""


def _restart(rows: Sequence[dict[str, Any]] | None) -> str:
    head = """## A syncer's restart

`python -m benchmarks.reliability restart`: the time from a start, after `kill -9` and with the files out of the
system's cache, until a viewer has its answer, and until a whole model is fetched. Sizes are in fp32. The first line is
the start-up of Python and torch; the goal is 2 s per GB beyond it.
"""
    if rows is None:
        return f"{head}\n{NOT_MEASURED}.\n"
    start_s = rows[0]["serves_s"]
    table = [
        (f"{row['model_gb']:.2f} GB", row["times"], f"{row['serves_s']:.2f} s", f"{row['worst_s']:.2f} s",
         *(("", "") if row is rows[0] else _per_gb(row, start_s)), f"{row['pulled_s']:.2f} s")
        for row in rows
    ]  # fmt: skip
    heads = (
        "model", "times", "serves after (median)", "worst", "s per GB (median)", "worst", "whole model fetched after",
    )  # fmt: skip
    return f"{head}\n{_table(heads, table)}"


def _per_gb(row: dict[str, Any], start_s: float) -> tuple[str, str]:
    return f"{row['s_per_gb']:.2f}", f"{(row['worst_s'] - start_s) / row['model_gb']:.2f}"


BLOCKED = {
    "round": "a round that waits for another learner",
    "lease": "a lease of data, over a network that takes nothing",
    "join": "the syncer's answer when it joins",
    "push": "a push, over a network that takes nothing",
}


def _stopping(rows: Sequence[dict[str, Any]] | None) -> str:
    head = """## Stopping a blocked learner

`python -m benchmarks.reliability stopping`: the time from SIGTERM to a blocked `diloco train` until the checkpoint of
its last step has its final name, and until its process has ended. The goal is 1 s for both.
"""
    if rows is None:
        return f"{head}\n{NOT_MEASURED}.\n"
    keys = ("saved_s", "saved_worst_s", "gone_s", "gone_worst_s")
    table = [(BLOCKED[row["place"]], row["times"], *(f"{row[key]:.2f} s" for key in keys)) for row in rows]
    heads = ("it waits for", "times", "saved after (median)", "worst", "ended after (median)", "worst")
    return f"{head}\n{_table(heads, table)}"


def _floods(rows: Sequence[dict[str, Any]] | None) -> str:
    head = """## Hostile senders

`python -m benchmarks.reliability floods`: a sender tries ten times the load that once stopped a syncer or took
gigabytes of its memory, beside a run of two learners. The syncer is reached directly, or behind HAProxy configured as
in [templates/haproxy](../templates/haproxy/haproxy.cfg). The sender has an address of its own, by which the proxy
counts (`python -m benchmarks.floods --same-address` is not measured).

The table has what the sender tried and what it reached: the most that was open at a time, the bytes sent, and how many
of the dialled connections were ended. Noise is the difference of two windows without a flood. "processor" is the
syncer's processor time in seconds per second, under the flood and (without it); "proxy's" is the proxy's under the
flood. Handles are the syncer's maximum.

The goals behind the proxy, for a sender without a certificate, are a loss of at most 2 % of the goodput, within the
noise, and 200 MB. A sender with a certificate passes the proxy and takes processor time as its link allows: gRPC reads
headers without an end ([threat model](../docs/security-model.md#limits-against-floods)). Here no link is in between,
and the sender shares two cores with the proxy, the syncer and other work, so it takes time from the syncer too.
"""
    if rows is None:
        return f"{head}\n{NOT_MEASURED}.\n"
    table = [
        (row["flood"], *("yes" if row[key] else "no" for key in ("proxy", "certificate")), f"{row['size']:,}",
         *_reached(row["outcome"]), f"{row['goodput']:.1%}", f"{row['noise']:.1%}",
         "{:.2f} ({:.2f})".format(*row["processor"]), f"{row['proxy_processor']:.2f}" if row["proxy"] else "",
         f"{row['memory_mb']:+.0f} MB", f"{row['num_files']:,}", "goes on" if row["survived"] else "ended")
        for row in rows
    ]  # fmt: skip
    titles = (
        "flood", "proxy", "certificate", "tried", "most open", "sent", "dialled", "ended", "goodput",
        "noise", "processor", "proxy's", "memory", "handles", "the run",
    )  # fmt: skip
    return f"{head}\n{_table(titles, table)}"


def _reached(outcome: dict[str, Any]) -> tuple[str, ...]:
    sent = f"{outcome['sent_bytes'] / 1e6:,.1f} MB"
    return f"{outcome['most_open']:,}", sent, f"{outcome['num_dialled']:,}", f"{outcome['num_ended']:,}"


def _control(result: dict[str, Any] | None) -> str:
    head = """## Control beside bulk

`python -m benchmarks.reliability control`: the time from a heartbeat of a real learner to its answer, over a link
between two network namespaces, while contributions and updates fill it in both directions, and without them. The goals
are answers within the lost deadline and no eviction.
"""
    if result is None:
        return f"{head}\n{NOT_MEASURED}.\n"
    table = [
        (f"{row['queue_ms']} ms", "yes" if row["bulk"] else "no", row["heartbeats"], f"{1e3 * row['median_s']:.0f} ms",
         f"{1e3 * row['worst_s']:.0f} ms", f"{1e3 * row['lost_s']:,.0f} ms", row["unanswered"], row["evictions"],
         f"{row['up']:.0%}", f"{row['down']:.0%}")
        for row in result["rows"]
    ]  # fmt: skip
    heads = (
        "queues before the link", "bulk", "heartbeats", "median", "worst", "deadline", "unanswered", "evictions",
        "link used up", "down",
    )  # fmt: skip
    its = result["machine"]
    machine = f"{its['cores']} cores at a load of {its['load']}"
    where = f"{result['learners']} learners over {result['rate']} each way, on {machine}:"
    return f"{head}\n{where}\n\n{_table(heads, table)}"


def _others(results: dict[str, Any]) -> str:
    resumed = [run["bytes_resumed"] for run in results["chaos"] if run.get("bytes_resumed") is not None]
    number = f"{sum(resumed):,} bytes" if resumed else NOT_MEASURED
    return f"""## Transfers

Bytes of cut transfers that were resumed and not sent again, in the runs of chaos: {number}.
"""


def _made(made: Sequence[Sequence[str]]) -> str:
    rows = [(*each, "the present one" if each[-1] >= STORE_SINCE else "an earlier one") for each in made]
    return f"""## Commits and dates

The files of `benchmarks/results`, each with the measured commit. Results with an earlier store say nothing about the
present store: neither its faults and repairs, nor restarts of the syncer, nor the fuzzing of its files.

{_table(("result", "commit", "day", "store"), rows)}"""
