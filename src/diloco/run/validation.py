"""Bounds for the reports of learners, checked before a number is used.

The bounds are orders of magnitude beyond any training: they catch an overflow, a wrong sign or a wrong unit. They
cannot distinguish a dishonest learner from one that trained alone for days, or resumed a checkpoint. Values that a
message states twice must agree. Each check raises PayloadError, with one sentence for the sender.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, get_args

from diloco.errors import CorruptPayloadError, LayoutError, PayloadError
from diloco.escaping import MAX_REASON, printable
from diloco.protocol.contribution import OVERLAP, Contribution
from diloco.protocol.groups import Made
from diloco.protocol.leases import Ask
from diloco.protocol.manifest import MOST_FRAGMENTS
from diloco.protocol.members import Report
from diloco.protocol.steering import OF_A_LEARNER, Order, What
from diloco.protocol.units import Ranges, is_set
from diloco.protocol.workers import Work
from diloco.run.ports import InitialModel

MAX_AHEAD = 10**8
"""Inner steps by which one message may advance a run: a hundred a second for eleven days. If the bound were on the step
itself, one learner could reach it, and all others, which start at the run's step, would be refused."""

MAX_INITIAL_STEP = 10**10
"""Inner steps that a model was trained for before the run."""

MAX_TOKENS = 10**15
"""Tokens that one incarnation of a learner trains, and that a model was trained on before."""

MAX_LATER = 2**20
"""Joins of a learner since the state that a run was taken back to."""

MAX_STEP_S = 10.0**6
"""Seconds that an inner step takes: eleven days."""

MAX_BLOCKED_S = 10.0**9
"""Seconds that a process has waited for answers: thirty years."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A learner's id, and the name of a key: safe in a file's name, a terminal, a page and a metric's label."""

MAX_WHY = 200
"""Characters of an order's reason, and of the operator's name."""

MAX_SOURCE = 200
"""Characters of a model's source, or of a digest."""


RUN_ID = re.compile(r"[0-9a-f]{32}")

MAX_EPOCH = 2**53
"""Starts of a syncer on one state, or seconds of Unix time: every number in a database and in JSON is exact."""


MAX_UNIT = 2**53
"""Units of data, over all passes."""

MAX_GROUPS = 4096
"""Groups, or rewards of one, in a message."""

MAX_TASK = 64
"""Characters of a task's name."""

MAX_STALENESS = 100
"""Versions that a group may be old."""

MAX_RANGES = 2**15
"""Ranges of units in one message: more than the inner steps between two contributions, each of which reads a few."""


def check_name(learner: str) -> None:
    """Check a learner's id."""
    if not NAME.fullmatch(learner):
        raise PayloadError(
            f"a learner cannot be called {learner[:64]!r}{'...' if len(learner) > 64 else ''}; use 1 to 64 letters, "
            "digits, dots, dashes and underscores, the first one a letter or digit."
        )


def check_order(order: Order, by: str) -> None:
    """Check an operator's order, and the operator's name."""
    if order.what not in get_args(What):
        raise PayloadError(f"there is no order {order.what[:64]!r}; orders are {', '.join(get_args(What))}.")
    if order.what in OF_A_LEARNER:
        check_name(order.learner)
    elif order.learner:
        raise PayloadError(
            f"the order {order.what!r} concerns no learner, but names {order.learner[:64]!r}; name none."
        )
    if order.bans and order.what != "evict":
        raise PayloadError(f"only the order 'evict' may have bans, not {order.what!r}; evict or drain the learner.")
    for text in (order.reason, by):
        if len(text) > MAX_WHY or not text.isprintable():
            raise PayloadError(f"an order has {len(text)} characters of reason; use at most {MAX_WHY} printable ones.")


def check_incarnation(learner: str, incarnation: int, known: int) -> None:
    """Check the last incarnation that a joining learner claims, which may be later than the newest known one."""
    if not 0 <= incarnation <= known + MAX_LATER:
        raise PayloadError(f"{learner!r} was never incarnation {incarnation}: the newest known one is {known}.")


def check_step_size(learner: str, tokens_per_step: int | None) -> None:
    """Check the step size that a learner declares when it joins; None: it declares none."""
    _within(learner, "tokens in an inner step", tokens_per_step or 0, MAX_TOKENS)


