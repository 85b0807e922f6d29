"""Tasks for tests of workers; light to import, since each scorer does."""

import signal
from collections.abc import Mapping
from typing import Any


class Letters:
    """The scores of a random model differ within most groups."""

    def sample(self, seed: int) -> str:
        return f"say {seed % 1000}: "

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(sum(map(ord, completion)) % 3)


class Faulty(Letters):
    """Of eight prompts one cannot be sampled, one is too long, and the scores of one are no numbers."""

    def sample(self, seed: int) -> str:
        if seed % 8 == 0:
            raise ZeroDivisionError("no sample")
        return super().sample(seed) * (9 if seed % 8 == 1 else 1)

    def score(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float("nan") if prompt["seed"] % 8 == 2 else super().score(prompt, completion)


class Hanging(Letters):
    """Of the first hundred prompts, the sample of number 2 hangs."""

    def sample(self, seed: int) -> str:
        if seed % 64 == 33:
            signal.pause()
        return super().sample(seed)
