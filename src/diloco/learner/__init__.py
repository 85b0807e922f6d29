"""`Learner`, the object that users hold, and its parts."""

from diloco.learner.learner import Learner

__all__ = ["Learner"]
