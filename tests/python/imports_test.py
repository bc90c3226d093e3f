"""Who imports whom in the package: the client imports sessions and pages, and none of what it imports imports the client."""

from __future__ import annotations

import ast
import unittest
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "python"


def imports(module: str) -> set[str]:
    """The modules of the package that one imports, also for types alone and in functions."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if (PACKAGE / (name.replace(".", "/") + ".py")).is_file()}


class Imports(unittest.TestCase):
    def test_nothing_that_the_client_imports_imports_the_client(self) -> None:
        seen: set[str] = set()
        waiting = imports("kvtier.client")
        while waiting:
            module = waiting.pop()
            seen.add(module)
            self.assertNotIn("kvtier.client", imports(module), module)
            waiting |= imports(module) - seen
        self.assertLess({"kvtier.session", "kvtier.pages", "kvtier.lease"}, seen)


if __name__ == "__main__":
    unittest.main()
