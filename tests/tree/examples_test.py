"""The examples in the comments of the public headers: each header that declares something has one, and the compiler takes it.

    examples_test.py CXX CC
"""

from __future__ import annotations

import re
import subprocess
import sys
import unittest
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "include"
CXX, CC = sys.argv[1], sys.argv[2]
WITHOUT = {"export.h", "version.h"}  # macros alone

# What examples use and do not make.
CPP = """
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>
#include <kvtier/admin.h>
#include <kvtier/calibration.h>
#include <kvtier/client.h>
#include <kvtier/device_memory.h>
#include <kvtier/engine.h>
#include <kvtier/memory.h>
#include <kvtier/page_tier.h>
#include <kvtier/paged.h>
#include <kvtier/remote_tiers.h>
void run_steps();
extern kvtier::Engine engine;
extern kvtier::Session session;
extern kvtier::TensorView keys, values, query, key, value;
extern kvtier::MutableTensorView out;
extern kvtier::DeviceMemoryHandle handle;
extern kvtier::TensorView slots;
extern kvtier::PagedBatch batch;
extern kvtier::PagedLayer cache;
extern std::shared_ptr<kvtier::PageTier> tier;
"""
C = "#include <kvtier/kvtier.h>\n#include <stdio.h>\n"


def examples(header: Path) -> list[tuple[str, str]]:
    """Returns the language and the code of each fenced block in the comments of a header."""
    text = re.sub(r"(?m)^\s*(?:///| \*) ?", "", header.read_text())
    return re.findall(r"(?ms)^```(cpp|c)\n(.*?)^```$", text)


class Examples(unittest.TestCase):
    def compile(self, code: str, *command: str) -> None:
        done = subprocess.run([*command, "-fsyntax-only", f"-I{INCLUDE}", "-"], input=code, text=True, capture_output=True, timeout=120)
        self.assertEqual(done.returncode, 0, f"{code}\n{done.stderr}")

    def test_every_public_header_has_one(self) -> None:
        without = {path.name for path in (INCLUDE / "kvtier").glob("*.h") if not examples(path)}
        self.assertEqual(without, WITHOUT)

    def test_all_compile(self) -> None:
        functions = {"cpp": CPP, "c": C}
        for path in sorted((INCLUDE / "kvtier").glob("*.h")):
            for i, (language, code) in enumerate(examples(path)):
                functions[language] += f"void {path.stem}_{i}(void);\nvoid {path.stem}_{i}(void) {{\n{code}}}\n"
        self.compile(functions["cpp"], CXX, "-std=c++20", "-Wall", "-Werror", "-xc++")
        self.compile(functions["c"], CC, "-std=c11", "-Wall", "-Werror", "-pedantic-errors", "-xc")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
