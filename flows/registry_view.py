"""Registered heads as a reader meets them: tables for the terminal."""

import json
from collections.abc import Sequence
from datetime import datetime

from rich.table import Table

from flows.registered import ChampionRecord, Version

_LINEAGE = (
    "target_fingerprint",
    "data_manifest_sha256",
    "prompts_hash",
    "code_version",
    "config_hash",
    "config_uri",
    "run_id",
    "samples_uri",
    "head_uri",
    "evaluation_uri",
)


def versions_table(name: str, versions: Sequence[Version]) -> Table:
    """One column a version, newest first; a row a figure."""
    slices = sorted({k for v in versions for k in v.metrics if k.startswith("tau/")})
    table = Table(
        title=name, caption="tau and speed-up over plain decoding: 95 % intervals, all slices"
    )
    table.add_column("", style="bold", no_wrap=True)
    for version in versions:
        table.add_column(f"version {version.version}", no_wrap=True)
    rows = {
        "alias": [", ".join(v.aliases) or "-" for v in versions],
        "tau": [interval(v.metrics, "tau") for v in versions],
        "x plain": [interval(v.metrics, "speedup_vs_plain") for v in versions],
        **{
            f"tau {s.removeprefix('tau/')}": [interval(v.metrics, s) for v in versions]
            for s in slices
        },
        "target": [v.fingerprint[:12] for v in versions],
        "code": [v.tags.get("code_version", "-") for v in versions],
        "made": [made(v) for v in versions],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def made(version: Version) -> str:
    when = datetime.fromtimestamp(version.created / 1000).astimezone()
    return when.strftime("%Y-%m-%d %H:%M")


def champion_table(champion: ChampionRecord) -> Table:
    """The champion, one line a fact."""
    from jetspec.evaluation.budgets import describe

    table = Table(title=f"{champion.name} version {champion.version}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("tau", interval(champion.metrics, "tau"))
    table.add_row("x plain", interval(champion.metrics, "speedup_vs_plain"))
    rows = (champion.serving_table or {}).get("rows", [])
    table.add_row("serving table", describe(rows) or "empty")
    table.add_row("previous champion", str(champion.previous_champion or "none"))
    for key in _LINEAGE:
        table.add_row(key.replace("_", " "), str(champion.lineage.get(key) or "-"))
    table.add_row("target", json.dumps(champion.lineage.get("target"), ensure_ascii=False))
    return table


def interval(metrics: dict[str, float], name: str) -> str:
    if name not in metrics:
        return "-"
    low, high = metrics.get(f"{name}_lo"), metrics.get(f"{name}_hi")
    tail = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{metrics[name]:.2f}{tail}"
