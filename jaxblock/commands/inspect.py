"""`jaxblock inspect`"""


def inspect() -> None:
    """Coming."""
