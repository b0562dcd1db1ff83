"""Files to parameter tree and back, strictly."""

from jaxblock.checkpoint.findings import CheckpointError
from jaxblock.checkpoint.load import Checkpoint, load_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint"]
