import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jetspec.errors import JetspecError
from jetspec.samples import (
    SCHEMA,
    Accounting,
    Sample,
    SampleColumns,
    SampleWriter,
    read_columns,
    read_samples,
    read_shard,
    sample_id,
    samples_hash,
    shard_count,
    shard_name,
)


def sample(name: str = "a", status: str = "ok", **changes: object) -> Sample:
    values = {
        "id": name * 64,
        "prompt_id": name * 12,
        "slice": "math",
        "status": status,
        "messages": (
            {"role": "user", "content": "为什么?"},
            {"role": "assistant", "content": "So.\n"},
        ),
        "input_ids": [1, 70_000, 3],
        "loss_mask": [0, 1, 1],
        "sample_index": 0,
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path):
    return str(tmp_path) if request.param == "local" else f"memory://samples/{tmp_path.name}"


def test_samples_read_back_as_they_were_written(directory):
    writer = SampleWriter(directory)
    shards = {0: [sample("a"), sample("b", "truncated")], 1: [], 2: [sample("c", sample_index=3)]}
    for index, samples in shards.items():
        assert not writer.is_written(index)
        assert writer.write(index, samples) == writer.uri(index)
        assert writer.is_written(index)
        assert read_shard(writer.uri(index)) == samples
    assert read_samples(directory) == [*shards[0], *shards[2]]


def test_looping_samples_are_left_out_unless_asked_for(directory):
    writer = SampleWriter(directory)
    writer.write(0, [sample("a"), sample("b", "truncated"), sample("c", "looping")])
    assert [s.status for s in read_samples(directory)] == ["ok", "truncated"]
    assert [s.status for s in read_samples(directory, statuses=("looping",))] == ["looping"]


def test_shards_keep_their_order_beyond_the_padding(directory):
    writer = SampleWriter(directory)
    for index, name in ((3, "b"), (0, "a"), (99_999, "c")):
        writer.write(index, [sample(name)])
    assert [s.id[0] for s in read_samples(directory)] == ["a", "b", "c"]
    assert shard_name(7) == "shard-00007.parquet"
    assert [shard_count(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_same_samples_are_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        SampleWriter(str(tmp_path / name)).write(0, [sample("a"), sample("b")])
    files = [tmp_path / name / shard_name(0) for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_written_shard_is_never_rewritten(tmp_path):
    writer = SampleWriter(str(tmp_path))
    writer.write(0, [sample("a")])
    before = Path(writer.uri(0)).read_bytes()
    writer.write(0, [sample("b")])
    assert Path(writer.uri(0)).read_bytes() == before


def test_a_shard_killed_in_the_middle_does_not_exist(tmp_path, monkeypatch):
    writer = SampleWriter(str(tmp_path))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jetspec.storage.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.write(0, [sample("a")])
    assert not writer.is_written(0)
    with pytest.raises(JetspecError, match="no sample shards"):
        read_samples(str(tmp_path))


def refusal(uri: str) -> str:
    lines = set()
    for reader in (read_samples, read_columns):
        with pytest.raises(JetspecError) as caught:
            reader(uri)
        lines.add(str(caught.value))
    (line,) = lines
    assert "\n" not in line
    return line


def test_columns_are_the_samples_of_several_shards_and_directories(tmp_path):
    lengths = iter([3, 0, 5, 1, 4, 0, 2, 6])
    directories = [str(tmp_path / name) for name in ("one", "two")]
    for start, directory in zip((0, 4), directories, strict=True):
        for shard in (0, 1):
            names = "abcdefgh"[start + 2 * shard :][:2]
            made = []
            for place, name in enumerate(names):
                length = next(lengths)
                tokens = [ord(name) + i for i in range(length)]
                mask = [i % 2 for i in range(length)]
                status = ("ok", "looping", "truncated")[(start + shard + place) % 3]
                made.append(sample(name, status, input_ids=tokens, loss_mask=mask))
            SampleWriter(directory).write(shard, made)
        SampleWriter(directory).write(2, [])
    for statuses in (("ok", "truncated"), ("ok", "truncated", "looping"), ("looping",)):
        found = read_columns(*directories, statuses=statuses)
        expected = SampleColumns.of(read_samples(*directories, statuses=statuses))
        assert len(found) == len(expected) > 1
        assert (found.ids, found.prompt_ids) == (expected.ids, expected.prompt_ids)
        for name in ("tokens", "mask", "offsets"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)


def test_a_token_that_is_missing_is_refused(tmp_path):
    row = {**dataclasses.asdict(sample("a")), "input_ids": [1, None, 3]}
    row["messages"] = list(row["messages"])
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), tmp_path / shard_name(0))
    assert "aaaa" in refusal(str(tmp_path))


@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: b"", lambda d: d[:50] + d[51:]])
def test_a_corrupt_shard_is_one_line_that_names_it(tmp_path, damage):
    writer = SampleWriter(str(tmp_path))
    writer.write(0, [sample("a")])
    writer.write(1, [sample("b")])
    path = Path(writer.uri(1))
    path.write_bytes(damage(path.read_bytes()))
    assert "shard-00001.parquet" in refusal(str(tmp_path))


