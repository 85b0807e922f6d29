"""The inner optimizers of a learner: which tensors they train, their hooks, and the modes of schedule-free ones.

A schedule-free optimizer (Defazio et al., arXiv 2405.15682) holds one of two models in the parameters: in train mode y,
where gradients are computed, and in eval mode x, the average. `train()` and `eval()` compute one from the other and the
base sequence z, in place: x = (y − (1 − β) z) / β. A learner exchanges the model that the parameters hold at its steps,
and z stays its own. So after an adoption only the exchanged model is global: the other one contains the learner's own
z, and must not be evaluated in place of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diloco.errors import ConfigError


def listed(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers as a tuple.

    Raises:
        ConfigError: there is none, or an object is no optimizer.
    """
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    if not optimizers or not all(hasattr(each, "param_groups") and hasattr(each, "state") for each in optimizers):
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise ConfigError(f"Learner(optimizer=…) needs optimizers, and got {kinds}; pass those that train the model.")
    return optimizers


def require_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless the optimizer calls hooks at its steps, as those of torch do."""
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"{type(optimizer).__name__} calls no hooks at its steps, like some wrappers of optimizers; give "
            "Learner the optimizer inside it, or call learner.step() after each step, with outer gradients exchanged."
        )


def require_model_parameters(optimizers: Sequence[torch.optim.Optimizer], known: Collection[int]) -> None:
    """Raise ConfigError unless the optimizers train parameters of the model only.

    Arguments:
        known: identities of the model's parameters.
    """
    for optimizer in optimizers:
        trained = (each for group in optimizer.param_groups for each in group["params"])
        if num_unknown := sum(id(each) not in known for each in trained):
            raise ConfigError(
                f"{type(optimizer).__name__} trains {num_unknown} tensor(s) that are not parameters of the model as it "
                "was attached, such as private master weights or those of a new module, so their training is not "
                "exchanged, and adopting a global value does not reach them; make all of the model and its optimizers "
                "before attaching, and give them model.parameters()."
            )


def required_modes(optimizers: Sequence[torch.optim.Optimizer], earlier: list[bool | None]) -> list[bool | None]:
    """The modes of schedule-free optimizers at a step of the learner. Raises ConfigError unless they are those of
    `earlier` steps (empty: there was none): another model would be exchanged."""
    modes = [is_in_train_mode(each) for each in optimizers]
    if earlier and modes != earlier:
        now, before = ("train", "eval") if True in modes else ("eval", "train")
        raise ConfigError(
            f"the schedule-free optimizer is in {now} mode, and was in {before} mode at earlier calls of "
            "learner.step, so that another one of its two models would be exchanged; call step in one mode."
        )
    return modes


def is_in_train_mode(optimizer: torch.optim.Optimizer) -> bool | None:
    """Whether the parameters hold y; None: the optimizer is not schedule-free."""
    mode = optimizer.param_groups[0].get("train_mode", getattr(optimizer, "train_mode", None))
    return mode if isinstance(mode, bool) else None


@contextmanager
def in_eval_mode(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, all schedule-free optimizers are in eval mode, so that a call of `eval()` there changes nothing."""
    switched: list[Any] = [each for each in optimizers if is_in_train_mode(each)]
    for optimizer in switched:
        optimizer.eval()
    try:
        yield
    finally:
        for optimizer in switched:
            optimizer.train()
