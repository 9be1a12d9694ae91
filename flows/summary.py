"""What a pipeline run tells: progress while it works, figures for MLflow, and the last page."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flows import tracking
from flows.cli_options import where
from jetspec import storage
from jetspec.config import RunConfig
from jetspec.evaluation.figures import write_figures
from jetspec.evaluation.report import cells_table, overview_table
from jetspec.samples import Accounting
from jetspec.stages import StageResult

Record = Mapping[str, Any]


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[int, int, Record], None]]:
    """A bar over the cells of the matrix, and the listener that moves it."""
    columns = (
        TextColumn("evaluate"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bar:
        job = bar.add_task("", total=None)

        def on_progress(done: int, total: int, record: Record) -> None:
            bar.update(job, completed=done, total=total, description=str(record.get("key", "")))

        yield on_progress


def training_curve(head_uri: str) -> list[dict[str, Any]]:
    """Rows {step, loss, ...} of the run that trained a head."""
    uri = storage.join(head_uri, "training.json")
    return list(storage.read_json(uri).get("curve", [])) if storage.exists(uri) else []


def log_figures(run: tracking.Run, records: Sequence[Record], head: StageResult) -> None:
    """The matrix, tau by budget, acceptance by depth and the loss, as pictures of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run.log_files(write_figures(records, folder, training_curve(head.uri)))


def outcome(
    run: RunConfig,
    parent: tracking.Run,
    samples: StageResult,
    head: StageResult,
    chosen: str,
    evaluation: StageResult,
    promotion: StageResult,
) -> dict[str, Any]:
    """Every stage's outcome as small JSON values."""
    return {
        "run": run.name,
        "run_id": parent.run_id,
        "tracking_uri": parent.uri,
        "samples": {
            "uri": samples.uri,
            "reused": samples.reused,
            "regenerated": 0 if samples.reused else samples.facts["accounting"]["in"],
            "accounting": samples.facts["accounting"],
        },
        "head": {
            "uri": head.uri,
            "reused": head.reused,
            "tau_estimate": head.facts.get("tau_estimate"),
            "chosen": chosen,
        },
        "evaluation": {
            "uri": evaluation.uri,
            "reused": evaluation.reused,
            **evaluation.facts["summary"],
        },
        "promotion": promotion.facts,
    }


def show_choice(console: Console, facts: Mapping[str, Any]) -> None:
    """One line a head: tau before and after training."""
    after, before = facts["heads"]
    kept = "after" if facts["chosen"] == after["head"] else "before"
    console.print(
        f"tau at budget {facts['budget']} on {facts['prompts']} evaluation prompts: "
        f"{before['tau']:.2f} before training, {after['tau']:.2f} after; going on with {kept}"
    )


def show(
    console: Console, run: RunConfig, records: Sequence[Record], result: Mapping[str, Any]
) -> None:
    """The last page: cells, the pooled view, the verdict, and where to look next."""
    console.print(cells_table(records))
    settings = run.evaluation
    if len({record["slice"] for record in records}) > 1:
        samples, seed = settings.bootstrap_samples, settings.seed
        console.print(overview_table(records, samples=samples, seed=seed))
    samples, promotion = result["samples"], result["promotion"]
    # A manifest's keys come back sorted; the sum is read as in = ok + truncated + ...
    accounting = Accounting.from_facts(samples["accounting"]).facts()
    counts = ", ".join(f"{count} {name}" for name, count in accounting.items())
    console.print(f"\nsamples   {samples['regenerated']} regenerated ({counts})", soft_wrap=True)
    console.print(f"head      {result['head']['chosen']}", soft_wrap=True)
    for reason in promotion["reasons"]:
        mark = "[green]pass[/green]" if reason["passed"] else "[red]stop[/red]"
        console.print(f"gate      {mark} {reason['gate']}: {reason['detail']}", soft_wrap=True)
    if promotion["promoted"]:
        console.print(
            f"champion  [bold]{promotion['name']} version {promotion['champion']}[/bold]",
            soft_wrap=True,
        )
    else:
        console.print(f"champion  unchanged ({promotion['champion'] or 'none'})", soft_wrap=True)
    show_next(console, run, promotion["champion"])


def show_next(console: Console, run: RunConfig, champion: int | None) -> None:
    """Commands that look at what the run left, as they can be pasted: one line each."""
    place = where(run.storage, run.tracking.uri)
    steps = [(f"jetspec compare{place}", "the registered heads side by side")]
    if champion is not None:
        steps = [
            (f"jetspec registry show{place}", "the champion, its figures and its lineage"),
            (f'jetspec generate "..."{place}', "a prompt decoded with it, coloured by round"),
        ]
    if storage.is_local(run.storage):
        steps.append((f"jetspec up{where(run.storage)}", "Prefect and MLflow in the browser"))
    width = max(len(command) for command, _ in steps)
    console.print()
    for i, (command, what) in enumerate(steps):
        line = f"{'' if i else 'look':9} {command:{width}}  # {what}"
        console.print(line, soft_wrap=True, markup=False)