def test_a_flipped_byte_anywhere_in_the_tokens_is_noticed(tmp_path):
    writer = SampleWriter(str(tmp_path))
    writer.write(0, [sample("a", input_ids=list(range(500)), loss_mask=[1] * 500)])
    path = Path(writer.uri(0))
    clean = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(6)
    assert column.path_in_schema.startswith("input_ids")
    start = column.dictionary_page_offset or column.data_page_offset
    for offset in range(start + 40, start + column.total_compressed_size, 97):
        path.write_bytes(clean[:offset] + bytes([clean[offset] ^ 1]) + clean[offset + 1 :])
        with pytest.raises(JetspecError, match="shard-00000"):
            read_shard(str(path))


def test_another_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / shard_name(0))
    assert "columns" in refusal(str(tmp_path))


def test_a_missing_shard_and_an_empty_directory_are_refused(tmp_path):
    (tmp_path / "notes.parquet").write_text("x")
    assert "no sample shards" in refusal(str(tmp_path))
    with pytest.raises(JetspecError, match="not found"):
        read_shard(str(tmp_path / shard_name(0)))


def test_one_id_twice_is_refused(tmp_path):
    writer = SampleWriter(str(tmp_path))
    writer.write(0, [sample("a")])
    writer.write(1, [sample("b"), sample("a")])
    line = refusal(str(tmp_path))
    assert "shard-00001" in line and "shard-00000" in line


@pytest.mark.parametrize(
    "changes", [{"status": "fine"}, {"loss_mask": [0, 1]}, {"loss_mask": [0, 1, 2]}]
)
def test_a_sample_that_contradicts_itself_is_refused_in_both_directions(tmp_path, changes):
    bad = sample("a", **changes)
    with pytest.raises(ValueError, match="aaaa"):
        SampleWriter(str(tmp_path)).write(0, [bad])
    assert list(tmp_path.iterdir()) == []
    row = {**dataclasses.asdict(bad), "messages": list(bad.messages)}
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), tmp_path / shard_name(0))
    assert "aaaa" in refusal(str(tmp_path))


def test_an_output_that_cannot_be_written_is_one_clear_line():
    with pytest.raises(JetspecError, match="cannot be written"):
        SampleWriter("/proc/jetspec").write(0, [sample("a")])


# Ids


def identity(**changes: object) -> str:
    values = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": None,
        "fingerprint": "f",
        "sampling": {"temperature": 0.0, "seed": 1},
        "sample_index": 0,
        "semantics": "transformers-fp32",
    }
    return sample_id(**{**values, **changes})  # type: ignore[arg-type]


def test_an_id_is_stable_and_ignores_key_order():
    assert identity() == identity(sampling={"seed": 1, "temperature": 0.0})
    assert len(identity()) == 64
    # Ids live in written shards: changing how they are made orphans every one of them.
    assert identity() == "caf6e9b6d85f1a3e22b6903e8204437027547d433c8959b2c4209ffd2fb50a43"


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": [{"role": "user", "content": "b"}]},
        {"tools": [{"name": "search"}]},
        {"fingerprint": "g"},
        {"sampling": {"temperature": 0.5, "seed": 1}},
        {"sample_index": 1},
        {"semantics": "vllm-bf16"},
    ],
)
def test_an_id_changes_with_everything_that_shapes_a_sample(changes):
    assert identity(**changes) != identity()


def test_the_hash_of_a_set_follows_ids_and_order():
    a, b = sample("a"), sample("b")
    assert samples_hash([a, b]) == samples_hash([a, b])
    assert len({samples_hash([a, b]), samples_hash([b, a]), samples_hash([a])}) == 3


# Accounting


def test_every_sample_is_accounted_for():
    samples = [sample("a"), sample("b", "truncated"), sample("c", "looping"), sample("d")]
    account = Accounting.of(samples, failed=2, skipped=1).check()
    assert account == Accounting(in_=7, ok=2, truncated=1, looping=1, failed=2, skipped=1)
    total = (account + Accounting(in_=1, ok=1)).check()
    assert total.facts() == {
        "in": 8,
        "ok": 3,
        "truncated": 1,
        "looping": 1,
        "failed": 2,
        "skipped": 1,
    }
    assert Accounting.from_facts(total.facts()) == total


@pytest.mark.parametrize("off", [-1, 1])
def test_a_sample_too_few_or_too_many_is_noticed(off):
    with pytest.raises(JetspecError, match="accounted for"):
        Accounting(in_=5 + off, ok=3, looping=2).check()


def test_an_account_reads_in_the_order_of_its_sum_however_a_manifest_sorted_it() -> None:
    facts = Accounting(6, 1, 2, 3, 0, 0).facts()
    back = Accounting.from_facts(dict(sorted(facts.items()))).facts()
    assert list(back.items()) == list(facts.items())
    assert list(back) == ["in", "ok", "truncated", "looping", "failed", "skipped"]
