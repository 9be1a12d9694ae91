import json
import os
from pathlib import Path

import fsspec
import pytest

from jetspec.errors import JetspecError
from jetspec.storage import (
    MANIFEST,
    absolute,
    atomic_write,
    content_hash,
    exists,
    is_complete,
    join,
    list_files,
    read_json,
    read_manifest,
    sha256_file,
    write_json,
    write_manifest,
)
from tests.s3server import BUCKET, S3Server, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(params=["local", "memory", "s3"])
def root(request, tmp_path, monkeypatch):
    if request.param == "local":
        return str(tmp_path)
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    use(request.getfixturevalue("server"), monkeypatch)
    return f"s3://{BUCKET}/{tmp_path.name}"


def use(server: S3Server, monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in {**server.environment(), **changes}.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").clear_instance_cache()


def test_a_written_file_reads_back(root):
    uri = join(root, "stage", "a.json")
    write_json(uri, {"b": "ü", "a": [1]})
    assert exists(uri)
    assert read_json(uri) == {"a": [1], "b": "ü"}
    assert list_files(join(root, "stage")) == ["a.json"]


def test_a_failed_write_leaves_nothing(root):
    uri = join(root, "stage", "a.bin")
    with pytest.raises(KeyError), atomic_write(uri) as file:
        file.write(b"half of it")
        raise KeyError("killed in the middle")
    assert not exists(uri)
    assert list_files(join(root, "stage")) == []


def test_a_failed_rewrite_keeps_the_old_file(root):
    uri = join(root, "a.bin")
    with atomic_write(uri) as file:
        file.write(b"old")
    with pytest.raises(KeyError), atomic_write(uri) as file:
        file.write(b"new")
        raise KeyError("killed in the middle")
    fs, path = fsspec.core.url_to_fs(uri)
    assert fs.cat_file(path) == b"old"


def test_a_directory_is_complete_only_with_its_manifest(root):
    directory = join(root, "samples")
    with atomic_write(join(directory, "shard.bin")) as file:
        file.write(b"x" * 6_000_000)
    assert not is_complete(directory)
    with pytest.raises(JetspecError, match="no manifest"):
        read_manifest(directory, kind="samples")
    written = write_manifest(directory, kind="samples", config_hash="c" * 64, rows=3)
    assert is_complete(directory)
    assert read_manifest(directory, kind="samples") == written
    assert written["rows"] == 3
    facts = written["files"]["shard.bin"]
    assert facts == {
        "size": 6_000_000,
        "sha256": sha256_file(join(directory, "shard.bin")),
    }


def test_an_altered_file_is_refused(root):
    directory = join(root, "samples")
    with atomic_write(join(directory, "shard.bin")) as file:
        file.write(b"abcd")
    write_manifest(directory, kind="samples", config_hash="c")
    with atomic_write(join(directory, "shard.bin")) as file:
        file.write(b"abce")
    assert read_manifest(directory, kind="samples", verify=False)
    with pytest.raises(JetspecError, match="shard.bin"):
        read_manifest(directory, kind="samples")


def test_a_missing_file_is_refused_even_without_hashing(root):
    directory = join(root, "samples")
    with atomic_write(join(directory, "shard.bin")) as file:
        file.write(b"abcd")
    write_manifest(directory, kind="samples", config_hash="c")
    fs, path = fsspec.core.url_to_fs(join(directory, "shard.bin"))
    fs.rm_file(path)
    with pytest.raises(JetspecError, match="shard.bin"):
        read_manifest(directory, kind="samples", verify=False)


def test_the_manifest_of_another_kind_is_refused(root):
    write_manifest(join(root, "d"), kind="head", config_hash="c")
    with pytest.raises(JetspecError, match="holds head"):
        read_manifest(join(root, "d"), kind="samples")


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"kind": "samples"}'])
def test_a_broken_manifest_is_one_clear_line(root, text):
    with atomic_write(join(root, "d", MANIFEST), "w") as file:
        file.write(text)
    with pytest.raises(JetspecError) as caught:
        read_manifest(join(root, "d"), kind="samples")
    assert MANIFEST in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(root):
    with pytest.raises(JetspecError, match="not found"):
        read_json(join(root, "nothing.json"))


def test_another_process_s_files_are_seen(root):
    directory = join(root, "d")
    assert list_files(directory) == []
    fs, path = fsspec.core.url_to_fs(directory, skip_instance_cache=True)
    fs.makedirs(path, exist_ok=True)
    fs.pipe_file(f"{path}/late.bin", b"1")
    assert list_files(directory) == ["late.bin"]


def test_wrong_credentials_are_one_clear_line(server, monkeypatch):
    use(server, monkeypatch, AWS_SECRET_ACCESS_KEY="wrong")
    with (
        pytest.raises(JetspecError, match="cannot be written") as caught,
        atomic_write(f"s3://{BUCKET}/denied.bin") as file,
    ):
        file.write(b"1")
    assert "\n" not in str(caught.value)


def test_an_unreadable_store_is_one_clear_line(server, monkeypatch):
    use(server, monkeypatch, AWS_SECRET_ACCESS_KEY="wrong")
    for read in (read_json, exists, list_files, sha256_file):
        with pytest.raises(JetspecError, match="cannot be read") as caught:
            read(f"s3://{BUCKET}/ready")
        assert "\n" not in str(caught.value)


def test_an_unreachable_store_is_one_clear_line(server, monkeypatch):
    use(server, monkeypatch, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1")
    with pytest.raises(JetspecError, match="cannot be read"):
        exists(f"s3://{BUCKET}/ready")


def test_a_bucket_that_is_not_there_is_one_clear_line(server, monkeypatch):
    use(server, monkeypatch)
    with (
        pytest.raises(JetspecError, match="cannot be written"),
        atomic_write("s3://no/x") as file,
    ):
        file.write(b"1")


def test_a_read_only_place_is_one_clear_line():
    with (
        pytest.raises(JetspecError, match="cannot be written"),
        atomic_write("/proc/jetspec/x") as file,
    ):
        file.write(b"1")


def test_a_full_disk_leaves_nothing(tmp_path):
    uri = str(tmp_path / "big.bin")
    with pytest.raises(JetspecError, match="No space left"), atomic_write(uri) as file:
        file.write(b"part")
        raise OSError(28, os.strerror(28))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_writer_are_not_listed_in_a_manifest(tmp_path):
    (tmp_path / "shard.bin").write_bytes(b"1")
    (tmp_path / "shard.bin.1234.part").write_bytes(b"half")
    manifest = write_manifest(str(tmp_path), kind="samples", config_hash="c")
    assert list(manifest["files"]) == ["shard.bin"]


def test_an_unknown_scheme_is_one_clear_line():
    with pytest.raises(JetspecError, match="cannot be opened"):
        exists("nosuch://bucket/x")


def test_content_hash_ignores_key_order_and_sees_values():
    assert content_hash({"a": 1, "b": [2]}) == content_hash(json.loads('{"b": [2], "a": 1}'))
    assert content_hash({"a": 1}) != content_hash({"a": 2})


def test_absolute_keeps_remote_uris(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert absolute("runs") == str(Path(tmp_path) / "runs")
    assert absolute("s3://bucket/runs") == "s3://bucket/runs"
