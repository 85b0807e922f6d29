"""Evaluates versions of a run while it trains, and reports the results to its syncer."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing

from diloco.config import RunConfig
from diloco.evaluation.evaluate import EvaluationData, EvaluationRequest
from diloco.evaluation.exports import followed_export
from diloco.evaluation.scores import HELD_OUT, ExportScores
from diloco.exchange.dialling import dialler, found
from diloco.exchange.key_pair import AnyKeys
from diloco.exchange.wire import syncer_pb2 as pb
from diloco.following.follower import FollowedModel
from diloco.following.sources import until_answered


def evaluate_versions(
    models: Iterable[FollowedModel], request: EvaluationRequest, config: RunConfig
) -> Iterator[tuple[FollowedModel, ExportScores]]:
    """The scores of each version, on the held-out data and by the model of its run, as `config` describes it.

    Raises:
        LayoutError: a version is not a model of the run file. Others as `EvaluationData`.
    """
    with closing(EvaluationData(request, {})) as evaluation:
        for model in models:
            yield model, evaluation.of(str(model), followed_export(model, config, evaluation.device))


class Reporter:
    """Reports results to the syncer of a run, with keys of the role evaluator.

    Arguments:
        addresses, keys, insecure: as in `connect`.
        closing: once it is set, a syncer that does not answer is not waited for.

    Raises:
        ConfigError: an invalid address, or keys that cannot be used.
    """

    def __init__(
        self, addresses: str, run: str, closing: threading.Event, *, keys: AnyKeys | None = None, insecure: bool = False
    ) -> None:  # fmt: skip
        self._run, self._syncers, self._closing = run, dialler(addresses, keys=keys, insecure=insecure), closing

    def report(self, model: FollowedModel, scores: ExportScores) -> None:
        """Report the results of a version; waits while the syncer does not answer. Values that are not finite are left
        out.

        Raises:
            AuthError: the keys do not permit it. StoppedError: the syncer does not answer, and `closing` was set.
        """
        values = {it.name: (it, it.score.value) for it in scores.results.values() if math.isfinite(it.score.value)}
        loss = values.pop(HELD_OUT, None)
        request = pb.ReportRequest(
            run=self._run, versions=model.versions, step=model.step, run_tokens=model.tokens,
            loss=None if loss is None else loss[1],
            scores=[pb.Score(name=f"{it.task}/{it.metric}", value=value) for it, value in values.values()],
        )  # fmt: skip
        until_answered(lambda: self._send(request), self._closing)

    def _send(self, request: pb.ReportRequest) -> None:
        found(self._syncers, self._run)
        self._syncers.current.call("control", "Report", request, pb.ReportReply)

    def close(self) -> None:
        """Hang up."""
        self._syncers.close()
