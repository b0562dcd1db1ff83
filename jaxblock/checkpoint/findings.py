"""The error of this package: everything that is wrong with a checkpoint, said at once."""

import json
import reprlib
from collections import Counter
from collections.abc import Collection
from typing import Any

# A damaged file can give a finding for each of its tensors; the message stays readable.
MAX_SHOWN = 50

# Names of tensors come whole; what a hostile file puts in their place comes cut, and escaped.
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 160
show = _repr.repr


class CheckpointError(ValueError):
    """A checkpoint that is not understood completely.

    Attributes:
      findings: one sentence for each thing that is wrong; each names the file or the tensor.
    """

    def __init__(self, message: str, findings: Collection[str] = ()):
        super().__init__(message)
        self.findings = tuple(findings)


def checkpoint_error(function: str, findings: Collection[str]) -> CheckpointError:
    """The error that holds `findings`; the message shows the first `MAX_SHOWN` of many."""
    findings = tuple(findings)
    if len(findings) == 1:
        return CheckpointError(f"{function}: {findings[0]}", findings)
    lines = "".join(f"\n- {finding}" for finding in findings[:MAX_SHOWN])
    if len(findings) > MAX_SHOWN:
        lines += f"\n- and {len(findings) - MAX_SHOWN} more, in .findings of this error"
    must = f"every tensor must be understood; got {len(findings)} findings"
    return CheckpointError(f"{function}: {must}:{lines}", findings)


class NotJson(ValueError):
    """These bytes are not JSON, or say one thing twice; the text says which."""


def parse_json(text: bytes) -> Any:
    """The value in `text`, which is UTF-8 and gives no key of an object twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The json module keeps the last of two equal keys and drops the other without a word.
        entries = dict(pairs)
        if len(entries) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise NotJson(f"the key {show(twice)} is given twice")
        return entries

    try:
        # Decoded here, because json.loads also takes UTF-16 and UTF-32.
        return json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except RecursionError as error:
        raise NotJson("brackets nested too deep") from error
    except NotJson:
        raise
    except ValueError as error:
        raise NotJson(str(error)) from error


def is_text(name: str) -> bool:
    """Whether `name` can be printed and written: JSON can smuggle in half a surrogate pair."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
