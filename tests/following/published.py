"""A served run of which a test publishes one version after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from benchmarks.processes import until
from tests.syncer.runs import PATIENT, RUN, Net, Raw

import diloco
from diloco.core.fragments import make_layout
from diloco.core.global_fragment import GlobalFragment
from diloco.errors import StandbyError
from diloco.following.follower import FollowedModel
from diloco.following.sources import RunSource
from diloco.syncer.server import Options, Syncer

FRAGMENTS = diloco.Named([["layers.0.*"], ["layers.1.*"]])
METHODS = {
    "4 bits": diloco.StreamingDiLoCo(sync_every=4, overlap=1, mix=0.0, codec="int4", fragments=FRAGMENTS),
    "lossless": diloco.StreamingDiLoCo(sync_every=4, overlap=1, mix=0.0, codec="fp32", fragments=FRAGMENTS),
    "outer steps on learners": diloco.EagerDiLoCo(sync_every=4, codec="int4", fragments=FRAGMENTS),
}


class PublishedRun:
    """Arguments: width: of the model; fragment 0 has 5 · width elements."""

    def __init__(self, syncer: Syncer, method: diloco.Method, raw: Raw, seed: int) -> None:
        self.syncer, self.raw = syncer, raw
        self._step = 0
        self._method, self._generator = method, torch.Generator().manual_seed(seed)

    def publish(self, *fragments: int) -> None:
        """The next version of each."""
        for fragment in fragments:
            self._publish(fragment, self.syncer.versions()[fragment])

    def _publish(self, fragment: int, version: int) -> None:
        delta = torch.randn(self.raw.layout.fragments[fragment].numel, generator=self._generator)
        payload = self._method.for_fragment(fragment).up.encode(delta)
        self._step = step = max(self._step, 4 * version + 2 * (fragment + 1))
        self.raw.beat(step, 5 * step)
        self.raw.push(payload, fragment=fragment, round=version, base=version, step=step, trained=5 * step)
        until(lambda: self.syncer.versions()[fragment] == version + 1, "no version is published")

    def held(self) -> list[GlobalFragment]:
        """What the syncer has."""
        return self.syncer.driver.ask(lambda driver: [driver.state.model.held(f) for f in (0, 1)])

    def require_same(self, model: FollowedModel | None) -> None:
        """The follower has the versions and bits of the syncer."""
        assert model is not None
        held = self.held()
        assert model.versions == tuple(each.version for each in held)
        assert model.digests == tuple(each.digest for each in held)
        assert all(torch.equal(theta, each.theta) for theta, each in zip(model.thetas, held, strict=True))


@contextmanager
def published_run(
    tmp_path: Path,
    method: diloco.Method,
    *,
    width: int = 8,
    seed: int = 1,
    joins: bool = True,
    address: str = "127.0.0.1:0",
    **options: Any,
) -> Iterator[PublishedRun]:
    """A run whose only learner is driven by hand."""
    with Syncer(RUN, method, Options(address, tmp_path / "state", deadlines=PATIENT, **options)) as syncer:
        until(lambda: _serves(syncer), "the run is not served")  # in a bucket, after a second
        keys = options.get("keys")
        raw = Raw(
            syncer.address, keys=None if keys is None else keys.parent / "raw",
            held=make_layout(Net(width), method.fragments),
        )  # fmt: skip
        with closing(raw.connection):
            if not syncer.versions():
                raw.initialise()
            if joins:
                raw.join()
            yield PublishedRun(syncer, method, raw, seed)


def _serves(syncer: Syncer) -> bool:
    with suppress(StandbyError):
        return syncer.driver is not None
    return False


class RecordedSource(RunSource):
    """A source that keeps account of what is read.

    Attributes:
        reads: the object and the bytes of each read since `reads` was cleared.
    """

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self.close = source.close  # type: ignore[method-assign]
        self.reads: list[tuple[str, int]] = []

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes | memoryview:
        data = super().get(name, start, stop)
        self.reads.append((name, len(data)))
        return data


__all__ = ["METHODS", "RUN", "PublishedRun", "RecordedSource", "published_run"]
