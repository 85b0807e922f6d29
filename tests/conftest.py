"""What holds for every test: one torch thread, seeded random numbers, repeatable properties."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The suite always tries the same examples; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
