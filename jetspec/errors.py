"""The one error a user is meant to read: which field, which value, and how to mend it."""


class JetspecError(Exception):
    """A mistake the user can mend, told in one line.

    Args:
        field: the setting, file or argument that is wrong, as the user wrote it.
        value: what was found there.
        mend: what to do about it.
    """

    def __init__(self, field: str, value: object, mend: str) -> None:
        self.field = field
        self.value = value
        self.mend = mend
        super().__init__(field, value, mend)

    def __str__(self) -> str:
        line = f"{self.field}: {self.value}: {self.mend}"
        return " ".join(line.split())
