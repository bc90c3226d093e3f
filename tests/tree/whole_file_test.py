"""benchmarks/whole_file.py: results stay until new ones are complete."""

import pathlib
import sys
import tempfile
import unittest

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

    def test_leaves_what_was_there_after_an_error(self):
        self.path.write_text("former")
        with self.assertRaises(UnicodeEncodeError):
            write_whole(self.path, "half of it " * 10000 + "\udc00")
        self.assertEqual(self.path.read_text(), "former")
        self.assertEqual(list(self.folder.iterdir()), [self.path])


if __name__ == "__main__":
    unittest.main()
