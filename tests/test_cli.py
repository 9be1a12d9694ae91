"""Both command lines, from a tiny target to a champion that answers a prompt."""

import importlib.util
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows import generate_view, promote, summary, tracking
from flows.cli import app
from flows.cli_options import STORAGE, where
from flows.registered import ChampionRecord
from jetspec import cli_bench
from jetspec.config import load_config, parse_config
from tests.answers import save_target
from tests.tiny import tiny_target
from tests.workspace import Workspace, invoke, one_line

COMMANDS = [
    "up",
    "down",
    "run",
    "generate",
    "regenerate",
    "train",
    "evaluate",
    "compare",
    "promote",
    "rollback",
    "registry",
    "diagnose",
    "doctor",
    "targets",
    "theory",
    "export",
    "bench",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str, str]:
    """Samples, a head and an evaluation, made by the library's commands; head and evaluation."""
    workspace = Workspace.create(tmp_path_factory.mktemp("project"))
    samples = workspace.stage("regenerate", workspace.run)["uri"]
    head = workspace.stage("train", workspace.run, samples)["uri"]
    evaluation = workspace.stage("evaluate", workspace.run, head)
    assert evaluation["facts"]["summary"]["output_checks"]["failed"] == 0
    return workspace, head, evaluation["uri"]


@pytest.fixture(scope="module")
def registered(made: tuple[Workspace, str, str]) -> Workspace:
    """The head registered as version 1; a random head need not pass the gates."""
    workspace, head, evaluation = made
    config = load_config(workspace.run)
    with tracking.pipeline_run(config) as run:
        result = promote.promote_head(config, head, evaluation, run=run)
    gates = {reason["gate"]: reason for reason in result.facts["reasons"]}
    assert gates["doctor"]["passed"], gates
    assert gates["lossless"]["passed"], gates
    return workspace


def jetspec(workspace: Workspace, *arguments: str) -> Any:
    return invoke(app, *arguments, "--storage", str(workspace.root / "runs"))


def test_every_command_of_the_product_is_there_and_explains_itself() -> None:
    listed = invoke(app, "--help").output
    for command in COMMANDS:
        assert f" {command} " in listed
        assert invoke(app, command, "--help").exit_code == 0


def test_bench_lists_its_tables_and_hands_on_what_follows_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = invoke(app, "bench").output
    ran: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        cli_bench.runpy, "run_module", lambda module, **how: ran.append((module, sys.argv[1:]))
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for table, (module, _) in cli_bench.BENCHES.items():
        assert module in listed and importlib.util.find_spec(module)
        assert invoke(app, "bench", table, "rows", "--json", "FILE", "-h").exit_code == 0
        assert ran.pop() == (module, ["rows", "--json", "FILE", "-h"])
    wrong = invoke(app, "bench", "speed")
    assert wrong.exit_code == 2 and "TABLE: speed: choose from kernels" in wrong.output