def check_deal(learner: str, size: int, num_groups: int) -> None:
    """Check the number of groups of experts that a learner asks for."""
    if not 1 <= size <= num_groups:
        raise PayloadError(
            f"{learner!r} asks for {size} groups of experts, and the run's method makes {num_groups}; give the learner "
            "the run file of its syncer."
        )


def check_held(learner: str, held: Sequence[int] | None, trunk: Sequence[int], num_fragments: int) -> None:
    """Check the fragments that a learner says it holds; None: all of them.

    Arguments:
        trunk: fragments without experts, which all learners hold.
        num_fragments: of the run.
    """
    if held is None:
        return
    if list(held) != sorted(set(held)) or not all(0 <= fragment < num_fragments for fragment in held):
        raise PayloadError(
            f"{learner!r} holds the fragments {list(held)[:20]}; name each once, in ascending order, from 0 to "
            f"{num_fragments - 1}."
        )
    if not trunk or (missing := set(trunk).difference(held)):
        raise PayloadError(
            f"{learner!r} holds the fragments {list(held)[:20]} of the run, and not all of its trunk "
            f"({sorted(missing) if trunk else 'it has none'}); a learner may leave out groups of experts only."
        )


def check_report(
    learner: str, report: Report, num_fragments: int, run_step: int, tokens_per_step: int | None
) -> None:  # fmt: skip
    """Check a heartbeat.

    Arguments:
        run_step: the highest inner step known.
        tokens_per_step: the step size that the learner declared; None: it declared none.
    """
    check_step(learner, report.step, run_step)
    _within(learner, "inner steps of its own", report.steps, report.step)
    _within(learner, "trained tokens", report.tokens, MAX_TOKENS)
    _within_steps(learner, report.tokens, report.steps, tokens_per_step)
    _check_tokens(learner, report.earlier_tokens, run_step, tokens_per_step)
    step_s = report.step_s
    if step_s is not None and not (math.isfinite(step_s) and 0 <= step_s <= MAX_STEP_S):
        raise PayloadError(f"{learner!r} reports {step_s} s for an inner step; report 0 to {MAX_STEP_S:g} seconds.")
    check_versions(learner, report.blocked_with, num_fragments)
    if len(report.confirmed) not in (0, num_fragments):
        raise PayloadError(
            f"{learner!r} confirms contributions to {len(report.confirmed)} fragments, and the run has "
            f"{num_fragments}; confirm all or none."
        )
    _check_blocked(learner, report)


def check_goodbye(learner: str, report: Report, run_step: int, tokens_per_step: int | None) -> None:
    """Check the report of a learner that leaves. The number of its steps may not be known. Arguments as in
    `check_report`."""
    check_step(learner, report.step, run_step)
    for tokens in (report.tokens, report.earlier_tokens):
        _check_tokens(learner, tokens, run_step, tokens_per_step)
    _check_blocked(learner, report)


def _check_blocked(learner: str, report: Report) -> None:
    if not 0 <= report.blocked_s <= MAX_BLOCKED_S:  # nor NaN
        raise PayloadError(f"{learner!r} was blocked for {report.blocked_s} s; report 0 to {MAX_BLOCKED_S:g} seconds.")


def _check_tokens(learner: str, tokens: int, run_step: int, tokens_per_step: int | None) -> None:
    """Check a count of tokens. `tokens_per_step`: as the learner declared; None: it did not."""
    _within(learner, "trained tokens", tokens, MAX_TOKENS)
    _within_steps(learner, tokens, run_step + MAX_AHEAD, tokens_per_step)


def check_step(learner: str, step: int, run_step: int) -> None:
    """Check an inner step. `run_step`: as in `check_report`."""
    _within(learner, "inner steps", step, run_step + MAX_AHEAD)


def check_forward(learner: str, steps: int, before: int) -> None:
    """Check that an incarnation's own steps do not run back. Its inner step may: it begins at the run's.

    Arguments:
        before: what its newest heartbeat said.
    """
    if steps < before:
        raise PayloadError(
            f"{learner!r} has taken {steps} inner steps of its own and had taken {before} before; a learner that goes "
            "back to a checkpoint joins again."
        )


