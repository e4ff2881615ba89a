"""The directory that a model's frontend runs from: configuration and tokenizer files, no weights."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import zipfile
from pathlib import Path, PurePosixPath

from ..folder import Folder

PREFIX = "npufleet-gateway-"
MAX_UNPACKED_BYTES = 1 << 30
_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")
_WEIGHTS = (".safetensors.index.json", ".bin.index.json")


def unpack(archive: bytes, into: Path) -> None:
    """Write the files of a GetTokenizer archive into ``into``.

    Raises ``ValueError`` for an entry that is not a plain file name and for more than ``MAX_UNPACKED_BYTES``.
    """
    try:
        bundle = zipfile.ZipFile(io.BytesIO(archive))
    except zipfile.BadZipFile as error:
        raise ValueError(f"the tokenizer archive is not a zip file: {error}") from error
    with bundle:
        entries = bundle.infolist()
        if sum(entry.file_size for entry in entries) > MAX_UNPACKED_BYTES:
            raise ValueError(f"the tokenizer archive unpacks to more than {MAX_UNPACKED_BYTES} bytes")
        for entry in entries:
            if PurePosixPath(entry.filename).name != entry.filename or entry.is_dir():
                raise ValueError(
                    f"the tokenizer archive has an entry that is no plain file: {entry.filename!r}"
                )
            (into / entry.filename).write_bytes(bundle.read(entry))


def copy_files(source: Path, into: Path) -> None:
    """Copy configuration, tokenizer and model code files of a checkpoint directory."""
    for pattern in _FILES:
        for path in source.glob(pattern):
            if path.is_file() and not path.name.endswith(_WEIGHTS):
                shutil.copyfile(path, into / path.name)


def make_folder(source: str | None, archive: bytes | None) -> Folder:
    """A new folder with the files of ``archive``, or else of the local directory ``source``.

    The weights' quantization is taken out of config.json: no weight is loaded here, and vLLM would check a
    format for NPUs against the CPU.
    """
    folder = Folder(PREFIX)
    with contextlib.ExitStack() as undo:
        undo.callback(folder.close)
        if archive is not None:
            unpack(archive, folder.path)
        else:
            assert source is not None
            copy_files(Path(source), folder.path)
        config = folder.path / "config.json"
        if not config.is_file():
            raise ValueError("the model's files have no config.json")
        content = json.loads(config.read_text())
        if content.pop("quantization_config", None) is not None:
            config.write_text(json.dumps(content))
        undo.pop_all()
    return folder
