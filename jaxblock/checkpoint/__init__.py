"""Files to parameter tree and back, strictly."""

from jaxblock.checkpoint.findings import CheckpointError
from jaxblock.checkpoint.load import Checkpoint, load_checkpoint, load_pickled_meta
from jaxblock.checkpoint.report import LoadReport
from jaxblock.checkpoint.save import save_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LoadReport",
    "load_checkpoint",
    "load_pickled_meta",
    "save_checkpoint",
]
