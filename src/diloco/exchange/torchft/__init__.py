"""Learners over torchft's reconfigurable process group: no syncer, and members may be lost and may come back.

A torchft lighthouse keeps the list of live members. Before every round, all members ask it for a quorum. When the
quorum has changed, torchft's `ProcessGroupGloo` is configured anew (`quorum`). Then the background thread of each
member runs one round of one fragment (`rounds`):

    greet     every member sends the round that it wants to merge, and the version of every fragment that it holds
    heal      a member that is behind gets fragments, outer state and residual of the most advanced one (`healing`)
    exchange  the encoded contributions to this round go to all members
    close     every member merges them in the order of the replica names, takes the outer step and encodes the answer
    compare   all members compare the digests of the new version; only then the version has arrived

A member that dies during a round breaks it for the others. They keep their contributions, form a new quorum and repeat
the round. If some of them have finished it, the rest are healed with its result. No member goes on with its own
gradient alone because an exchange failed. A joiner has nothing to merge, and counts in no divisor.

`Collective` shards the work; here every member receives all contributions and keeps the whole outer state (`run_copy`),
so that no state is lost with a member. That takes M − 1 payloads per round instead of about two. Only the lighthouse
and the process group of torchft are used. Its checkpoint transport is not: it unpickles what a peer sends.
"""

from diloco.exchange.torchft.torchft import TorchFT

__all__ = ["TorchFT"]
