"""A model as a plan sees it: parameters, layers, and the time of an inner step.

preset   the models of the papers' simulators, as they are printed there
TOML     parameters = 1.2e9, layers = 24, step_time = "310 ms"; or config = "config.json" in place of the first two
JSON     a transformers config.json; the step time has to come from elsewhere
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from diloco.errors import ConfigError
from diloco.planning.configs import count_parameters
from diloco.planning.units import TIME, amount
from diloco.tables import Table, read_text, read_toml, validate


@dataclass(frozen=True)
class Workload:
    """A model, and what one inner step of it takes on one learner.

    Attributes:
        name: for tables.
        num_parameters: all that is synchronised.
        num_layers: L.
        step_s: seconds of compute of an inner step; 0: not known.
    """

    name: str
    num_parameters: float
    num_layers: int
    step_s: float

    def __post_init__(self) -> None:
        amount("the number of parameters", self.num_parameters)
        if self.num_layers < 1:
            raise ConfigError(
                f"a model of {self.num_parameters:g} parameters in {self.num_layers} layers cannot be; give 1 layer or "
                "more."
            )

    def with_step(self, step_s: float) -> Self:
        """The same model with another step time."""
        return replace(self, step_s=step_s)


PRESETS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        # Streaming DiLoCo, arXiv 2501.18512, table 4
        Workload("1b", 1e9, 24, 0.1),
        Workload("10b", 10e9, 48, 0.8),
        Workload("100b", 100e9, 108, 4.9),
        # Scaling laws, arXiv 2503.09799, table 6; printed as 26 and 20 s, the next digit is what its table needs
        Workload("llama-405b", 405e9, 126, 26.9),
        Workload("deepseek-v3", 671e9, 61, 20.1),
    )
}
"""The models of the papers' simulators."""


class ModelDescription(Table):
    """A model as far as a plan needs to know it: parameters and layers, or the transformers config that has them."""

    parameters: float | None = Field(default=None, gt=0)
    layers: int | None = Field(default=None, gt=0)
    config: Path | None = None  # a transformers config.json, instead of parameters and layers

    @property
    def num_ways(self) -> int:
        """The number of ways in which the model is described; 2 where one of them is incomplete."""
        if (self.parameters is None) != (self.layers is None):
            return 2
        return (self.parameters is not None) + (self.config is not None)

    def described(self, name: str, step_s: float = 0.0, directory: Path = Path()) -> Workload:
        """The workload; `config` is found from the `directory`."""
        if self.config is not None:
            return Workload(name, *count_parameters(directory / self.config), step_s)
        assert self.parameters is not None
        assert self.layers is not None
        return Workload(name, self.parameters, self.layers, step_s)


class _ModelFile(ModelDescription):
    name: str | None = None
    step_time: Annotated[float, BeforeValidator(lambda text: TIME.parse(text, positive=True))] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.num_ways != 1:
            raise ValueError("a model is its parameters and layers, or its config; give one of the two")
        return self


def load_workload(model: str, step_s: float | None = None) -> Workload:
    """The workload of a preset's name, a TOML file or a transformers config.json; `step_s` replaces its step time.

    Raises:
        ConfigError: no such preset or file, a file that cannot be used, or no step time.
    """
    if model in PRESETS:
        workload = PRESETS[model]
    elif model.endswith(".toml"):
        workload = _from_toml(Path(model))
    elif model.endswith(".json"):
        workload = Workload(Path(model).parent.name or model, *count_parameters(model), 0.0)
    else:
        raise ConfigError(
            f"there is no model {model!r}; choose {', '.join(PRESETS)}, or name a .toml file or a transformers "
            "config.json."
        )
    if step_s is not None:
        return workload.with_step(step_s)
    if not workload.step_s:
        raise ConfigError(f'{model} does not say how long an inner step takes; add --step-time, for example "310 ms".')
    return workload


def _from_toml(path: Path) -> Workload:
    given = validate(_ModelFile, read_toml(read_text(path, "model file"), str(path)), str(path))
    return given.described(given.name or path.stem, given.step_time or 0.0, path.parent)
