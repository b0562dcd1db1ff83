"""What was read and what became of it, to be printed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoadReport:
    """What `load_checkpoint` did.

    Attributes:
      format: of the files, in words.
      files: that were read.
      num_tensors: read from them into the tree; each went to one place.
      num_leaves: arrays of the tree; each part of them came from one tensor.
      num_bytes: of the tensors, as read.
      tie: whether lookup and logits share a table, and by what that was decided.
      dtypes: how many leaves there are of each dtype.
      dropped: tensors that are not in the tree, and why not.
      notes: whatever else one should know.
    """

    format: str
    files: tuple[Path, ...]
    num_tensors: int
    num_leaves: int
    num_bytes: int
    tie: str
    dtypes: Mapping[str, int]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        files = self.files[0].name if len(self.files) == 1 else f"{len(self.files)} files"
        kinds = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        return "\n".join(
            [
                f"{self.format}: {self.num_tensors} tensors ({self.num_bytes / 1e6:,.1f} MB) in "
                f"{files} to {self.num_leaves} leaves ({kinds})",
                self.tie,
                *(f"dropped: {dropped}" for dropped in self.dropped),
                *self.notes,
            ]
        )
