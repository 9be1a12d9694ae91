"""What a group has decoded so far, batch by batch on storage, so that a cut run goes on inside it.

A group's records come at its end, since its cells take turns. At batch 1 that can be minutes. Each
turn's decoded batches are therefore kept until the records are written.
"""

from dataclasses import asdict
from typing import Any

from jetspec.errors import JetspecError
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.methods import Decoded
from jetspec.storage import exists, filesystem, join, read_json, write_json


class Turns:
    """Decoded batches of one group in the directory `uri`, one file a turn.

    Turn t is one repeat of one batch, decoded by every cell that takes part in it.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def read(self, turn: int) -> dict[str, Decoded]:
        """What was decoded in a turn, by the cells' keys; empty where nothing was."""
        uri = self._file(turn)
        if not exists(uri):
            return {}
        try:
            stored = read_json(uri)
            return {key: Decoded(**fields) for key, fields in stored.items()}
        except (JetspecError, TypeError, AttributeError):
            return {}  # damaged: the turn is taken again

    def write(self, turn: int, decoded: dict[Cell, Decoded]) -> None:
        fields: dict[str, Any] = {cell.key: asdict(result) for cell, result in decoded.items()}
        write_json(self._file(turn), fields)

    def clear(self) -> None:
        """Forget the group: its records are written."""
        if exists(self._uri):
            fs, path = filesystem(self._uri)
            fs.rm(path, recursive=True)

    def _file(self, turn: int) -> str:
        return join(self._uri, f"turn-{turn:05}.json")
