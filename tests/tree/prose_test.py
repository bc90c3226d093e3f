"""scripts/check_prose.py: what it counts as a sentence, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
sys.dont_write_bytecode = True

import check_prose  # noqa: E402

LONG = "This sentence has " + "many " * 30 + "words."


class Sentences(unittest.TestCase):
    def test_end_with_a_stop_an_item_or_a_paragraph(self) -> None:
        text = "One. Two (or so).\nStill two? Three\n\n- four\n- five: `f(a. B)` and\n  more\n\nkvtier is six. `f` is seven."
        found = check_prose.sentences(text)
        self.assertEqual([check_prose.words(sentence) for sentence in found], [1, 3, 2, 1, 1, 4, 3, 3])

    def test_leave_out_code_tables_and_headings(self) -> None:
        text = "# A heading. Of two\n\n```sh\nls. Then\n```\n\n| a cell. | B |\n\n<!-- a. B -->\n![a. B](c.svg)\n"
        self.assertEqual(check_prose.sentences(text), [])

    def test_read_links_as_their_text_and_keep_decimals_whole(self) -> None:
        text = "See [the **two** words](a/b.md#c), 1.5 times."
        self.assertEqual(check_prose.sentences(text), ["See the two words, 1.5 times."])


class Problems(unittest.TestCase):
    def test_one_long_sentence_of_ten_is_accepted_and_two_are_not(self) -> None:
        short = "A short sentence. " * 9
        self.assertEqual(check_prose.problems("a.md", short + LONG), [])
        (problem,) = check_prose.problems("a.md", short + LONG + " " + LONG)
        self.assertIn("a.md: 90th percentile of sentence length: expected at most 30 words, found 34", problem)

    def test_a_banned_word_is_named_with_what_to_say(self) -> None:
        (problem,) = check_prose.problems("a.md", "Nobody waits.")
        self.assertEqual(problem, 'a.md: expected "no caller, no client, no thread", found "Nobody" in: Nobody waits.')
        self.assertEqual(check_prose.problems("a.md", "`nobody` is a user."), [])

    def test_an_empty_document_has_none(self) -> None:
        self.assertEqual(check_prose.problems("a.md", ""), [])

    def test_the_documents_have_none(self) -> None:
        done = subprocess.run([sys.executable, SCRIPTS / "check_prose.py"], capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
