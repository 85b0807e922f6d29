"""The model of a question."""

from diloco.errors import ConfigError
from diloco.planning.workload import load_workload


def parameters_of(model: str | None, parameters: float | None) -> float:
    """The number of parameters of a model that is named or counted."""
    if parameters is not None and model is None:
        return parameters
    if model is None or parameters is not None:
        raise ConfigError("a model is named by --model or described by --parameters; give one of the two.")
    return load_workload(model, 0.0).num_parameters
