"""A sampler for a user's DataLoader, whose samples the run's syncer leases (`protocol.leases`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch.utils.data import Sampler

from diloco.errors import ConfigError
from diloco.learner.learner import Learner
from diloco.protocol.leases import DataSet
from diloco.protocol.units import place_of_unit

B = TypeVar("B")


class LeasedSampler(Sampler[list[int]]):
    """A batch sampler for `DataLoader(…, batch_sampler=…)` whose samples the run's syncer leases: each sample of a pass
    is merged once over all learners of the run, also when learners join, leave or fail (docs/data.md).

    Iterate over `batches(loader)`, not over the loader: batches that workers have prepared must not count before they
    are trained.

    Arguments:
        learner: trains the samples; over a syncer, or in `run_local`.
        num_samples: of the data set, the same for all learners.
        batch_size: samples in a batch of this rank. The last batch of the data may be smaller.
        seed: of the order, which differs from pass to pass.
        passes: over the data set, after which iteration ends; None: it does not end.
        digest: identifies the data set beside its size and the seed; the same for all learners.
        lease_batches: number of batches leased at a time.
        ranks: (this rank, their number) of the ranks of this learner that read different samples; None: all its ranks.
            Ranks that share one model replica, as in tensor parallel, read the same.

    Raises:
        ConfigError: impossible numbers; the exchange of the learner has no syncer, or the method exchanges gradients;
            the learner has leased data already.

    Example:
        >>> sampler = diloco.LeasedSampler(learner, len(dataset), batch_size=8)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        >>> for batch in sampler.batches(loader):
        ...     loss = model(batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()
        ...     learner.step(tokens=batch.numel())
    """

    def __init__(
        self, learner: Learner, num_samples: int, batch_size: int, *, seed: int = 0, passes: int | None = None,
        digest: str = "", lease_batches: int = 16, ranks: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._rank, self._num_ranks = learner.rank if ranks is None else ranks
        numbers = {"num_samples": num_samples, "batch_size": batch_size, "lease_batches": lease_batches}
        if passes is not None:
            numbers["passes"] = passes
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"LeasedSampler({name}={number}) needs 1 or more.")
        if seed < 0 or not 0 <= self._rank < self._num_ranks:
            raise ConfigError(f"LeasedSampler(seed={seed}, ranks={ranks}) needs a seed >= 0, and (rank, their number).")
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed
        identity = hashlib.sha256(f"{num_samples} {seed} {digest}".encode()).hexdigest()
        data = DataSet(num_samples, passes or 0, identity)
        self._units = learner.lease(data, num_ahead=lease_batches * batch_size * self._num_ranks)

    def __iter__(self) -> Iterator[list[int]]:
        self._units.put_back()  # those of an earlier iteration that was broken off
        while True:
            units = self._units.draw(self._batch_size * self._num_ranks)
            if len(units) < self._num_ranks:
                return  # too few for all ranks; the syncer leases them again when the learner leaves
            part = slice(len(units) * self._rank // self._num_ranks, len(units) * (self._rank + 1) // self._num_ranks)
            yield [place_of_unit(unit, self._num_samples, self._seed) for unit in units[part]]

    def batches(self, loader: Iterable[B]) -> Iterator[B]:
        """The batches of a loader with this sampler; each counts as trained at the next `Learner.step`."""
        for batch in loader:
            self._units.take()
            yield batch
