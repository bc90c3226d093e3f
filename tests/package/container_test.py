#!/usr/bin/env python3
"""Runs the steps of deploy/Dockerfile as far as no daemon is needed, and rates the unit of the system manager.

    container_test.py SOURCE PROGRAM

Checks its instructions, that its packages are those of the distribution that it names, that it configures a tree in
which its target is, and that the packages of its image have every library that PROGRAM (`kvtier` of this build) needs.
Exits with 77 on another distribution, whose packages have other names.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SKIPPED = 77
DISTRIBUTION = "debian 12"
KNOWN = {
    "ARG", "FROM", "RUN", "COPY", "LABEL", "USER", "VOLUME", "ENV", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT"
}  # fmt: skip
SOURCE = Path()
PROGRAM = Path()


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with their lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            found.append((name, " ".join(rest.split())))
    return found


def packages_of(command: str) -> list[str]:
    match = re.search(r"apt-get install -y --no-install-recommends ([^&]*)", command)
    return match.group(1).split() if match else []


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def distribution() -> str:
    text = Path("/etc/os-release").read_text()
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return f'{values.get("ID", "")} {values.get("VERSION_ID", "")}'.replace('"', "")


class DockerfileTest(unittest.TestCase):
    def setUp(self) -> None:
        self.steps = instructions((SOURCE / "deploy" / "Dockerfile").read_text())
        starts = [i for i, (name, _) in enumerate(self.steps) if name == "FROM"]
        self.assertEqual(len(starts), 2, "a stage that builds, and the image")
        self.build = self.steps[starts[0] : starts[1]]
        self.image = self.steps[starts[1] :]

    def all_of(self, steps: list[tuple[str, str]], name: str) -> list[str]:
        return [rest for found, rest in steps if found == name]

    def packages(self, steps: list[tuple[str, str]]) -> list[str]:
        return [package for run in self.all_of(steps, "RUN") for package in packages_of(run)]

    def test_its_instructions_are_good_practice(self) -> None:
        for name, rest in self.steps:
            self.assertIn(name, KNOWN, rest)
            self.assertNotIn(":latest", rest)
            self.assertNotIn("sudo", rest)
        defaults = dict(rest.split("=", 1) for rest in self.all_of(self.steps, "ARG"))
        for rest in self.all_of(self.steps, "FROM"):
            image = rest.split()[0].strip("${}")
            self.assertRegex(defaults[image], r"^debian:12(-slim)?$")
        for run in self.all_of(self.steps, "RUN"):
            self.assertEqual("apt-get update" in run, "apt-get install" in run, run)
            self.assertEqual("apt-get install" in run, bool(packages_of(run)), run)
        self.assertTrue(any("rm -rf /var/lib/apt/lists/*" in run for run in self.all_of(self.image, "RUN")))
        (user,) = self.all_of(self.image, "USER")
        self.assertNotIn(user, ("root", "0"))
        self.assertTrue(any(f"/nologin {user}" in run for run in self.all_of(self.image, "RUN")))
        for name in ("HEALTHCHECK", "ENTRYPOINT"):
            (rest,) = self.all_of(self.image, name)
            self.assertRegex(rest.removeprefix("CMD "), r'^\[".*"\]$', "no shell is process 1")

    def test_it_builds_with_packages_that_there_are(self) -> None:
        packages = self.packages(self.build) + self.packages(self.image)
        self.assertGreater(len(packages), 20)
        listed = output_of("dpkg-query", "--show", "--showformat", "${binary:Package} ${db:Status-Status}\n")
        installed = {line.split()[0].split(":")[0] for line in listed.splitlines() if line.endswith(" installed")}
        self.assertEqual([package for package in packages if package not in installed], [])

    def test_its_configuration_has_its_target(self) -> None:
        (run,) = [run for run in self.all_of(self.build, "RUN") if "cmake -S" in run]
        configure, build = (step.strip() for step in run.split("&&")[:2])
        target = re.search(r"--target (\S+)", build)
        self.assertIsNotNone(target)
        with tempfile.TemporaryDirectory(prefix="kvtier-container-") as folder:
            places = {"/src": str(SOURCE), "/build": folder}
            words = [places.get(word, word) for word in shlex.split(configure)]
            environment = {name: value for name, value in os.environ.items() if name != "CUDACXX"}
            subprocess.run(words, check=True, capture_output=True, text=True, env=environment)
            targets = output_of("cmake", "--build", folder, "--target", "help")
            assert target is not None
            self.assertRegex(targets, rf"(?m)\b{target.group(1)}\b")

    def test_its_image_has_every_library_that_the_program_needs(self) -> None:
        needed = re.findall(r"=> (/\S+)", output_of("ldd", str(PROGRAM)))
        self.assertGreater(len(needed), 5)
        direct = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-d", str(PROGRAM)))
        owners: dict[str, str] = {}
        for path in needed:
            for place in (path, os.path.realpath(path), path.replace("/lib/", "/usr/lib/", 1)):
                found = subprocess.run(["dpkg", "-S", place], capture_output=True, text=True, check=False)
                if found.returncode == 0:
                    owners[os.path.basename(path)] = found.stdout.split(":")[0]
                    break
        given = set(self.packages(self.image))
        for package in sorted(given):
            depends = output_of("dpkg-query", "--show", "--showformat", "${Depends}", package)
            given |= {re.split(r"[ (:]", part.strip())[0] for part in re.split(r"[,|]", depends) if part.strip()}
        base = {"libc6", "libgcc-s1", "libstdc++6"}
        direct = [name for name in direct if not name.startswith("ld-linux")]  # of libc6
        missing = {name: owners.get(name) for name in direct if owners.get(name) not in given | base}
        self.assertEqual(missing, {}, "libraries, and the packages that have them")


class UnitTest(unittest.TestCase):
    MOST = 25  # tenths of systemd's exposure level

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_the_unit_of_the_system_manager_is_confined(self) -> None:
        unit = SOURCE / "deploy" / "kvtier.service"
        command = ["systemd-analyze", "security", "--offline=true", f"--threshold={self.MOST}", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    if distribution() != DISTRIBUTION:
        print(f"{DISTRIBUTION} is what the Dockerfile names, found {distribution()}: skipped")
        sys.exit(SKIPPED)
    SOURCE, PROGRAM = (Path(argument).resolve() for argument in sys.argv[1:3])
    unittest.main(argv=sys.argv[:1])
