"""An opened checkpoint, of whatever kind: nothing of it has been read but headers."""

from dataclasses import dataclass, field

from jaxblock.checkpoint.layout import Naming
from jaxblock.checkpoint.stored import StoredTensor
from jaxblock.config import DecoderConfig


@dataclass(frozen=True)
class Source:
    """What a checkpoint says of itself.

    Attributes:
      format: in words.
      config: all of it but the tie.
      tie: what the files say about it: true, false, or None where only the tensors can tell.
      naming: of the tensors.
      tensors: by name.
      dropped: tensors that are no longer among them, and why not.
      notes: whatever else the report should say.
    """

    format: str
    config: DecoderConfig
    tie: bool | None
    naming: Naming
    tensors: dict[str, StoredTensor]
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