def check_versions(learner: str, versions: Sequence[int], num_fragments: int) -> None:
    """Check that a learner names versions of no more fragments than there are. Versions newer than the run's are those
    of a syncer that was taken back to an earlier state; they are shown and no more."""
    if len(versions) > num_fragments:
        raise PayloadError(f"{learner!r} has versions of {len(versions)} fragments, and the run has {num_fragments}.")


def check_contribution(c: Contribution, run_step: int, tokens_per_step: int | None) -> None:
    """Check a contribution on its own; `SyncerCore` checks its round and base. `tokens_per_step`: as in
    `check_report`."""
    if c.number < 1:
        raise PayloadError(
            f"{c.learner!r} numbers a contribution {c.number}; number those to each fragment 1, 2, 3, ..."
        )
    check_step(c.learner, c.step, run_step)
    _within(c.learner, "steps of work", c.steps, c.step)
    _within(c.learner, "trained tokens", c.trained, MAX_TOKENS)
    _within(c.learner, "tokens, those discarded included", c.accounted, c.trained)
    _within_steps(c.learner, c.tokens, c.steps, tokens_per_step)
    _within_steps(c.learner, c.trained, c.step, tokens_per_step)
    reasons = [reason for reason, _ in c.discarded]
    if reasons not in ([], [OVERLAP]):
        raise PayloadError(
            f"{c.learner!r} discards tokens as {', '.join(map(repr, reasons))}; a learner discards as {OVERLAP!r}, "
            "once."
        )
    _check_units(c.learner, c.units)
    _check_units(c.learner, c.overwritten)
    _within(c.learner, "tokens routed to an expert", max(c.routed or (0,)), MAX_TOKENS)
    if c.tensors is not None and list(c.tensors) != sorted(set(c.tensors)):
        raise PayloadError(f"{c.learner!r} trains the tensors {list(c.tensors)}; name each once, in ascending order.")


def check_ask(learner: str, ask: Ask) -> None:
    """Check a request for a lease on its own; `Leases` checks it against the others."""
    data = ask.data
    _within(learner, "units of data in all passes", data.num_units * max(1, data.passes), MAX_UNIT)
    _within(learner, "tokens in a unit of data", data.unit_tokens, MAX_TOKENS)
    if not _is_digest(data.digest):
        raise PayloadError(
            f"{learner!r} identifies its data with {data.digest[:MAX_SOURCE]!r}; use 1 to {MAX_SOURCE} letters and "
            "digits."
        )
    if (rules := data.groups) is not None:
        numbers = rules.vocab_size, rules.group_size, rules.max_prompt_tokens, rules.max_tokens, rules.queue
        is_plausible = all(0 < each <= MAX_UNIT for each in numbers) and 2 <= rules.group_size <= MAX_GROUPS
        if not is_plausible or rules.max_staleness > MAX_STALENESS or not _is_digest(rules.digest):
            raise PayloadError(f"{learner!r} has invalid rules of groups ({rules}); use the syncer's diloco version.")
    for units in ask.claim:
        _check_units(learner, units)


def check_work(work: Work) -> None:
    """Check a worker's message on its own."""
    check_name(work.worker)
    _within(work.worker, "as the order of its message", work.order, MAX_UNIT)
    _within(work.worker, "wanted groups", work.wants, MAX_GROUPS)
    numbers = [*work.holds, *(score.number for score in work.scores)]
    texts = [score.reason for score in work.scores]
    if len(numbers) + len(texts) > 4 * MAX_GROUPS or not all(0 <= number <= MAX_UNIT for number in numbers):
        raise PayloadError(f"{work.worker!r} sends {len(numbers)} numbers of groups; send at most {MAX_GROUPS}.")
    if not all(len(text) <= MAX_REASON and text.isprintable() for text in (*texts, work.digest)):
        raise PayloadError(f"{work.worker!r} sends a reason of more than {MAX_REASON} printable characters.")
    if not all(len(score.rewards) <= MAX_GROUPS for score in work.scores):
        raise PayloadError(f"{work.worker!r} sends more than {MAX_GROUPS} rewards of one group.")


