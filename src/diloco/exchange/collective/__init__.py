"""Learners over a `torch.distributed` process group, without a syncer: one rank is one learner, membership is fixed.

Every rank acts as the syncer of a shard of each fragment (`shards`): a run of whole codec segments, with its outer
state and error feedback. One contribution of every rank makes one round (`rounds`):

    agree       every rank sends a small frame: fragment, round, base, tokens, digest held, whether encoding worked
    scatter     encoded shard r of every contribution goes to rank r (all-to-all)
    close       rank r merges its shard in rank order, takes the outer step and encodes the answer
    gather      every rank gets all encoded shards, and advances the whole fragment
    compare     every rank compares the digests of the new version; only then the version has arrived

The merge is this library's own and in rank order, never the group's reduction. So the bits are those of any other
exchange.
"""

from diloco.exchange.collective.collective import Collective

__all__ = ["Collective"]
