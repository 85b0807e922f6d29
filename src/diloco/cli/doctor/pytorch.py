"""torch, and what it can do here: CUDA, and groups over gloo and NCCL."""

import os
import shutil
import socket
import sysconfig
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.cli.doctor.findings import Finding, State, shown_bytes

if TYPE_CHECKING:
    from torch import Tensor

DRIVER = Path("/proc/driver/nvidia/version")
SET_INTERFACE = "set GLOO_SOCKET_IFNAME to the interface that the ranks share"


def look_at_torch(*, needs_cuda: bool) -> Iterator[Finding]:
    """What torch is here and can do; `needs_cuda`: the run file asks for a CUDA device."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "missing", str(error), "nothing trains without it; install torch anew")
        return
    build = "CPU build" if torch.version.cuda is None else f"CUDA {torch.version.cuda} build"
    yield Finding("torch", "ok", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")
    yield _gpu(needs_cuda)
    yield _gloo()
    if torch.cuda.is_available():
        yield _nccl()
        if find_spec("triton"):
            yield look_for_compiler()


def _gpu(needed: bool) -> Finding:
    import torch

    driver = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else None
    if torch.cuda.is_available():
        devices = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        names = ", ".join(f"{it.name} ({shown_bytes(it.total_memory)}, sm_{it.major}{it.minor})" for it in devices)
        return Finding("gpu", "ok", f"{names}; {driver or 'driver not told'}")
    state: State = "missing" if needed else "absent"
    if driver is None:
        return Finding("gpu", state, "no NVIDIA driver", 'learners train on the CPU; train.device = "cuda" fails')
    if torch.version.cuda is None:
        advice = "torch here is a CPU build and does not see it; install a CUDA build of torch"
        return Finding("gpu", state, driver, advice)
    advice = (
        f"torch was built for CUDA {torch.version.cuda} and cannot use it; update the driver, make the devices visible "
        "(CUDA_VISIBLE_DEVICES, docker run --gpus all), or install a torch for an older CUDA"
    )
    return Finding("gpu", state, driver, advice)


def _gloo() -> Finding:
    """Whether a group works, and whether ranks on other machines could reach this one."""
    import torch

    found = _group("gloo", torch.zeros(1), f"learners of several ranks need it; {SET_INTERFACE}")
    if found.state != "ok" or "GLOO_SOCKET_IFNAME" in os.environ:
        return found
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address != "no address" and not ip_address(address).is_loopback:
        return found
    advice = f"ranks on other machines cannot reach it; give the name its address in /etc/hosts, or {SET_INTERFACE}"
    return Finding("gloo", "absent", f"{found.found}, but this host's name {name!r} is {address}", advice)


def look_for_compiler() -> Finding:
    """Whether there is what Triton compiles its launchers with: a C compiler, and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    lacking = [name for name, there in (("C compiler", compiler), (str(header), header.is_file())) if not there]
    if not lacking:
        return Finding("compiler", "ok", f"{compiler}, and Python's headers")
    advice = "Triton, which encodes on the GPU, fails without it; install gcc and Python's headers (python3-dev)"
    return Finding("compiler", "missing", f"no {' and no '.join(lacking)}", advice)


def _nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return Finding("nccl", "missing", "torch was built without it", "ranks on GPUs need it; install a CUDA build")
    found = _group("nccl", torch.zeros(1, device="cuda"), "ranks on GPUs need it; NCCL_DEBUG=INFO says more")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Finding(found.what, found.state, f"{version}, {found.found}", found.advice)


def _group(backend: str, value: "Tensor", advice: str) -> Finding:
    """Make a group of this process alone, and take a sum in it."""
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]  # documented, and not in its __all__
    try:
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    except (RuntimeError, ValueError) as error:
        return Finding(backend, "missing", str(error).splitlines()[0], advice)
    try:
        dist.all_reduce(value)
        value.cpu()
    except RuntimeError as error:
        return Finding(backend, "missing", str(error).splitlines()[0], advice)
    finally:
        dist.destroy_process_group()
    return Finding(backend, "ok", "a group of one rank works")
