"""Whether lookup and logits share one table: from what the files say and what is in them.

    says      no head        an equal head     another head
    tied      tied           tied, dropped     refused
    untied    refused        untied            untied
    nothing   refused        tied, dropped     untied

"Says" is the flag of a configuration; Meta's files have none, and GGUF says it by leaving out the
head. `tie` of `load_checkpoint` stands in its place, and then another head is dropped too.
"""

import numpy as np

from jaxblock.checkpoint.source import Source
from jaxblock.checkpoint.stored import StoredTensor

# Elements compared at once.
_CHUNK = 2**22


def decide(source: Source, override: bool | None, findings: list[str]) -> tuple[bool, str]:
    """Take a head that is dropped out of `source.tensors`; return the tie, and why in words."""
    table, head = source.tensors.get(source.naming.table), source.naming.head
    stored = source.tensors.get(head)
    says = source.tie if override is None else override
    by = "the files" if override is None else f"tie={override}"
    if table is None:  # It is missing, which is another finding.
        return says is not False, ""
    if stored is None:
        if says:
            return True, f"tied: one table, by {by}"
        why = "tie=False" if override is False else "the files do not say that it is tied"
        instead = "" if override is False else ". If it is, pass tie=True"
        findings.append(f"{head} must be in the files: got none, and {why}{instead}")
        return True, ""
    if says is False:
        same = ", although they are equal" if are_equal(table, stored) else ""
        return False, f"not tied: two tables, by {by}{same}"
    if are_equal(table, stored):
        del source.tensors[head]
        source.dropped.append(f"{head}, equal to {table.name}")
        by = by if says else "what they hold"
        return True, f"tied: one table, by {by}"
    if says is None:
        return False, "not tied: two tables, by what they hold"
    if override:
        del source.tensors[head]
        source.dropped.append(f"{head}, although it is not {table.name}, by tie=True")
        return True, f"tied: one table, by {by}"
    findings.append(
        f"{head} must equal {table.name} in a model that is tied; got another. Pass tie=False to "
        "keep both, or tie=True to drop it as transformers does"
    )
    return False, ""


def are_equal(a: StoredTensor, b: StoredTensor) -> bool:
    """The same values, compared in pieces."""
    if a.shape != b.shape:
        return False
    left, right = a.read().reshape(-1), b.read().reshape(-1)
    # Bits of one type, for NaN too; else values, which both fit into float32.
    same = left.dtype == right.dtype
    kind = np.dtype(f"u{left.dtype.itemsize}") if same else np.dtype(np.float32)

    def piece(values: np.ndarray, first: int) -> np.ndarray:
        values = values[first : first + _CHUNK]
        return values.view(kind) if same else values.astype(kind)

    return all(
        np.array_equal(piece(left, first), piece(right, first))
        for first in range(0, len(left), _CHUNK)
    )