def test_help_does_not_import_the_heavy_packages() -> None:
    program = (
        "import sys\nfrom flows.cli import app\napp(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'prefect', 'mlflow', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_second_evaluation_measures_nothing_again(made: tuple[Workspace, str, str]) -> None:
    workspace, head, evaluation = made
    again = workspace.stage("evaluate", workspace.run, head)
    assert again["reused"]
    assert again["uri"] == evaluation


def test_doctor_passes_a_good_head_and_fails_one_of_another_target(
    made: tuple[Workspace, str, str],
) -> None:
    workspace, head, _ = made
    good = workspace.library("doctor", head, "--target", str(workspace.root / "target"))
    assert good.exit_code == 0, good.output
    assert "FAIL" not in good.output
    bad = workspace.library("doctor", str(workspace.root), "--target", f"{workspace.root}/target")
    assert bad.exit_code == 1
    assert "FAIL" in bad.output


def test_an_export_loads_again_and_a_full_directory_is_left_alone(
    made: tuple[Workspace, str, str], tmp_path: Path
) -> None:
    workspace, head, _ = made
    target = str(workspace.root / "target")
    out = str(tmp_path / "speculators")
    options = ("--format", "speculators", "--dtype", "fp32", "--target", target)
    assert workspace.library("export", head, out, *options).exit_code == 0
    assert workspace.library("doctor", out, "--target", target).exit_code == 0
    assert "not empty" in one_line(workspace.library("export", head, out, *options))


@pytest.mark.parametrize("format", ["jetspec", "speculators", "dspark"])
def test_an_export_says_what_the_head_was_trained_for(
    made: tuple[Workspace, str, str], tmp_path: Path, format: str
) -> None:
    workspace, head, _ = made
    trained, changed = json.loads((Path(head) / "config.json").read_text()), tmp_path / "changed"
    assert {"tokenizer_hash", "chat_template_hash", "enable_thinking", "target_name"} <= set(
        trained["jetspec_training"]
    )
    save_target(tiny_target("llama", seed=1), changed)
    options = ("--format", format, "--target", str(changed))
    assert workspace.library("export", head, str(tmp_path / "out"), *options).exit_code == 0
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["jetspec_training"] == trained["jetspec_training"]
    findings = workspace.library("doctor", str(tmp_path / "out"), "--target", str(changed)).stdout
    assert "FAIL  target fingerprint" in findings


def test_targets_shows_shape_and_fingerprint(made: tuple[Workspace, str, str]) -> None:
    workspace, _, _ = made
    shown = workspace.stage("targets", str(workspace.root / "target"))
    assert shown["num_hidden_layers"] == 3
    assert len(shown["fingerprint"]) == 64


def test_a_version_its_gates_refused_is_promoted_only_by_force(registered: Workspace) -> None:
    shown = jetspec(registered, "compare", "--json")
    version = json.loads(shown.stdout)["versions"][0]
    assert version["aliases"] == ["challenger"]
    assert "gates said no" in one_line(jetspec(registered, "promote"))
    assert "no champion" in one_line(jetspec(registered, "registry", "show"))
    assert jetspec(registered, "registry", "list").stdout.split() == [
        json.loads(shown.stdout)["name"],
        "none",
    ]
    forced = jetspec(registered, "promote", "--force", "--json")
    assert json.loads(forced.stdout)["aliases"] == ["challenger", "champion"]


def test_registry_show_gives_metrics_and_lineage_to_a_script(registered: Workspace) -> None:
    jetspec(registered, "promote", "--force")
    shown = json.loads(jetspec(registered, "registry", "show", "--json").stdout)
    assert shown["metrics"]["tau"] >= 1
    assert shown["lineage"]["target"]["source"] == str(registered.root / "target")
    assert len(shown["lineage"]["target_fingerprint"]) == 64
    assert shown["serving_table"]["rows"]
    listed = json.loads(jetspec(registered, "registry", "list", "--json").stdout)
    assert listed == {shown["name"]: 1}
    assert "tau" in jetspec(registered, "registry", "show").output
    assert "champion" in jetspec(registered, "compare").output


def test_generate_answers_with_the_champion_as_plain_decoding_would(registered: Workspace) -> None:
    from jetspec.decode import decode
    from jetspec.sampling import SamplingParams
    from jetspec.targets.load import load_target

    jetspec(registered, "promote", "--force")
    options = ("--max-new-tokens", "12")
    done = jetspec(registered, "generate", "what is a tree?", *options, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    target = load_target(load_config(registered.run).target)
    prompt = target.render([{"role": "user", "content": "what is a tree?"}])
    plain = decode(target, [prompt], max_new_tokens=12).generations[0]
    assert shown["tokens"] == plain.tokens
    assert sum(shown["rounds"]) == len(plain.tokens) - 1
    assert shown["tau"] == pytest.approx(sum(shown["rounds"]) / len(shown["rounds"]))
    shaped = ("--temperature", "0.8", "--top-p", "0.9", "--top-k", "30", "--min-p", "0.02")
    shaped += ("--repetition-penalty", "1.3", "--logit-bias", "7=2", "--seed", "3")
    drawn = jetspec(registered, "generate", "what is a tree?", *options, *shaped, "--json")
    assert drawn.exit_code == 0, drawn.output
    params = SamplingParams(0.8, 0.9, 30, 3, 0.02, 1.3, ((7, 2.0),))
    plain = decode(target, [prompt], sampling=params, max_new_tokens=12).generations[0]
    assert json.loads(drawn.stdout)["tokens"] == plain.tokens
    seen = jetspec(registered, "generate", "what is a tree?", *options)
    figures = seen.output.splitlines()[-1]
    assert figures.startswith("tau ")
    assert "tok/s" in figures
    assert figures.endswith(f"[{shown['model']} version 1]")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--logit-bias", "seven", "--logit-bias"),
        ("--top-p", "0", "top_p"),
        ("--min-p", "2", "min_p"),
    ],
)
def test_a_wrong_sampling_option_is_one_line(
    registered: Workspace, option: str, value: str, field: str
) -> None:
    jetspec(registered, "promote", "--force")
    line = one_line(jetspec(registered, "generate", "why?", option, value))
    assert line.startswith(f"error: {field}: ")


