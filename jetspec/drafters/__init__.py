"""Drafters: what proposes candidates for the next slots."""

from jetspec.drafters.base import Drafter
from jetspec.drafters.head import HeadDrafter
from jetspec.drafters.lookup import LookupDrafter

__all__ = ["Drafter", "HeadDrafter", "LookupDrafter"]
