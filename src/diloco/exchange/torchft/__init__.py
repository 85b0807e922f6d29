"""Learners over torchft's reconfigurable process group: no syncer, and members may be lost and may come back.

A torchft lighthouse keeps the list of live members. Before every round, all members request a quorum from it. When the
quorum has changed, torchft's `ProcessGroupGloo` is reconfigured (`quorum`). Then the background thread of each member
runs one round of one fragment (`elastic_rounds`):

    greet     every member sends the round that it wants to merge, and its version of every fragment
    heal      a member that is behind gets fragments, outer state and residual of the most advanced one (`run_copy`)
    exchange  every member sends its encoded contribution to all members
    close     every member merges them in the order of the replica names, takes the outer step and encodes the answer
    compare   all members compare the digests of the new version; only then it is adopted

A member that dies during a round breaks it for the others. They keep their contributions, form a new quorum and repeat
the round. If some of them have finished it, the rest are healed with its result. After a failed exchange no member
continues with its own gradient alone. A joiner has nothing to merge, and counts in no divisor.

`Collective` shards the work; here every member receives all contributions and keeps the whole outer state (`run_copy`),
so that no state is lost with a member. A round takes M − 1 payloads per member instead of about two. Only the
lighthouse and the process group of torchft are used, not its checkpoint transport, which unpickles bytes of a peer.
"""

from diloco.exchange.torchft.torchft import TorchFT

__all__ = ["TorchFT"]
