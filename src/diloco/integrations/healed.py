"""What a learner of a stack says of its healing."""

from __future__ import annotations

import logging

from diloco.learner import Learner

log = logging.getLogger("diloco")


def tell_healed(learner: Learner) -> None:
    """Say in the log of rank 0 how the learner has healed, if it has."""
    if learner.healed is not None and learner.rank[0] == 0:
        log.warning("%s heals at step %d: %s", learner.name, learner.steps, learner.healed.words)
