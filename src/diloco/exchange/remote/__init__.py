"""A learner's exchange with a syncer over the internet."""

from diloco.exchange.remote.remote import Remote, connect

__all__ = ["Remote", "connect"]
