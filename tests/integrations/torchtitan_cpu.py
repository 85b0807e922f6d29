"""Runs a script as `python script ARGUMENTS` does, with torchtitan on the CPU, which it does not know.

Shims, for the tests only: the device and what torchtitan asks of it, dense attention without a compiled kernel, how
FSDP divides gradients, and the timeouts of process groups, which torchtitan changes by the number of a device. One more
is for torch 2.13: torchtitan 0.3 gives a pipeline's schedule its microbatches, as a newer torch takes them. All else is
torchtitan as installed.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=2**30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda device=None: {}


def set_divide_factor(self, factor):
    """gloo has no sum that multiplies on the way."""
    set_gradient_divide_factor(self, factor)
    self.set_force_sum_reduction_for_comms(True)


set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = set_divide_factor


def step(
    self, *, target=None, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, loss_kwargs=None,
    return_outputs=False,
):  # fmt: skip
    """A step of a pipeline's schedule whose batch is split already; `target` is None."""
    for stage in self._stages if isinstance(self, schedules.PipelineScheduleMulti) else [self._stage]:
        stage.has_backward = self._has_backward
        stage.clear_runtime_states()
    self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


schedules.PipelineScheduleSingle.step = schedules.PipelineScheduleMulti.step = step

from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402


def dense(q, k, v, *, score_mod, block_mask, scale, enable_gqa, return_aux, kernel_options):
    """What FlexAttention computes, which has no backward pass on the CPU."""
    mask = flex_attention.create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


attention.FlexAttention._compiled_flex_attn = staticmethod(dense)
attention._compiled_create_block_mask = flex_attention.create_block_mask
utils.set_pg_timeouts = lambda timeout, parallel_dims: None

if __name__ == "__main__":
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({**alone, **os.environ})
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
