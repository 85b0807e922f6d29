"""Batches of groups for a trainer: an iterator over groups that the run's syncer has leased to a learner.

    lease groups → Work: where their bytes are → Read → check → drop what is stale or malformed → tensors

While the learner trains a batch, a thread reads the next one. Groups that cannot be trained are reported with the next
call of Work; the syncer settles them as stale or refused (`protocol.groups`). After an eviction the groups return to
the run, and the iterator continues with those that the new incarnation has leased.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diloco.config import RunConfig
from diloco.errors import ConfigError, StaleIncarnationError
from diloco.escaping import MAX_REASON, printable
from diloco.exchange.dialling import Door
from diloco.exchange.remote.remote import Remote
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.exchange.wire.groups import CompletionGroup
from diloco.following.sources import SyncerSource, until_answered
from diloco.learner.learner import Learner
from diloco.learner.leased_units import LeasedUnits
from diloco.protocol.groups import STALE
from diloco.protocol.leases import GroupRules
from diloco.protocol.units import numbers_of, units_of
from diloco.rl.loss import advantages
from diloco.rl.reading import read_span, spans
from diloco.rl.settings import data_of, loss_of, rules_of, table_of, tokenizer_of

POLL_S = 0.05
"""How often the training thread handles its exchange's events while it waits for a batch."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B groups of G completions: N = B·G sequences of at most T tokens.

    Attributes:
        tokens: prompt and completion, padded on the right with 0, int64 [N, T].
        mask: 1 where the next token is one of the completion, fp32 [N, T − 1].
        rollout_log_probs: of these next tokens, under the weights that have generated them, fp32 [N, T − 1].
        advantages: fp32 [N].
        rewards: fp32 [B, G].
        staleness: of each group (`protocol.groups`), int64 [B]; negative if it is newer than the learner's versions.
    """

    tokens: Tensor
    mask: Tensor
    rollout_log_probs: Tensor
    advantages: Tensor
    rewards: Tensor
    staleness: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions."""
        return int(self.mask.sum())


@dataclass(frozen=True, eq=False)
class Scored:
    """A group and its rewards, one per completion."""

    group: CompletionGroup
    rewards: tuple[float, ...]

    def staleness(self, versions: Sequence[int]) -> int:
        """As `protocol.groups.Group.staleness`."""
        return max(now - then for now, then in zip(versions, self.group.versions, strict=True))


def batch_of(groups: Sequence[Scored], versions: Sequence[int], scale: Literal["group", "none"]) -> Batch:
    """Groups of one size as tensors.

    Arguments:
        versions: of the fragments, which the batch is trained on.
        scale: as in `loss.advantages`.
    """
    sequences, masks, log_probs = list[Tensor](), list[Tensor](), list[Tensor]()
    for group in (each.group for each in groups):
        before = torch.zeros(group.prompt.numel() - 1)  # predictions of the prompt's other tokens
        for tokens, its_log_probs in zip(group.split(group.tokens), group.split(group.log_probs), strict=True):
            sequences.append(torch.cat([group.prompt, tokens]).long())
            masks.append(torch.cat([before, torch.ones(tokens.numel())]))
            log_probs.append(torch.cat([before, its_log_probs]))
    rewards = torch.tensor([each.rewards for each in groups], dtype=torch.float32)
    return Batch(
        pad_sequence(sequences, batch_first=True), pad_sequence(masks, batch_first=True),
        pad_sequence(log_probs, batch_first=True), advantages(rewards, scale).flatten(), rewards,
        torch.tensor([each.staleness(versions) for each in groups]),
    )  # fmt: skip


def batches(learner: Learner, config: RunConfig) -> Generator[Batch, None, None]:
    """Batches of `rl.groups_per_step` groups, or fewer where some could not be used; each counts as trained at the next
    `Learner.step`. Call it before the first step. It ends with the run, or when the learner is told to leave it.

    The learner is one process: learners of several ranks are not supported.

    Arguments:
        learner: over `diloco.connect`, by a method that exchanges outer gradients.
        config: of the run, with the tables [rl] and [task.NAME].

    Raises:
        ConfigError: another kind of learner or run file; while it iterates, also another run file than the run's. Then
        also StoppedError (`Learner.interrupt`), and AuthError.

    Example:
        >>> for batch in diloco.rl.batches(learner, config):
        ...     logits = model(input_ids=batch.tokens[:, :-1]).logits
        ...     log_probs = token_log_probs(logits, batch.tokens[:, 1:], config.rl.temperature)
        ...     loss = policy_loss(
        ...         log_probs, log_probs, batch.rollout_log_probs, None, batch.advantages, batch.mask, Loss()
        ...     )
        ...     loss.backward(); optimizer.step(); optimizer.zero_grad()
        ...     learner.step(tokens=batch.num_tokens)
    """
    table, rules = table_of(config), rules_of(config, tokenizer_of(config))
    exchange, num = learner.exchange, table.groups_per_step
    if not isinstance(exchange, Remote) or exchange.door is None or learner.rank[1] > 1:
        raise ConfigError("groups need a learner of one process over a syncer; make its exchange by diloco.connect(…).")
    units = learner.lease(data_of(rules), num_ahead=num)
    return _iterate(learner, units, GroupReader(exchange.door, learner.name, rules), num, loss_of(table).scale)


