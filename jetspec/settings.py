"""The base of every configuration section: typed, frozen, and deaf to unknown keys."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_serializer

from jetspec.errors import JetspecError


class Settings(BaseModel):
    """A section of the run file. Unknown keys are errors, so a typo never becomes a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # Fields that a dump leaves out at their default: stage keys made without them stay valid.
    optional: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        fields = type(self).model_fields
        unset = {name for name in self.optional if getattr(self, name) == fields[name].default}
        return {name: value for name, value in dump(self).items() if name not in unset}


def first_mistake(error: ValidationError, whole: str, source: object = None) -> JetspecError:
    """The first wrong setting, as a line for the user.

    Args:
        whole: the field's name where no single setting is wrong; source: its value then.
    """
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    value = first["input"] if first["loc"] or source is None else source
    # Python would show an empty value as nothing, or by a name that no run file knows.
    shown = "null" if value is None else "''" if value == "" else value
    if first["type"] == "extra_forbidden":
        return JetspecError(field, shown, "unknown key; check its spelling")
    mend = str(first["msg"]).removeprefix("Value error, ")
    # What contradicts another setting of its section is told as `name: mend`.
    name, told, rest = mend.partition(": ")
    if first["type"] == "value_error" and told and name.isidentifier() and isinstance(value, dict):
        return JetspecError(f"{field}.{name}", value.get(name, "not set"), rest)
    if first["type"] in ("model_type", "dict_type"):
        mend = "is a section; write its settings below it, or as {key: value}"
    elif first["type"] in ("tuple_type", "list_type"):
        mend = "is a list; write it as [value, ...]"
    elif value is None or value == "":
        wanted = mend.removeprefix("Input should be ")
        wanted = "a value" if wanted == mend else wanted
        mend = f"is empty; give {wanted}, or leave the key out"
    return JetspecError(field, shown, mend)
