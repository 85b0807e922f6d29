"""The trackers that a run file may name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from diloco.errors import ConfigError

CLASSES = {
    "tensorboard": "diloco.tracking.tensorboard:TensorBoard",
    "wandb": "diloco.tracking.wandb:WeightsAndBiases",
    "trackio": "diloco.tracking.trackio:Trackio",
    "mlflow": "diloco.tracking.mlflow:MLflow",
}
"""By the name of the package, which is the name of its extra too: the module and class."""


def require_packages(trackers: Sequence[str]) -> None:
    """Raise ConfigError where the package of one of these is not installed."""
    absent = [name for name in trackers if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"track.trackers has {', '.join(absent)}, not installed here; pip install 'diloco[{','.join(absent)}]', or "
            "leave it out of the list."
        )
