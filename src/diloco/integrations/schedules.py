"""A learning rate schedule follows the run's steps, also where a learner joins in the middle of the run."""

import warnings

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def forward(scheduler: object, num_steps: int) -> None:
    """Take steps of a schedule that its optimizer has not taken here. A schedule that follows a metric stays."""
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(num_steps):
            scheduler.step()
