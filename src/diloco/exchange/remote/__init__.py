"""A learner's (or a viewer's) exchange with a syncer over the internet."""

from diloco.exchange.remote.remote import Remote, connect
from diloco.exchange.remote.viewing import fetch_model

__all__ = ["Remote", "connect", "fetch_model"]
