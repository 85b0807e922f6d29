"""Runs a script in which accelerate shards a model on the CPU.

python tests/integrations/fsdp_cpu.py SCRIPT ARGUMENTS…

accelerate 1.15 takes an `fsdp_plugin` only where there are accelerators; on the CPU it trains with DDP, in silence, and
so does the Trainer of transformers. What replaces that here is what `AcceleratorState` does on GPUs.
"""

import runpy
import sys
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


def shard_on_the_cpu() -> None:
    """From now on."""
    made = AcceleratorState.__init__

    def make(
        self: AcceleratorState, *args: Any, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **given: Any
    ) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **given)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = make  # type: ignore[method-assign]


if __name__ == "__main__":
    shard_on_the_cpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
