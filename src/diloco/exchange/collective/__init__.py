"""Learners over a `torch.distributed` process group: one rank is one learner, membership is fixed, and there is no
syncer.

Every rank acts as the syncer of a shard of each fragment (`shards`): a run of whole codec segments, with its outer
state and error feedback. One contribution of every rank makes one round (`rounds`):

    agree       a small frame from everybody: fragment, round, base, tokens, the digest held, and whether encoding worked
    scatter     encoded shard r of every contribution goes to rank r              (all-to-all)
    close       rank r merges its shard in rank order, takes the outer step and encodes the answer
    gather      everybody gets all encoded shards, and advances the whole fragment
    compare     digests of the new version; only then has it arrived

Merging is this library's own and in rank order, never the group's reduction, so the bits are those of any other
exchange.
"""

from diloco.exchange.collective.exchange import Collective

__all__ = ["Collective"]
