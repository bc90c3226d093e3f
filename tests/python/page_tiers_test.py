"""Pages of the page cache that outlive the server, and that servers share."""

from __future__ import annotations

import getpass
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

import kvtier
import numpy as np
from server import BINARY, PATIENCE, Server

PAGE = 100_000


def page(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, PAGE, np.uint8)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "little")


def put(client: kvtier.Client, seeds: list[int], model: str = "m") -> list[kvtier.FoundPage]:
    with client.open_pages(model, PAGE) as pages:
        outcomes = pages.put([kvtier.PagePut(digest(s), 0, page(s)) for s in seeds])
    for outcome in outcomes:
        assert isinstance(outcome, kvtier.FoundPage), outcome
    return [outcome for outcome in outcomes if isinstance(outcome, kvtier.FoundPage)]


class PageTiersTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-pages-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.key = self.write_key("key", b"a secret of the operator")

    def write_key(self, name: str, secret: bytes) -> str:
        path = self.folder / name
        path.write_bytes(secret)
        return str(path)

    def serve(self, *options: str) -> Server:
        server = Server("--page-arena-mib", "64", *options)
        self.addCleanup(server.close)
        return server

    def client(self, server: Server, data_plane: bool = True) -> kvtier.Client:
        client = kvtier.Client(server.address, data_plane=data_plane)
        self.addCleanup(client.close)
        return client

    def found(self, server: Server, seeds: list[int], model: str = "m") -> list[bool]:
        """Returns of each page whether a new client finds it, and compares those that it reads."""
        with self.client(server).open_pages(model, PAGE) as pages:
            hashes = [digest(seed) for seed in seeds]
            there = pages.contains(hashes, [0])
            found = pages.find(hashes, [0])
            self.assertEqual([each is not None for each in found], there)
            for seed, each in zip(seeds, found):
                if each is None:
                    continue
                (read,) = pages.get([each[0].handle])
                assert isinstance(read, np.ndarray), read
                np.testing.assert_array_equal(read, page(seed))
        return there


class RestartTest(PageTiersTest):
    def options(self, key: str = "") -> list[str]:
        return [
            "--page-folder", str(self.folder / "pages"), "--page-folder-mib", "128",
            "--page-key-file", key or self.key, "--page-wait-for-disk",
        ]

    def test_durable_pages_outlive_a_killed_server(self) -> None:
        server = self.serve(*self.options())
        for first, data_plane in ((0, True), (10, False)):
            stored = put(self.client(server, data_plane), list(range(first, first + 10)))
            self.assertTrue(all(each.durable for each in stored))
        server.kill()
        server.start()
        seeds = [*range(20), 99]
        self.assertEqual(self.found(server, seeds), [True] * 20 + [False])
        self.assertEqual(self.found(server, [1], model="other"), [False])

    def test_without_the_key_nothing_is_found(self) -> None:
        server = self.serve(*self.options())
        put(self.client(server), [1, 2])
        server.kill()
        other = self.serve(*self.options(self.write_key("other", b"another secret, as long")))
        self.assertEqual(self.found(other, [1, 2]), [False, False])
        other.kill()
        server.start()
        self.assertEqual(self.found(server, [1, 2]), [True, True])

    def test_removed_pages_stay_away(self) -> None:
        server = self.serve(*self.options())
        client = self.client(server)
        stored = put(client, [1, 2])
        with client.open_pages("m", PAGE) as pages:
            self.assertEqual(pages.remove([stored[0].handle]), [None])
        server.kill()
        server.start()
        self.assertEqual(self.found(server, [1, 2]), [False, True])

    def test_a_worker_that_is_killed_keeps_them_too(self) -> None:
        server = self.serve("--worker", "on", *self.options())
        put(self.client(server), [1, 2])
        server.kill()
        server.start()
        end = time.monotonic() + PATIENCE
        while True:
            try:
                found = self.found(server, [1, 2])
                break
            except kvtier.FailedPreconditionError:  # the folder is the worker's until it ends too
                self.assertLess(time.monotonic(), end, "waited in vain")
                time.sleep(0.02)
        self.assertEqual(found, [True, True])

    def test_options_that_do_not_go_together_are_refused(self) -> None:
        folder = str(self.folder / "pages")
        for options, message in (
            (["--page-folder", folder], "page-key-file"),
            (["--page-key-file", self.key], "page-folder or page-remote"),
            (["--page-wait-for-disk"], "page-folder"),
            (["--page-remote", "--page-key-file", self.key], "memcached or redis"),
            (["--page-folder", folder, "--page-key-file", folder + "/none"], "readable file"),
            (["--page-folder", folder, "--page-key-file", self.write_key("s", b"short")], "16 to 4096"),
            (["--page-folder", self.key, "--page-key-file", self.key], "expected a folder"),
        ):
            command = [BINARY, "serve", "--listen", f"unix:{self.folder}/refused.sock", *options]
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            self.assertNotEqual(ended.returncode, 0, options)
            self.assertIn(message, ended.stderr)


class SharedTest(PageTiersTest):
    """Two servers on two sockets, with pages on servers behind both."""

    def start(self, *command: str) -> str:
        socket = self.folder / f"{command[0]}.sock"
        if shutil.which(command[0]) is None:
            self.skipTest(f"{command[0]} is not installed")
        arguments = [argument.replace("SOCKET", str(socket)) for argument in command]
        process = subprocess.Popen(
            arguments, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        end = time.monotonic() + PATIENCE
        while not socket.exists():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.02)
        return f"unix:{socket}"

    def share(self, option: str, endpoint: str) -> None:
        options = ["--page-remote", option, endpoint, "--page-key-file", self.key]
        one, two = self.serve(*options), self.serve(*options)
        foreign = self.serve(
            *options[:-1], self.write_key("foreign", b"another secret, as long")
        )
        stored = put(self.client(one), [1, 2, 3])
        self.assertFalse(any(each.durable for each in stored))
        with self.client(two).open_pages("m", PAGE) as pages:  # they come one by one
            end = time.monotonic() + PATIENCE
            while not all(pages.contains([digest(seed) for seed in (1, 2, 3)], [0])):
                self.assertLess(time.monotonic(), end, "waited in vain")
        self.assertEqual(self.found(two, [1, 2, 3, 4]), [True, True, True, False])
        self.assertEqual(self.found(foreign, [1, 2, 3]), [False] * 3)
        one.kill()
        one.start()
        self.assertEqual(self.found(one, [1, 2, 3]), [True] * 3)

    def test_over_redis(self) -> None:
        self.share("--redis", self.start("redis-server", "--port", "0", "--save", "",
                                         "--unixsocket", "SOCKET"))

    def test_over_memcached(self) -> None:
        self.share("--memcached", self.start("memcached", "-u", getpass.getuser(),
                                             "-s", "SOCKET"))

    def test_servers_that_are_away_are_misses(self) -> None:
        server = self.serve(
            "--page-remote", "--redis", f"unix:{self.folder}/none", "--page-key-file", self.key
        )
        put(self.client(server), [1])
        self.assertEqual(self.found(server, [1, 2]), [True, False])


if __name__ == "__main__":
    unittest.main()
