"""Learners over torchft's reconfigurable process group: no syncer, and members may be lost and may come back.

A torchft lighthouse says who is there. Before every round all members ask it for a quorum; when that has changed,
torchft's `ProcessGroupGloo` is configured anew (`quorum`). Then one round of one fragment, on a background thread
(`rounds`):

    greet     a frame of plain values from everybody: what it wants to merge, and the version of every fragment that it holds
    heal      whoever is behind gets fragments, outer state and error feedback from the most advanced member, as raw bytes (`healing`)
    exchange  the encoded contributions of those who want to merge this round go to all of them
    close     everybody merges them in order of the replica names, takes the outer step and encodes the answer
    compare   digests of the new version; only then has it arrived

A member that dies in the middle breaks the round for the others. They keep their contributions, form a new quorum and
repeat it; should some of them have finished it, the rest are healed with its result. Nobody ever goes on with its own
gradient alone because an exchange failed, and a joiner, which has nothing to merge, counts in no divisor.

What differs from `Collective`: every member receives all contributions and keeps the whole outer state (`held`), so
that nothing is lost with a member; that takes M − 1 payloads per round instead of about two. Of torchft the lighthouse
and the process group are used and its
checkpoint transport is not: that unpickles what a peer sends.
"""

from diloco.exchange.torchft.exchange import TorchFT

__all__ = ["TorchFT"]
