"""The base of every configuration section: typed, frozen, and deaf to unknown keys."""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer


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
