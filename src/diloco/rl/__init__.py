"""Roles of reinforcement learning: rollout and reward workers, and trainers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.rl.batching import Batch, batches

__all__ = ["Batch", "batches"]


def __getattr__(name: str) -> object:
    """Import a public name at its first use (PEP 562): workers' child processes do without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diloco.rl import batching

    return getattr(batching, name)