def check_made(worker: str, made: Made) -> None:
    """Check the description of a group on its own."""
    check_name(worker)
    _within(worker, "as the number of its group", made.number, MAX_UNIT)
    _within(worker, "tokens of its group", made.num_tokens, MAX_TOKENS)
    texts = made.task, made.weights, made.digest
    is_short = len(made.rewards) <= MAX_GROUPS and len(made.versions) <= MOST_FRAGMENTS
    if not all(0 < len(text) <= MAX_TASK and text.isprintable() for text in texts) or not is_short:
        said = ", ".join(printable(text, MAX_SOURCE) for text in texts)
        raise PayloadError(f"{worker!r} describes group {made.number} by {said}; use the syncer's version of diloco.")


def _is_digest(text: str) -> bool:
    return 0 < len(text) <= MAX_SOURCE and text.isascii() and text.isalnum()


def _check_units(learner: str, units: Ranges) -> None:
    if len(units) > MAX_RANGES or not is_set(units) or (units and units[-1][1] > MAX_UNIT):
        raise PayloadError(
            f"{learner!r} names {len(units)} ranges of units of data that are not sorted and disjoint, more than "
            f"{MAX_RANGES}, or beyond {MAX_UNIT}; nothing of it was counted."
        )


def check_size(c: Contribution, num_bytes: int, expected_bytes: int, num_tensors: int) -> None:
    """Check that a contribution has the exact size of its fragment and codec, or no bytes if its learner trains no
    tensor of the fragment, and describes only its fragment's tensors.

    Raises:
        CorruptPayloadError: another size. LayoutError: there is no such tensor, or there are others.
    """
    expected_bytes = 0 if c.is_empty else expected_bytes
    if num_bytes != expected_bytes:
        raise CorruptPayloadError(
            f"a contribution to fragment {c.fragment} has {expected_bytes} bytes, not {num_bytes}; encode it with "
            "the run's codec."
        )
    for index in c.tensors or ():
        if not 0 <= index < num_tensors:
            raise LayoutError(
                f"fragment {c.fragment} has tensors 0 to {num_tensors - 1}, not {index}; use the run's layout."
            )
    if c.routed is not None and len(c.routed) != num_tensors:
        raise LayoutError(
            f"fragment {c.fragment} has {num_tensors} tensors, and {c.learner!r} reports the tokens routed to "
            f"{len(c.routed)}; use the run's layout."
        )


def check_span(c: Contribution, span: tuple[int, int], num_bytes: int) -> None:
    """Check that a part of a contribution is within it.

    Raises:
        CorruptPayloadError: it is not.
    """
    if not 0 <= span[0] < span[1] <= num_bytes:
        raise CorruptPayloadError(
            f"bytes {span[0]} to {span[1]} are not in a contribution to fragment {c.fragment} of {num_bytes} "
            "bytes; send those of the rank's shard."
        )


def check_initial(model: InitialModel[Any]) -> None:
    """Check the description of an initial model."""
    _within(model.learner, "inner steps before the run", model.step, MAX_INITIAL_STEP)
    _within(model.learner, "tokens before the run", model.tokens, MAX_TOKENS)
    _within(model.learner, "as an epoch of the run", model.epoch, MAX_EPOCH)
    if len(model.source) > MAX_SOURCE or not model.source.isprintable():
        raise PayloadError(
            f"the source of the model, {model.source[:MAX_SOURCE]!r}, is invalid; describe it in at most {MAX_SOURCE} "
            "printable characters."
        )


def check_run_id(run_id: str) -> None:
    """Check a run's id that a learner names."""
    if not RUN_ID.fullmatch(run_id):
        raise PayloadError(f"a run cannot have the id {run_id[:64]!r}; it is 32 hexadecimal digits.")


def _within_steps(learner: str, tokens: int, steps: int, tokens_per_step: int | None) -> None:
    if tokens_per_step is not None and tokens > steps * tokens_per_step:
        raise PayloadError(
            f"{learner!r} reports {tokens} tokens in {steps} inner steps, but declared at most {tokens_per_step} a "
            "step when it joined; nothing of it was counted."
        )


def _within(who: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise PayloadError(
            f"{who!r} reports {number} {what}, more than the maximum of {most}; nothing of it was counted."
        )
