"""The page: one that a person reads in five minutes, every sentence of it from the figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.report import ELSEWHERE
from jetspec.results import tables
from jetspec.results.cells import SETS, Subject
from jetspec.results.claims import ablation_sentences, unanswered
from jetspec.results.compare import FAILS, HOLDS, Claim, find
from jetspec.results.cost import FORMULA, Cost
from jetspec.results.goals import Goal
from jetspec.results.inputs import Record
from jetspec.results.serving import Serving

WANTED: dict[str, tuple[Any, ...]] = {
    "sets": tuple(name for name in SETS if name != "livecodebench"),
    "batch_sizes": (1, 2, 4, 8, 16),
    "temperatures": (0.0, 1.0),
    "methods": ("plain", "hf_eager", "lookup", "chain", "tree"),
    "budgets": (16, 32, 64, 128, 256),
}
_READING = (
    "tau: tokens committed per round, bonus included, prefill not counted; ± is half its 95 % "
    "interval, a bootstrap over prompts. Budgets count draft nodes, the root not. Speed-ups are "
    "decode-only, drafting inside the clock, over plain decoding (AR) by the same decoder in the "
    "same run; they are withheld where the output check failed. `summary.json` has every cell with "
    "its intervals, `records.jsonl` the rounds and clocks they rest on."
)


@dataclass(frozen=True)
class Contents:
    """Everything the page says, for the subject that it is about."""

    subject: Subject
    others: Sequence[Subject]
    goals: Sequence[Goal]
    claims: Sequence[Claim]
    served: Serving | None
    cost: Cost
    findings: Sequence[Record]
    plots: Mapping[str, str]
    command: str


def page(contents: Contents) -> str:
    """The page as Markdown."""
    lines = [
        *_title(contents),
        *_short(contents),
        *_tables(contents),
        *_loads(contents),
        *_section("Cost", [*tables.cost_lines(contents.cost), "", f"Formula: {FORMULA}."]),
        *_section("What holds and what does not", _claims(contents)),
        *_section("What was not measured", _unmeasured(contents)),
        *_section("How this was made", _made(contents)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"## {title}", "", *lines]


def _title(contents: Contents) -> list[str]:
    subject = contents.subject
    records = [*subject.decoded, *subject.replayed]
    where = sorted({place(r) for r in records})
    prompts = max((r["prompts"] for r in records), default=0)
    limit = max((r["settings"]["max_new_tokens"] for r in records), default=0)
    return [
        f"# Results: {subject.target}",
        "",
        f"Head `{subject.head}`; up to {prompts} prompts a set, up to {limit} new tokens each; "
        f"measured on {', '.join(where)}. This page is written by `{contents.command}` from the "
        "records beside it.",
        "",
        _READING,
    ]


def place(record: Mapping[str, Any]) -> str:
    """What a record was measured on, in words."""
    environment = record["environment"]
    gpus = environment.get("gpus") or []
    return ", ".join(sorted(set(gpus))) or f"{environment.get('cpus')} CPU cores"


def _short(contents: Contents) -> list[str]:
    outcomes = [goal.outcome.partition(",")[0] for goal in contents.goals]
    counts = {word: outcomes.count(word) for word in dict.fromkeys(outcomes)}
    shown = ", ".join(f"{count} {word}" for word, count in counts.items())
    verdicts = [claim.verdict for claim in contents.claims]
    lines = [
        f"Of {len(outcomes)} goals: {shown}. Of {len(verdicts)} claims "
        f"{verdicts.count(HOLDS)} hold and {verdicts.count(FAILS)} do not; the others are not "
        "decided or not measured.",
        "",
        *tables.goals_table(contents.goals),
    ]
    return _section("In short", lines)


def _tables(contents: Contents) -> list[str]:
    lines: list[str] = []
    for subject in (contents.subject, *contents.others):
        title = "" if subject is contents.subject else f" ({_described(subject)})"
        for temperature in sorted({r["temperature"] for r in subject.decoded}):
            table = tables.speed_and_tau(subject, temperature)
            if table:
                heading = f"Speed-up / tau at batch 1, temperature {temperature:g}{title}"
                lines += _section(heading, table)
        if subject.replayed:
            text = [
                "Exact for greedy decoding: every method's rounds along the target's own answers.",
                "",
                *tables.tau_tables(subject),
            ]
            lines += _section(f"tau of every budget, replayed{title}", text)
    decoders = {r.get("decoder") for r in contents.subject.decoded}
    if {"reference", "engine"} <= decoders:
        lines += ["", ELSEWHERE]
    return lines + _images(contents, "tau_by_budget", "speedup_by_budget", "acceptance_by_depth")


def _described(subject: Subject) -> str:
    depth = f", drafted to depth {subject.depth}" if subject.depth else ""
    return f"{subject.target}, {subject.head}{depth}"


def _images(contents: Contents, *names: str) -> list[str]:
    found = [f"{name}.png" for name in names if f"{name}.png" in contents.plots]
    return ["", *(f"![{contents.plots[name]}]({name})" for name in found)] if found else []


def _loads(contents: Contents) -> list[str]:
    served = contents.served
    if served is None:
        return _section("Loads", ["No batch size has plain cells to compare with."])
    lines = [
        f"Tokens a second by batch size, {', '.join(served.sets)} pooled, temperature 0; bold: the "
        "serving table's choice.",
        "",
        *tables.loads_table(served),
        "",
        *tables.choices_table(served),
    ]
    if len(served.loads) > 1:
        batches = ", ".join(str(load.batch_size) for load in served.loads)
        lines += [
            "",
            f"Over the load range (batch sizes {batches}, weighted equally; the score is the mean "
            "speed-up over AR at the same batch size):",
            "",
            *tables.scores_table(served),
        ]
        if served.held_out:
            loss, table, fixed = served.held_out
            lines += [
                "",
                "A choice made and judged on the same clocks flatters itself. Chosen on one half "
                f"of the batches of prompts and judged on the other, the table is {loss:.1%} "
                f"slower than the best fixed choice at the worst load, and over the range it "
                f"reaches {table:.2f}x where the fixed budget chosen alike reaches {fixed:.2f}x.",
            ]
    return _section("Loads and the serving table", lines) + _images(contents, "throughput_by_batch")


def _claims(contents: Contents) -> list[str]:
    lines = tables.claims_list(contents.claims)
    said = ablation_sentences(contents.findings)
    if said:
        lines += ["", "From the ablations (equal training; see `summary.json`):", ""]
        lines += [f"- {one}" for one in said]
    return lines


def _unmeasured(contents: Contents) -> list[str]:
    subject = contents.subject
    lines = tables.missing(subject, WANTED)
    lines += tables.failures(subject)
    lines += tables.withheld(subject)
    questions = unanswered(contents.findings, subject.sets, contents.claims)
    lines += [f"- open question: {one}" for one in questions]
    if contents.served and contents.served.left_out:
        loads = ", ".join(map(str, contents.served.left_out))
        lines.append(f"- batch sizes {loads} on the sets of the load range")
    few = sorted({r["slice"] for r in subject.decoded if r["method"] == "hf_eager"})
    if few:
        count = max(r["prompts"] for r in find(subject.decoded, method="hf_eager"))
        lines.append(
            f"- prompts of a set that Hugging Face's eager loop decoded: {count} at most; "
            "speed-ups over it rest on those"
        )
    lines += [
        "- intervals are over prompts: another training seed may move every figure",
        "- answers end at the token limit; longer answers are not in these figures",
        "- load is a batch of prompts that empties, not a queue of arriving requests",
    ]
    return lines


def _made(contents: Contents) -> list[str]:
    lines = ["```"]
    lines += commands(contents)
    lines += [contents.command, "```"]
    versions = sorted(
        {
            ", ".join(
                f"{name} {version}"
                for name, version in sorted(r["environment"]["versions"].items())
            )
            for r in [*contents.subject.decoded, *contents.subject.replayed]
        }
    )
    seeds = sorted({r["settings"]["seed"] for r in contents.subject.decoded})
    lines += ["", f"Versions: {'; '.join(versions)}. Seeds: {', '.join(map(str, seeds)) or '-'}."]
    lines += _images(contents, "training")
    return lines


def commands(contents: Contents) -> list[str]:
    """The commands behind the figures, in the order of the pipeline, each once."""
    stages = [contents.cost.regeneration, contents.cost.training]
    made = [part for part in stages if part] + [
        *contents.subject.replayed, *contents.subject.decoded
    ]  # fmt: skip
    found = [(part.get("environment") or {}).get("command") for part in made]
    return [as_typed(command) for command in dict.fromkeys(found) if command]


def as_typed(command: str) -> str:
    """A recorded command as a person types it."""
    return command.replace("__main__.py", "python -m jetspec", 1)
