"""YAML without silent losses: a key that is given twice is refused, where PyYAML keeps the last value."""

from __future__ import annotations

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Read a YAML document of plain values.

    Raises:
        yaml.YAMLError: it is not valid, or names a key twice in one mapping; the text says where.
    """
    return yaml.load(text, _UniqueKeys)  # a subclass of the safe loader


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if id(node) not in self._checked:  # merging (`<<`) repeats keys on purpose, afterwards
            self._checked.add(id(node))
            _refuse_repeated_keys(node)
        return super().construct_mapping(node, deep)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: set[int] = set()


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen: dict[str, yaml.Node] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, key) is not key:
            first = seen[key.value].start_mark.line + 1
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{key.value!r} is given twice, first on line {first}; keep one of them",
                key.start_mark,
            )
