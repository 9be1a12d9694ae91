"""Stages shared out over processes, as torchrun starts them: each piece once, the result of one."""

import json
import multiprocessing
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from jetspec.cli import app
from jetspec.config import parse_config
from jetspec.evaluation.matrix import evaluate, read_records
from jetspec.evaluation.replayed import STAGE, replay
from jetspec.generation.regenerate import regenerate
from jetspec.peers import Peers
from jetspec.storage import list_files, read_manifest
from tests.test_training_loop import _free_port
from tests.tiny_run import tiny_run

COMMANDS = ("regenerate", "evaluate", "replay")
MEASURED = ("key", "status", "prompts", "tau", "rounds", "tokens", "acceptance_by_depth")


def together(size, work):
    """What `work(peers)` gives on every rank, each in a thread; exceptions are results too."""
    store, found = dist.HashStore(), [None] * size

    def run(rank):
        try:
            found[rank] = work(Peers(rank, size, store))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_every_item_is_taken_once_and_sums_are_of_all() -> None:
    def work(peers):
        mine = [(item, peers.add("items", 1)) for item in peers.taken("abcdefghij")]
        peers.wait()
        return mine, peers.add("items", 0), peers.all(peers.rank), list(peers.taken([]))

    found = together(3, work)
    taken = sorted(pair for mine, *_ in found for pair in mine)
    assert [item for item, _ in taken] == list("abcdefghij")
    assert sorted(count for _, count in taken) == list(range(1, 11))
    assert [rest for _, *rest in found] == [[10, [0, 1, 2], []]] * 3


def test_what_rank_0_finds_holds_for_all_and_its_failure_ends_all() -> None:
    assert together(3, lambda peers: peers.same(lambda: peers.rank)) == [0, 0, 0]

    def failing(peers):
        return peers.same(lambda: 1 // peers.rank)

    first, *others = together(3, failing)
    assert isinstance(first, ZeroDivisionError)
    assert all(isinstance(error, SystemExit) and error.code == 1 for error in others)


def write_run(root: Path):
    """(run file, head) of a run with a dozen training prompts in shards of 2."""
    config, head = tiny_run(
        root, methods=["plain", "chain", "tree"], batch_sizes=[1, 2], reference_batch=2
    )
    questions = [{"prompt": f"what is {n} and {m}"} for n in range(3) for m in range(3)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, questions)))
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["regeneration"] = {"batch_size": 2, "shard_size": 2, "max_new_tokens": 8}
    (root / "run.yaml").write_text(json.dumps(raw))
    return raw, head


def _worker(rank, ports, root, head):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "RANK": str(rank)}
    torch.set_num_threads(1)
    for command, port in zip(COMMANDS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        heads = [] if command == "regenerate" else [head]
        with open(root / f"{command}-{rank}.json", "w") as sys.stdout:
            app([command, str(root / "run.yaml"), *heads, "--json"], standalone_mode=False)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """(the run, what each command printed on each rank)."""
    root = tmp_path_factory.mktemp("shared")
    raw, head = write_run(root)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ports = [_free_port() for _ in COMMANDS]
    workers = [
        context.Process(target=_worker, args=(r, ports, root, head), daemon=True) for r in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    printed = {(c, r): (root / f"{c}-{r}.json").read_text() for c in COMMANDS for r in range(2)}
    return raw, head, printed


def test_rank_0_alone_prints_each_result(shared) -> None:
    _, _, printed = shared
    assert all(printed[command, 1] == "" for command in COMMANDS)
    assert all(json.loads(printed[command, 0])["uri"] for command in COMMANDS)


def test_shared_out_samples_are_those_of_one_process(shared, tmp_path) -> None:
    raw, _, printed = shared
    uri = json.loads(printed["regenerate", 0])["uri"]
    alone = parse_config(raw | {"storage": str(tmp_path)})
    files = regenerate(alone)["files"]
    ours = read_manifest(uri, kind="samples")["files"]
    shards = [name for name in files if name.endswith(".parquet")]
    assert len(shards) == 5
    assert {name: ours[name] for name in shards} == {name: files[name] for name in shards}


@pytest.mark.parametrize(("command", "call"), [("evaluate", evaluate), ("replay", replay)])
def test_shared_out_cells_are_those_of_one_process(shared, tmp_path, command, call) -> None:
    raw, head, printed = shared
    uri = json.loads(printed[command, 0])["uri"]
    alone = call(parse_config(raw | {"storage": str(tmp_path)}), head)
    kind = STAGE if command == "replay" else "evaluation"
    ours, theirs = (
        [{k: r[k] for k in MEASURED} for r in read_records(u, kind)] for u in (uri, alone.uri)
    )
    assert ours == theirs and len(ours) >= 4
    assert {cell["status"] for cell in ours} == {"ok"}
    assert not [name for name in list_files(uri) if name.endswith(".part")]
