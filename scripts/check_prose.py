#!/usr/bin/env python3
"""Checks the language of the documents: sentence length, and words that only this project would use.

    check_prose.py            checks every document; exit status 1 and one line per problem
    check_prose.py --table    prints sentences, 90th percentile and longest sentence of each document
    check_prose.py --long FILE...    prints the sentences of these documents above the limit

A sentence ends with a full stop, a question or an exclamation mark, with its list item or with its paragraph.
Code, tables, headings and link targets are not counted; inline code is one word, and so is a number. Uses the
standard library only.
"""

import argparse
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PERCENTILE = 0.9
MAX_WORDS_P90 = 30

# Words in an unusual sense, and what to say instead.
BANNED = {
    r"\bnobody\b": "no caller, no client, no thread",
    r"\bwhosever\b": "of any session",
    r"\bis told\b|\bare told\b": "receives, is notified",
    r"\btells? one another\b": "exchange",
    r"\blikewise\b": "also, or repeat the statement",
    r"\bforesight\b": "the selection size is known before the selection",
    r"\bwhat went\b": "what was evicted",
    r"\bpages? (?:is|are|that are) away\b": "evicted",
    r"\bst(?:ands?|eps?|ood|epped) aside\b": "unlocks the engine",
    r"\bis not to be had\b|\bto be had\b": "is not available",
}


def documents() -> list[Path]:
    """Returns README.md, CONTRIBUTING.md, the README of each top-level folder, and every Markdown file under docs/."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md")]
    return sorted({*top, *(ROOT / "docs").rglob("*.md")})


def blocks(text: str) -> list[str]:
    """Returns the paragraphs and list items of a Markdown text, without code, tables, headings and markup."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    found: list[str] = []
    current: list[str] = []
    fence = ""

    def end() -> None:
        if current:
            found.append(" ".join(current))
        current.clear()

    for line in text.splitlines():
        stripped = line.strip()
        opening = re.match(r"(`{3,}|~{3,})", stripped)
        if fence:
            if stripped.startswith(fence):
                fence = ""
            continue
        if opening:
            fence = opening.group(1)
            end()
        elif not stripped or stripped.startswith(("|", "#", "![")):
            end()
        elif item := re.match(r"(?:[-*+]|\d+\.)\s+(.*)", stripped):
            end()
            current.append(item.group(1))
        else:
            current.append(stripped.removeprefix("> "))
    end()
    return found


def plain(block: str) -> str:
    """Returns the text of a block as it is read: inline code as one word, links as their text."""
    block = re.sub(r"`[^`]+`", "Code", block)
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    return re.sub(r"[*_]{1,2}([^\s*_](?:[^*_]*[^\s*_])?)[*_]{1,2}", r"\1", block)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a Markdown text."""
    found: list[str] = []
    for block in blocks(text):
        for sentence in re.split(r"(?<=[.!?])[)\"']?\s+(?=[\"'(]?(?:[A-Z0-9]|kvtier\b))|(?<=[.!?])[)\"']?$", plain(block)):
            if re.search(r"[A-Za-z]", sentence):
                found.append(sentence.strip())
    return found


def words(sentence: str) -> int:
    """Returns the number of words: runs between spaces that hold a letter or a digit."""
    return sum(1 for word in sentence.split() if re.search(r"\w", word))


def percentile(lengths: list[int], share: float) -> int:
    """Returns a percentile by nearest rank; 0 of nothing."""
    return sorted(lengths)[max(0, math.ceil(share * len(lengths)) - 1)] if lengths else 0


def problems(name: str, text: str) -> list[str]:
    """Returns what is wrong with one document, a line each."""
    found = []
    found_sentences = sentences(text)
    p90 = percentile([words(sentence) for sentence in found_sentences], PERCENTILE)
    if p90 > MAX_WORDS_P90:
        found.append(f"{name}: 90th percentile of sentence length: expected at most {MAX_WORDS_P90} words, found {p90}"
                     f" (scripts/check_prose.py --long {name})")
    for sentence in found_sentences:
        for pattern, instead in BANNED.items():
            if match := re.search(pattern, sentence, flags=re.IGNORECASE):
                found.append(f'{name}: expected "{instead}", found "{match.group()}" in: {sentence[:80]}')
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the language of the documents.")
    parser.add_argument("--table", action="store_true", help="print the figures of each document")
    parser.add_argument("--long", nargs="+", type=Path, metavar="FILE", help="print sentences above the limit")
    options = parser.parse_args()
    if options.long:
        for path in options.long:
            for sentence in sentences(path.read_text(encoding="utf-8")):
                if words(sentence) > MAX_WORDS_P90:
                    print(f"{path}: {words(sentence)}: {sentence}")
        return 0
    found: list[str] = []
    for path in documents():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if options.table:
            lengths = [words(sentence) for sentence in sentences(text)]
            print(f"{name:50} {len(lengths):5} {percentile(lengths, PERCENTILE):4} {max(lengths, default=0):4}")
        found += problems(name, text)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
