"""`jaxblock convert`"""


def convert() -> None:
    """Coming."""
