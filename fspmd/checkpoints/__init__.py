"""Checkpoints of pytrees: `save` and `load`, in the files of torch.distributed.checkpoint."""

from fspmd.checkpoints.folders import latest_step
from fspmd.checkpoints.handles import SaveHandle
from fspmd.checkpoints.load import load
from fspmd.checkpoints.save import save

__all__ = ["SaveHandle", "latest_step", "load", "save"]
