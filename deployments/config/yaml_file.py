"""Reads YAML files strictly: one reader for Serve config files and for the scenarios of load tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class YamlFileError(ValueError):
    """The file cannot be read, is not YAML, or gives a key twice. The message is one line that begins with the path."""


def read_yaml(path: str | Path) -> Any:
    """The value in the file. Raises YamlFileError."""
    try:
        with open(path, encoding="utf-8") as file:
            return yaml.load(file, Loader=_UniqueKeyLoader)
    except OSError as error:
        raise YamlFileError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise YamlFileError(f"{path}: not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise YamlFileError(f"{where}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise YamlFileError(f"{path}: {' '.join(str(error).split())}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that is given twice. YAML itself would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen and key_node.value != "<<":
                    raise yaml.MarkedYAMLError(
                        problem=f"key {key_node.value} is given twice", problem_mark=key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)
