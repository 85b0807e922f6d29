"""Learners over a `torch.distributed` process group, without a syncer: one rank is one learner, membership is fixed.

Every rank is the syncer of a shard of each fragment (`shards`): a range of whole codec segments, with its outer state
and error feedback. Each round merges one contribution of every rank (`rounds`):

    agree       every rank sends a small frame: fragment, round, base, tokens, its digest, and any encoding error
    scatter     encoded shard r of every contribution goes to rank r (all-to-all)
    close       rank r merges its shard in rank order, takes the outer step and encodes the answer
    gather      every rank gets all encoded shards, and advances the whole fragment
    compare     every rank compares the digests of the new version; only then it is adopted

The merge is this library's own, in rank order, and never the group's reduction, so the bits are those of every other
exchange.
"""

from diloco.exchange.collective.collective import Collective

__all__ = ["Collective"]