@pytest.mark.parametrize(
    ("asked", "temperature", "builder", "taken"),
    [
        (None, "0", None, "greedy"),
        (None, "0.8", None, "sample_and_match"),
        ("sample_and_match", "0.8", "static", "sample_and_match"),
        ("residual", "0.8", "static", "residual"),
        ("residual", "0.8", "chain", "residual"),
    ],
)
def test_generate_accepts_by_the_rule_that_is_asked_for(
    registered: Workspace, asked: str | None, temperature: str, builder: str | None, taken: str
) -> None:
    from jetspec.decode import decode
    from jetspec.heads.registry import load_head
    from jetspec.sampling import SamplingParams
    from jetspec.targets.load import load_target
    from jetspec.trees.config import TreeConfig

    jetspec(registered, "promote", "--force")
    options = ["--max-new-tokens", "12", "--temperature", temperature, "--seed", "3"]
    options += ["--budget", "4"] if builder else []
    options += ["--builder", builder] if builder else []
    options += ["--rule", asked] if asked else []
    done = jetspec(registered, "generate", "what is a tree?", *options, "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["rule"] == taken
    if builder is None:
        return
    config = load_config(registered.run)
    target = load_target(config.target)
    champion = json.loads(jetspec(registered, "registry", "show", "--json").stdout)
    width = parse_config({}).evaluation.width
    drafter = load_head(champion["head_uri"]).drafter(target, width=width)
    wanted = decode(
        target,
        [target.render([{"role": "user", "content": "what is a tree?"}])],
        drafter=drafter,
        tree=TreeConfig(builder=builder, budget=4, width=width),
        sampling=SamplingParams(float(temperature), seed=3),
        rule=taken,
        max_new_tokens=12,
    ).generations[0]
    assert (shown["tokens"], shown["rounds"]) == (wanted.tokens, wanted.rounds)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", "best"], "--rule: best: choose from greedy, sample_and_match, residual"),
        (["--builder", "bush"], "--builder: bush: choose from chain, "),
        (["--rule", "greedy", "--temperature", "0.5"], "--rule: greedy: needs temperature 0, "),
        (["--rule", "residual"], "--rule: residual: needs a temperature above 0"),
        (["--rule", "residual", "--temperature", "1", "--builder", "best_first"],
         "--rule: residual: draws its candidates into a fixed shape"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_is_one_line(
    registered: Workspace, options: list[str], said: str
) -> None:
    jetspec(registered, "promote", "--force")
    line = one_line(jetspec(registered, "generate", "why?", *options))
    assert line.startswith(f"error: {said}")


@pytest.mark.parametrize("prompt", ["", " \n"])
def test_an_empty_prompt_is_refused(tmp_path: Path, prompt: str) -> None:
    line = one_line(invoke(app, "generate", prompt, "--storage", str(tmp_path / "none")))
    assert line.startswith("error: PROMPT: '")
    assert "is empty; write what a user would ask" in line


@pytest.mark.parametrize("champion", [None, 1])
def test_the_commands_that_a_run_names_at_its_end_work_when_pasted(
    registered: Workspace, champion: int | None
) -> None:
    jetspec(registered, "promote", "--force")
    page = io.StringIO()
    summary.show_next(Console(file=page, width=40), load_config(registered.run), champion)
    commands = [line.removeprefix("look").strip() for line in page.getvalue().splitlines() if line]
    assert len(commands) == (2 if champion is None else 3)
    for command in commands:
        name, *arguments = shlex.split(command, comments=True)
        assert name == "jetspec"
        done = invoke(app, *arguments, *(["--help"] if arguments[0] == "up" else []))
        assert done.exit_code == 0, done.output


def test_the_default_storage_needs_no_option_and_others_are_quoted() -> None:
    assert where(STORAGE) == where(str(Path(STORAGE).absolute())) == ""
    assert where("s3://b/my runs", "http://m") == " --storage 's3://b/my runs' --tracking http://m"


def test_a_first_champion_cannot_be_rolled_back(registered: Workspace) -> None:
    jetspec(registered, "promote", "--force")
    assert "first champion" in one_line(jetspec(registered, "rollback"))


def test_an_unknown_model_names_those_there_are(registered: Workspace) -> None:
    line = one_line(jetspec(registered, "compare", "--model", "jetspec-nope"))
    assert "jetspec-target" in line


def test_a_registry_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    line = one_line(invoke(app, "registry", "show", "--storage", str(tmp_path / "none")))
    assert "holds no MLflow records" in line
    assert not (tmp_path / "none").exists()


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.service.down", interrupt)
    assert invoke(app, "down").exit_code == 130


def words(tokens: list[int]) -> str:
    """A decoder whose third and fourth token are halves of one character."""
    data = [b"a", b" b", "é".encode()[:1], "é".encode()[1:], b"!"]
    return b"".join(data[token] for token in tokens).decode(errors="replace")


def test_pieces_join_to_the_text_and_a_split_character_goes_to_the_round_that_ends_it() -> None:
    pieces = generate_view.pieces([0, 1, 2, 3, 4], [2, 2], words)
    assert pieces == ["a", " b", "é!"]


def test_pieces_leave_out_a_round_that_only_committed_the_stop_token() -> None:
    assert generate_view.pieces([0, 1], [1, 1], words) == ["a", " b", ""]


def test_rounds_next_to_each_other_differ_in_colour() -> None:
    choice = generate_view.Choice("best_first", 4, "as asked")
    answer = generate_view.Answer([0], [1, 1], ["a", "b", "c"], 1.0, "stop", choice, "greedy")
    text = generate_view.colored(answer)
    assert text.plain == "abc"
    assert len({str(span.style) for span in text.spans}) == 2


@pytest.mark.parametrize(
    ("rows", "asked", "builder", "budget"),
    [
        ([{"batch_size": 1, "method": "tree", "builder": "algorithm1", "budget": 32}], None,
         "algorithm1", 32),
        ([{"batch_size": 1, "method": "plain", "builder": None, "budget": 0}], None,
         "best_first", 16),
        ([], 7, "best_first", 7),
    ],
)  # fmt: skip
def test_generate_takes_the_tree_of_the_serving_table_unless_one_is_asked_for(
    rows: list[dict[str, Any]], asked: int | None, builder: str, budget: int
) -> None:
    champion = ChampionRecord("n", 1, "m", "/h", "f", {}, {}, {"rows": rows}, {}, [], None)
    choice = generate_view.choose(champion, parse_config({}), asked)
    assert (choice.builder, choice.budget) == (builder, budget)
    choice = generate_view.choose(champion, parse_config({}), asked, "static")
    assert (choice.builder, choice.budget) == ("static", budget)
