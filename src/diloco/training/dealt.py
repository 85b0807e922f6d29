"""The experts of a learner whose set the syncer deals (`train.holds_experts = "auto"`)."""

from collections.abc import Sequence
from itertools import chain

from transformers import PreTrainedConfig

from diloco.core.fragments import Experts
from diloco.core.method import Method
from diloco.errors import ConfigError
from diloco.learner.held import HeldExperts
from diloco.training.expert_part import num_experts_of, part_config
from diloco.training.learners import Deal


class DealtExperts:
    """The sets that one learner may be dealt, of ⌈copies·G / N⌉ groups each.

    Arguments:
        config: of the whole model.
        method: the run's, by its run file.
        num_learners: N, the planned learners whose sets are dealt.
        deal: asks the syncer.

    Raises:
        ConfigError: the method does not cut the model into experts, or wants more copies than there are learners, or
            has `deal_every` although each set is all experts; a router could not choose among those of every set.
    """

    def __init__(self, config: PreTrainedConfig, method: Method, num_learners: int, deal: Deal) -> None:
        cut = method.fragments
        if not isinstance(cut, Experts):
            raise ConfigError(
                f'train.holds_experts = "auto" finds no experts, since {method.name} cuts the model by {cut}; set '
                'fragments = { type = "Experts", … }.'
            )
        if cut.copies > num_learners:
            raise ConfigError(
                f"Experts(copies={cut.copies}) is more than the {num_learners} planned learners with "
                'train.holds_experts = "auto"; lower it, or plan for more learners.'
            )
        self._method, self._deal, self._num_groups = method, deal, cut.groups
        self._size, (_, self._num_experts) = -(-cut.copies * cut.groups // num_learners), num_experts_of(config)
        if cut.deal_every and self._size == cut.groups:
            raise ConfigError(
                f"Experts(deal_every={cut.deal_every}) has no effect where each learner holds all {cut.groups} groups, "
                f"with copies={cut.copies} for {num_learners} planned learners; drop it, or lower copies."
            )
        groups = [self._of([group]).experts for group in range(cut.groups)]
        num_choices = getattr(config, "n_group", None) or 1
        of_choice = self._num_experts // num_choices
        if self._size > 1 and num_choices > 1 and any(own and own[0] % of_choice for own in groups):
            raise ConfigError(
                f"Experts(groups={cut.groups}) cuts through the {num_choices} groups of the router (n_group), which "
                f"sets that are dealt would not fill equally; make {num_choices} groups, or a number that divides it."
            )
        smallest = chain.from_iterable(sorted(groups, key=len)[: self._size])
        for experts in groups if self._size == 1 else [sorted(smallest)]:
            part_config(config, experts)

    def ask(self) -> HeldExperts:
        """Those that the syncer deals this learner, before it joins."""
        return self._of(self._deal(self._method, self._size))

    def other_than(self, part: HeldExperts, groups: Sequence[int]) -> HeldExperts | None:
        """Those of the groups that a learner was dealt; None: it holds them, or was dealt none."""
        return None if not groups or tuple(groups) == part.groups else self._of(groups)

    def saved(self, experts: Sequence[int]) -> HeldExperts:
        """Those of a checkpoint."""
        groups = {expert * self._num_groups // self._num_experts for expert in experts}
        return HeldExperts(tuple(experts), self._num_experts, tuple(sorted(groups)), self._num_groups)

    def _of(self, groups: Sequence[int]) -> HeldExperts:
        num_experts, num_groups = self._num_experts, self._num_groups
        experts = tuple(it for it in range(num_experts) if it * num_groups // num_experts in groups)
        return HeldExperts(experts, num_experts, tuple(groups), num_groups)
