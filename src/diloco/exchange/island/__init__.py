"""Several ranks as one learner: each owns a shard of every fragment, and all do the same at the same boundary."""

from diloco.exchange.island.ranks import Ranks

__all__ = ["Ranks"]
