"""Process groups of ranks that share a sequence."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._torch_private import default_timeout
from .runtime.ranks import Ranks


def make_ranks(seq_parallel: int | DeviceMesh) -> Ranks:
    """The ranks that share this process' sequences; a new group for every call with an int.

    Every rank of the world must call this at the same point. Raises ValueError without a process
    group, or if the world is no multiple of ``seq_parallel``.
    """
    if isinstance(seq_parallel, DeviceMesh):
        size = seq_parallel.size()
        return Ranks(seq_parallel.get_group()) if size > 1 else Ranks()
    if seq_parallel == 1:
        return Ranks()
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"seq_parallel={seq_parallel}: needs an initialized process group of that many ranks; "
            f"launch with `torchrun --nproc-per-node {seq_parallel} train.py` and call "
            "torch.distributed.init_process_group first"
        )
    world = dist.get_world_size()
    if world % seq_parallel:
        raise ValueError(
            f"seq_parallel={seq_parallel}: the world has {world} ranks; allowed are divisors of it"
        )
    members = [
        list(range(start, start + seq_parallel))
        for start in range(0, world, seq_parallel)
    ]
    group, _ = dist.new_subgroups_by_enumeration(members, timeout=default_timeout())
    return Ranks(group)
