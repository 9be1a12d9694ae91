"""What the page is made of: records, manifests and findings, wherever they lie."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetspec.errors import JetspecError
from jetspec.storage import MANIFEST, content_hash, exists, filesystem, join, list_files, read_json

Record = dict[str, Any]
FINDINGS = "findings.json"
_PASSED_OVER = {"turns", "checkpoints"}


@dataclass
class Inputs:
    """Everything that was found.

    Attributes:
        records: cells of evaluations and replays, finished or not.
        heads: of every trained head: its manifest's facts, `uri`, `hash`, `curve`, `environment`.
        samples: of every regeneration: its manifest's facts, `uri` and `hash`.
        findings: what ablations found, each with its `uri`.
    """

    records: list[Record] = field(default_factory=list)
    heads: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    findings: list[Record] = field(default_factory=list)


def read_inputs(paths: Sequence[str]) -> Inputs:
    """Read stage directories, whole storages of runs, record files, and findings.

    Weights and samples need not lie beside their manifests: nothing but small JSON is read.

    Raises:
        JetspecError: a path that is not there, or no record of an evaluation in any of them.
    """
    found = Inputs()
    for path in paths:
        if not exists(path):
            raise JetspecError("RECORDS", path, "not found; give directories or files of records")
        _read(path, found)
    if not found.records:
        where = ", ".join(paths) or "nothing"
        raise JetspecError("RECORDS", where, "no record of an evaluation; give its directory")
    return found


def _read(uri: str, found: Inputs) -> None:
    fs, path = filesystem(uri)
    if not fs.isdir(path):
        _read_file(uri, found)
        return
    names = list_files(uri)
    manifest = read_json(join(uri, MANIFEST)) if MANIFEST in names else {}
    kind = manifest.get("kind")
    if kind == "head":
        found.heads.append(_head(uri, manifest, names))
    elif kind == "samples":
        hash_ = content_hash(manifest["files"])
        found.samples.append({**_facts(manifest), "uri": uri, "hash": hash_})
    if FINDINGS in names:
        found.findings.append({**read_json(join(uri, FINDINGS)), "uri": uri})
    cells = [name for name in names if name.startswith("cell-") and name.endswith(".json")]
    found.records += [read_json(join(uri, name)) for name in cells]
    inner = sorted(e["name"] for e in fs.ls(path, detail=True) if e["type"] == "directory")
    for name in (one.rstrip("/").rsplit("/", 1)[-1] for one in inner):
        if name not in _PASSED_OVER:
            _read(join(uri, name), found)


def _read_file(uri: str, found: Inputs) -> None:
    if uri.endswith(".jsonl"):
        fs, path = filesystem(uri)
        with fs.open(path, "r", encoding="utf-8") as lines:
            values: Iterable[Any] = [json.loads(line) for line in lines if line.strip()]
    else:
        values = [read_json(uri)]
    for value in values:
        if isinstance(value, dict) and {"method", "status", "per_prompt"} <= value.keys():
            found.records.append(value)
        elif isinstance(value, dict) and value.get("kind") in ("head", "samples"):
            known = found.heads if value["kind"] == "head" else found.samples
            known.append(value)
        elif isinstance(value, dict) and {"tables", "variants"} <= value.keys():
            found.findings.append({**value, "uri": uri})
        else:
            raise JetspecError("RECORDS", uri, "holds no records, manifests or findings")


def _head(uri: str, manifest: Record, names: Sequence[str]) -> Record:
    training = read_json(join(uri, "training.json")) if "training.json" in names else {}
    return {
        **_facts(manifest),
        "uri": uri,
        "hash": content_hash(manifest["files"]),
        "curve": training.get("curve", []),
        "environment": training.get("environment"),
    }


def _facts(manifest: Record) -> Record:
    return {name: value for name, value in manifest.items() if name != "files"}
