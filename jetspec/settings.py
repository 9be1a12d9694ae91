"""The base of every configuration section: typed, frozen, and deaf to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A section of the run file. Unknown keys are errors, so a typo never becomes a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
