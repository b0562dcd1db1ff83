"""The families whose names a file has, for the message that the names do not fit."""

import re
from collections.abc import Iterable

from jaxblock.checkpoint.layout import hugging_face
from jaxblock.config.families import FAMILIES


def hint(model_type: str, names: Iterable[str]) -> str | None:
    """A sentence, if the names are complete for other families and not for this one."""
    stored = {_template(name) for name in names}

    def fits(family: str) -> bool:
        rules = {rule.name: rule for rule in hugging_face(family, stored).all_rules()}
        optional = {
            name for name, rule in rules.items() if "bias" in name or rule.leaf == "unembedding"
        }
        return rules.keys() - optional <= stored <= rules.keys()

    others = [family for family in FAMILIES if fits(family)]
    if not others or model_type in others:
        return None
    return (
        f"model_type must be the family of the tensors; got model_type={model_type!r} and the "
        f"names of {' or '.join(others)}"
    )


def _template(name: str) -> str:
    name = re.sub(r"(?<=layers\.)\d+", "{L}", name)
    return re.sub(r"(?<=experts\.)\d+", "{E}", name)
