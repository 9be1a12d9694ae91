"""Drafters: what proposes candidates for the next slots."""

from jetspec.drafters.base import Drafter
from jetspec.drafters.head import HeadDrafter
from jetspec.drafters.lookup import LookupDrafter
from jetspec.drafters.model import DraftModelDrafter

__all__ = ["DraftModelDrafter", "Drafter", "HeadDrafter", "LookupDrafter"]
