"""What data parallel sends, which a run's bytes are compared with."""


def ring_all_reduce_bytes(num_learners: int, num_parameters: int) -> float:
    """Bytes that all learners send for one data-parallel step: M · 2·(M − 1)/M · 2·N bytes in bf16.

    A ring all-reduce of N values makes each of M learners send (M − 1)/M of them twice (reduce-scatter, then
    all-gather; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009), at 2 bytes each.
    """
    return num_learners * 2 * (num_learners - 1) / num_learners * 2 * num_parameters if num_learners else 0.0
