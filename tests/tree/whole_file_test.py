"""benchmarks/whole_file.py: results stay until new ones are complete."""

import pathlib
import sys
import tempfile
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "benchmarks"))
from whole_file import write_whole  # noqa: E402


class WholeFileTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "result.json"

    def test_writes_text_and_bytes_over_what_was_there(self):
        for data in ("first \u00e9\n", b"second \xff\n"):
            write_whole(str(self.path), data)
            self.assertEqual(self.path.read_bytes(), data.encode() if isinstance(data, str) else data)
        self.assertEqual(list(self.folder.iterdir()), [self.path])

    def test_writes_to_a_device_itself(self):
        link = self.folder / "link"
        link.symlink_to("/dev/null")
        write_whole(link, "text")
        self.assertTrue(link.is_char_device())

    def test_leaves_what_was_there_after_an_error(self):
        self.path.write_text("former")

        def half(path, data):
            with path.open("wb") as file:
                file.write(data[: len(data) // 2])
            raise OSError("no space")

        with mock.patch.object(pathlib.Path, "write_bytes", half), self.assertRaises(OSError):
            write_whole(self.path, "new text")
        self.assertEqual(self.path.read_text(), "former")
        self.assertEqual(list(self.folder.iterdir()), [self.path])


if __name__ == "__main__":
    unittest.main()
