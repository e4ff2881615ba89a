"""YAML as users write it: safe types only, no key twice, and errors of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from . import checks


class _Loader(yaml.SafeLoader):
    """PyYAML's own takes the last of two equal keys and says nothing, so that half of a file has no effect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {checks.shown(key.value)} is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def load(text: str, where: str) -> Any:
    """Return the plain data that ``text`` describes. Raises ``ValueError`` in one line that begins with ``where``."""
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, " ".join(str(error.problem).split())
        place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{where}: not valid YAML{place}: {problem}") from error
    except yaml.reader.ReaderError as error:
        raise ValueError(f"{where}: not valid YAML: {error.reason}, at character {error.position}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: not valid YAML: it is nested too deeply") from error
    finally:
        if loader is not None:
            loader.dispose()


def read(path: Path) -> Any:
    """Return the plain data of a file. Raises ``ValueError`` as :func:`load`, also for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not valid YAML: it is not UTF-8 text") from error
    return load(text, str(path))
