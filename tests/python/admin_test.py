"""The admin socket of `kvtier serve`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

import kvtier
import numpy as np
from server import BINARY, PATIENCE, Server, succeeds_in_fork

MODEL = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
TENANTS = 102  # more than one reply lists


class AdminTest(unittest.TestCase):
    """A server with tenants, of which callers are the last, whose token is "secret"."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-admin-")
        self.addCleanup(folder.cleanup)
        tenants = [{"name": f"t{i}", "certificate": f"c{i}"} for i in range(TENANTS)]
        digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"
        tenants[-1] = {"name": "last", "token_sha256": digest}
        path = Path(folder.name) / "tenants.json"
        path.write_text(json.dumps({"tenants": tenants}))
        socket = f"unix:{folder.name}/admin.sock"
        self.server = Server("--admin-listen", socket, "--tenants", str(path))
        self.addCleanup(self.server.close)
        self.admin = kvtier.AdminClient(socket)
        self.addCleanup(self.admin.close)
        self.client = kvtier.Client(self.server.address, token="secret")
        self.addCleanup(self.client.close)

    def test_a_fork_leaves_the_connection_of_its_parent(self) -> None:
        self.admin.info()

        def close() -> bool:
            channel = unittest.mock.Mock()
            self.admin._connection._channel = channel
            self.admin.close()
            return not channel.mock_calls

        self.assertTrue(succeeds_in_fork(close))
        self.admin.info()

    def test_the_server_is_told_of(self) -> None:
        info = self.admin.info()
        self.assertRegex(info.version, r"^\d+\.\d+\.\d+")
        self.assertFalse(info.draining)
        self.assertGreater(info.epoch, 0)
        self.assertIn("\nkvtier_sessions", self.admin.metrics())

    def test_another_socket_of_the_server_is_named(self) -> None:
        server = Server()
        self.addCleanup(server.close)
        address = server.address
        for wrong in (address + ".admin", address + ".data"):
            with kvtier.Client(wrong, attempts=1) as client:
                with self.assertRaises(kvtier.ClientError) as caught:
                    client.open(MODEL)
            self.assertEqual(
                caught.exception.message,
                f"server: expected a socket of clients, found another at {wrong}: try {address}",
            )
        for wrong in (address, address + ".data"):
            with kvtier.AdminClient(wrong, attempts=1) as admin:
                with self.assertRaises(kvtier.ClientError) as caught:
                    admin.info()
            self.assertEqual(
                caught.exception.message,
                f"server: expected an admin socket, found another at {wrong}: "
                f"try {address}.admin",
            )

    def test_work_of_clients_is_counted(self) -> None:
        rows = np.ones((10, 1, 64), np.float32)
        with self.client.open(MODEL) as session:
            session.append(0, rows, rows)
            session.attend(0, np.ones((1, 2, 64), np.float32))
            stats = self.admin.stats()
        self.assertEqual(stats.cumulative.tokens_appended, 10)
        self.assertEqual(stats.cumulative.queries, 1)
        self.assertEqual(stats.snapshot.sessions, 1)
        self.assertEqual(stats.service.sessions_created, 1)

    def test_quotas_of_tenants_are_listed_and_changed(self) -> None:
        with self.client.open(MODEL):
            tenants = self.admin.tenants()
            self.assertEqual(len(tenants), TENANTS)
            self.assertEqual((tenants[-1].name, tenants[-1].sessions), ("last", 1))
            changed = self.admin.set_quota("last", max_sessions=1, max_kv_bytes=1 << 20)
            self.assertEqual(changed, self.admin.tenants()[-1])
            self.assertEqual((changed.max_sessions, changed.max_kv_bytes), (1, 1 << 20))
            with self.assertRaises(kvtier.QuotaExceededError):
                self.client.open(MODEL)
        with self.assertRaises(kvtier.NotFoundError):
            self.admin.set_quota("nobody", max_sessions=1, max_kv_bytes=1)
        with self.assertRaises(kvtier.InvalidArgumentError):
            self.admin.set_quota("last", max_sessions=-1, max_kv_bytes=1)

    def test_pages_of_a_tenant_are_evicted_unless_they_are_pinned(self) -> None:
        with self.client.open_pages("m", 4096) as pages:
            put = [kvtier.PagePut(bytes([i]), 0, bytes(4096)) for i in range(3)]
            handles = []
            for stored in pages.put(put):
                assert isinstance(stored, kvtier.FoundPage)
                handles.append(stored.handle)
            self.assertIsInstance(pages.pin(handles[:1])[0], kvtier.FoundPage)
            self.assertEqual(self.admin.evict_tenant("t0"), (0, 0))
            evicted = self.admin.evict_tenant("last")
            self.assertEqual(evicted.pages, 2)
            self.assertGreaterEqual(evicted.bytes, 2 * 4096)
            self.assertEqual(self.admin.stats().page_cache.committed_pages, 1)
        with self.assertRaises(kvtier.NotFoundError):
            self.admin.evict_tenant("nobody")

    def test_every_log_level_is_taken(self) -> None:
        for level in kvtier.LogLevel:
            self.admin.set_log_level(level)

    def test_a_drain_ends_the_server(self) -> None:
        self.admin.drain()
        self.assertEqual(self.server.process.wait(30), 0)

    def test_the_socket_of_clients_has_no_such_service(self) -> None:
        admin = kvtier.AdminClient(self.server.address, attempts=1)
        self.addCleanup(admin.close)
        with self.assertRaises(kvtier.ClientError):
            admin.info()


@unittest.skipUnless(shutil.which("openssl"), "no openssl")
class OperationsTest(unittest.TestCase):
    def test_the_example_of_tokens_and_certificates_runs(self) -> None:
        text = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
        text = text.split("## 3. Tokens")[1]
        commands, program = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("sh", "python"))
        commands = commands.replace(":7443", ":0").replace("kvtier serve", "exec kvtier serve --backend cpu")
        folder = tempfile.TemporaryDirectory(prefix="kvtier-operations-")
        self.addCleanup(folder.cleanup)
        path = f"{Path(BINARY).parent}:{os.environ['PATH']}"
        server = subprocess.Popen(
            ["bash", "-ec", commands],
            cwd=folder.name,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.addCleanup(server.communicate)
        self.addCleanup(server.kill)
        assert server.stdout is not None
        listening = f"listening on unix:{folder.name}/kvtier.sock\n"
        self.assertEqual(server.stdout.readline(), listening)
        port = server.stdout.readline().rpartition(":")[2].strip()
        program = program.replace(":7443", f":{port}")
        no_token = program.replace("token=token", "token='x'")
        server_files = program.replace("alpha.pem", "server.pem").replace("alpha.key", "server.key")
        for source, printed, raised in (
            (program, "[]\n[]\n", ""),
            (no_token, "", "UnauthenticatedError"),
            (server_files, "[]\n", "UnauthenticatedError"),
        ):
            done = subprocess.run(
                [sys.executable, "-c", source],
                cwd=folder.name,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            self.assertEqual(done.stdout, printed, done.stderr)
            self.assertIn(raised, done.stderr)


if __name__ == "__main__":
    unittest.main()
