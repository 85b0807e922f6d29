"""The authority of a run, in the operator's directory, and the one that is to replace it.

ca.pem         whom every holder trusts: the authority, and while it is being replaced both
ca.key         its secret
next-ca.key    while it is being replaced, the secret of the new one

Each change is one file in its place, so that a crash leaves a state that the same command goes on from.
"""

from __future__ import annotations

from pathlib import Path

from diloco.errors import ConfigError
from diloco.exchange.key_pair import CA
from diloco.secret_files import replace_secret, write_secret
from diloco.syncer.keys.certificates import Authority

CA_KEY, NEXT_KEY = "ca.key", "next-ca.key"


class Authorities:
    """Those of a directory.

    Attributes:
        current: signs the certificates of syncers, which learners know by it.
        next: its successor, if it is being replaced: signs all others.

    Raises:
        ConfigError: there is none, or other users of this machine may read its key.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        current = Authority.read(directory / CA, directory / CA_KEY)
        if current is None:
            raise ConfigError(f"{directory / CA_KEY} is not the key of the {CA} beside it; put back the one that is.")
        self.current = current
        next_key = directory / NEXT_KEY
        self.next = Authority.read(directory / CA, next_key) if next_key.exists() else None

    @classmethod
    def new(cls, directory: Path, run: str) -> Authorities:
        """The first one of a run. Raises FileExistsError where there is one."""
        made = Authority.new(run)
        write_secret(directory / CA, made.cert)
        write_secret(directory / CA_KEY, made.key)
        return cls(directory)

    @property
    def newest(self) -> Authority:
        """Signs what is shown to a syncer, which trusts both."""
        return self.next or self.current

    @property
    def bundle(self) -> bytes:
        """Whom every holder trusts, as PEM."""
        return self.current.cert + (self.next.cert if self.next is not None else b"")

    def replace(self, run: str) -> None:
        """Begin to replace the authority, unless that has begun: from now on both are trusted."""
        if self.next is None:
            made = Authority.new(run)
            replace_secret(self._directory / NEXT_KEY, made.key)
            self.next = made
        replace_secret(self._directory / CA, self.bundle)

    def retire(self) -> None:
        """End it: the new one stands alone, and the secret of the old one is gone."""
        if self.next is not None:
            (self._directory / NEXT_KEY).replace(self._directory / CA_KEY)
            self.current, self.next = self.next, None
        replace_secret(self._directory / CA, self.bundle)