@dataclass(frozen=True)
class _Load:
    """A batch that a thread reads, for an incarnation of the learner."""

    drawn: Sequence[int]
    incarnation: int
    read: Future[tuple[dict[int, Scored], dict[int, str]]]


def _iterate(
    learner: Learner, units: LeasedUnits, reader: GroupReader, num: int, scale: Literal["group", "none"]
) -> Generator[Batch, None, None]:
    ahead, dropped = deque[_Load](), dict[int, str]()

    def load(drawn: Sequence[int]) -> _Load:
        reasons = dict(dropped)
        dropped.clear()
        return _Load(drawn, units.incarnation, pool.submit(reader.read, drawn, units.incarnation, reasons))

    with ThreadPoolExecutor(1, "diloco-groups") as pool, closing(reader):
        while not (units.is_over or learner.drained):
            if not ahead and len(drawn := units.draw(num)) < num:
                return
            now = ahead.popleft() if ahead else load(drawn)
            if units.has(num):
                ahead.append(load(units.draw(num)))
            while (found := _result(units, now)) is None:
                if units.incarnation == now.incarnation:
                    return
                now = load(now.drawn)
            groups, unusable = found
            versions = learner.versions
            for number, each in groups.items():
                if each.staleness(versions) > reader.rules.max_staleness:
                    unusable[number] = STALE
            missing = set(now.drawn) - groups.keys() | unusable.keys()
            taken = units.take(units_of(missing))
            dropped |= unusable
            if taken:
                yield batch_of([groups[number] for number in numbers_of(taken)], versions, scale)


def _result(units: LeasedUnits, load: _Load) -> tuple[dict[int, Scored], dict[int, str]] | None:
    """The groups of a batch, and why others cannot be used; None: the learner was evicted, and has a new incarnation by
    now or was told to leave the run."""
    units.wait_while(lambda: not wait([load.read], POLL_S).done, poll_s=0.0)
    if not load.read.done():
        return None
    try:
        return load.read.result()
    except StaleIncarnationError:
        units.wait_while(lambda: units.incarnation == load.incarnation)
        units.confirm()
        return None


class GroupReader:
    """Reads groups that a learner has leased. `read` is called on one thread, `close` on any.

    Arguments:
        learner: its name.
    """

    def __init__(self, door: Door, learner: str, rules: GroupRules) -> None:
        self.rules = rules
        self._door, self._learner, self._order = door, learner, 0
        self._source = SyncerSource(door.addresses, door.run, keys=door.keys, insecure=door.insecure)
        self._closing = threading.Event()

    def read(
        self, numbers: Sequence[int], incarnation: int, dropped: Mapping[int, str]
    ) -> tuple[dict[int, Scored], dict[int, str]]:
        """Those of these groups that the learner has leased, and why some of them cannot be used. Calls are repeated
        while the syncer is away.

        Arguments:
            dropped: groups of earlier calls that the learner does not train, each with the reason.

        Raises:
            StaleIncarnationError: the incarnation has ended. StoppedError: this was closed. Others as
            `Connection.call`.
        """
        self._order += 1
        request = pb.WorkRequest(
            run=self._door.run, learner=self._learner, role="trainer", process=incarnation, order=self._order,
            digest=self.rules.digest, scores=[pb.GroupScore(number=it, reason=why) for it, why in dropped.items()],
        )  # fmt: skip
        reply = until_answered(
            lambda: self._source.answer(lambda syncer: syncer.call("groups", "Work", request, pb.WorkReply)),
            self._closing,
        )
        groups, unusable, wanted = dict[int, Scored](), dict[int, str](), set(numbers)
        rewards = {place.number: tuple(place.rewards) for place in reply.groups}
        for span in spans([place for place in reply.groups if place.number in wanted]):
            for number, group in read_span(span, self._get, self.rules).items():
                if isinstance(group, CompletionGroup):
                    groups[number] = Scored(group, rewards[number])
                else:
                    unusable[number] = printable(f"group {number}: {group}")[:MAX_REASON]
        for number in wanted & set(reply.numbers) - {place.number for place in reply.groups}:  # a repair has lost them
            unusable[number] = f"the bytes of group {number} are lost"
        return groups, unusable

    def _get(self, name: str, start: int, stop: int) -> bytes | memoryview:
        return until_answered(lambda: self._source.get(name, start, stop), self._closing)

    def close(self) -> None:
        """Hang up; a call that waits fails."""
        self._closing.set()
        self._source.close()
