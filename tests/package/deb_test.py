"""The packages that cpack makes: what is in them, and that it runs from where they are unpacked.

    deb_test.py BUILD WORK CXX

BUILD is a build of everything, WORK a folder of the test's own. Exit status 77, which ctest takes for skipped, without
cpack, dpkg-deb or bash.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

BUILD, WORK, CXX = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ROOT = WORK / "root"
PROGRAM = """
#include <cstdio>
#include <kvtier/engine.h>
int main() {
  kvtier::Config config;
  config.model = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  config.memory.host_bytes = 16 * kvtier::MiB;
  config.memory.max_session_tokens = 1024;
  kvtier::Engine engine(config);
  std::printf("%lld tokens\\n", static_cast<long long>(engine.open().length()));
}
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, **options)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise AssertionError(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def environment() -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(ROOT / "usr/lib"), "PKG_CONFIG_PATH": str(ROOT / "usr/lib/pkgconfig")}


def kvtier(*arguments: str) -> str:
    return run(ROOT / "usr/bin/kvtier", *arguments, env=environment())


def page_text(path: Path) -> str:
    """A manual page without fonts and escaped hyphens."""
    return re.sub(r"\\f[BIR]", " ", gzip.decompress(path.read_bytes()).decode()).replace("\\-", "-")


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        run("cpack", "-G", "DEB", "-B", WORK, cwd=BUILD)
        cls.packages = {path.name.split("_")[0]: path for path in WORK.glob("*.deb")}
        for path in cls.packages.values():
            run("dpkg-deb", "-x", path, ROOT)

    def files(self, package: str) -> set[str]:
        lines = run("dpkg-deb", "-c", self.packages[package]).splitlines()
        return {line.split()[5].removeprefix("./usr/") for line in lines}

    def test_are_one_of_each_component(self) -> None:
        self.assertEqual(set(self.packages), {"kvtier", "libkvtier-dev"})
        control = run("dpkg-deb", "-f", self.packages["kvtier"])
        self.assertRegex(control, r"(?m)^Depends: .*libgrpc\+\+")
        self.assertRegex(control, r"(?m)^Maintainer: \S")

    def test_have_the_licence_and_what_debian_wants(self) -> None:
        for package in self.packages:
            for name in ("LICENSE", "copyright", "changelog.gz"):
                self.assertIn(f"share/doc/{package}/{name}", self.files(package))

    def test_have_the_sdk(self) -> None:
        wanted = {"include/kvtier/engine.h", "include/kvtier/kvtier.h", "include/kvtier/client.h", "lib/libkvtier.so", "lib/libkvtier.so.0",
                  "lib/libkvtier.a", "lib/libkvtier_client.a", "lib/pkgconfig/kvtier.pc", "lib/pkgconfig/kvtier-client.pc",
                  "lib/cmake/kvtier/kvtierConfig.cmake"}
        self.assertEqual(wanted - self.files("libkvtier-dev"), set())

    def test_have_the_programs(self) -> None:
        wanted = {"bin/kvtier", "bin/kvtier-llama", "lib/systemd/user/kvtier.service", "share/man/man1/kvtier.1.gz",
                  "share/man/man1/kvtier-serve.1.gz", "share/man/man1/kvtier-llama.1.gz", "share/bash-completion/completions/kvtier",
                  "share/zsh/vendor-completions/_kvtier", "share/fish/vendor_completions.d/kvtier.fish"}
        self.assertEqual(wanted - self.files("kvtier"), set())
        self.assertRegex(kvtier("--version"), r"^kvtier \d")

    def test_a_program_is_compiled_and_linked_with_the_shared_library(self) -> None:
        (WORK / "program.cc").write_text(PROGRAM)
        flags = run("pkg-config", "--cflags", "--libs", "kvtier", env=environment()).split()
        run(CXX, "-std=c++20", WORK / "program.cc", "-o", WORK / "program", *flags)
        self.assertIn("libkvtier.so.0", run("ldd", WORK / "program", env=environment()))
        self.assertEqual(run(WORK / "program", env=environment()), "0 tokens\n")

    def test_manual_pages_have_every_option(self) -> None:
        pages = ROOT / "usr/share/man/man1"
        commands = re.findall(r"(?m)^  ([a-z]+) ", kvtier("--help").split("Subcommands:")[1])
        self.assertIn("serve", commands)
        for command in commands:
            page = page_text(pages / f"kvtier-{command}.1.gz")
            self.assertEqual(options_in(kvtier(command, "--help")) - options_in(page), set(), command)
            self.assertIn(f"kvtier-{command}", page_text(pages / "kvtier.1.gz"))
        for page in pages.glob("*.gz"):
            self.assertIn(".SH EXIT STATUS\n", page_text(page), page.name)
        if shutil.which("groff"):
            for page in pages.glob("*.gz"):
                done = subprocess.run(["groff", "-man", "-ww", "-z"], input=gzip.decompress(page.read_bytes()), capture_output=True, timeout=60)
                self.assertEqual(done.stderr.decode(), "", page.name)

    def complete(self, *words: str) -> list[str]:
        """What bash offers for the last of these words."""
        script = ('source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvtier; '
                  'if ((${#COMPREPLY[@]})); then printf "%s\\n" "${COMPREPLY[@]}"; fi')
        return run("bash", "-c", script, ROOT / "usr/share/bash-completion/completions/kvtier", *words).split()

    def test_bash_completes_commands_options_and_values(self) -> None:
        self.assertEqual(self.complete("kvtier", "se"), ["serve"])
        self.assertEqual(self.complete("kvtier", "serve", "--row-cache-pol"), ["--row-cache-policy"])
        self.assertEqual(self.complete("kvtier", "serve", "--row-cache-policy", "s"), ["score"])
        self.assertEqual(self.complete("kvtier", "serve", "--row-cache-policy", "=", "c"), ["clock"])
        self.assertEqual(self.complete("kvtier", "serve", "--config", ""), [])  # a file: bash's own
        options = options_in(kvtier("serve", "--help")) | options_in(kvtier("--help"))  # global ones too
        self.assertEqual(set(self.complete("kvtier", "serve", "--")), options)

    def test_other_shells_can_read_theirs(self) -> None:
        scripts = {"zsh": "share/zsh/vendor-completions/_kvtier", "fish": "share/fish/vendor_completions.d/kvtier.fish"}
        for shell, path in scripts.items():
            with self.subTest(shell):
                if not shutil.which(shell):
                    self.skipTest(f"no {shell}")
                run(shell, "-n", ROOT / "usr" / path)


if __name__ == "__main__":
    for tool in ("cpack", "dpkg-deb", "dpkg-shlibdeps", "pkg-config", "bash"):
        if not shutil.which(tool):
            print(f"no {tool}")
            sys.exit(77)
    unittest.main(argv=sys.argv[:1], verbosity=2)
