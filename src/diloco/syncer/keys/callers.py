"""Callers of a syncer, and the rights of each role.

role      may
viewer    read status, history and the global model
learner   what a viewer may, and join, push and pull as itself (it holds the global model anyway)
standby   what a viewer may, and follow the run as a second syncer
admin     everything, for any learner: also whatever changes a run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from diloco.errors import AuthError

Role = Literal["viewer", "learner", "standby", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
MAY: Mapping[Role, frozenset[Role]] = {
    "viewer": frozenset({"viewer"}),
    "learner": frozenset({"viewer", "learner"}),
    "standby": frozenset({"viewer", "standby"}),
    "admin": frozenset(ROLES),
}
"""The roles in which a caller of each role may act."""


@dataclass(frozen=True)
class Caller:
    """The sender of a call, as its certificate names it.

    Attributes:
        name: in the certificate.
        learner: the only learner id that it may speak for; None: any.
        key: the serial number of the certificate.
        expires: end of the certificate; None: never.
    """

    name: str
    role: Role
    learner: str | None = None
    key: str = ""
    expires: datetime | None = None

    def may(self, needed: Role, learner: str | None = None) -> None:
        """Check that the caller may act as `needed`, and speak for `learner` if it is given.

        Raises:
            AuthError: it may not.
        """
        if needed not in MAY[self.role]:
            raise AuthError(f"{self.name!r} has the role {self.role!r} and this needs {needed!r}; use other keys.")
        if learner is not None and self.learner not in (None, learner):
            raise AuthError(
                f"{self.name!r} may speak for learner {self.learner!r} only, not for {learner!r}; use that learner's "
                "own keys."
            )


UNKNOWN = Caller("anyone", "admin")
"""The caller of every call of a syncer without keys; it may do everything."""
