#!/usr/bin/env python3
"""needle-llama answers questions about its context, its KV in `kvtier serve`.

    kvtier serve --listen unix:/tmp/kvtier.sock &
    python examples/python_engine/needle.py --kv unix:/tmp/kvtier.sock
"""

from __future__ import annotations

import argparse
import dataclasses
import struct
import sys
import time
from pathlib import Path
from typing import NoReturn

import kvtier
import numpy as np
from numpy.typing import NDArray

from checkpoint import Floats, SafeTensors, write_safetensors
from decoder import Decoder

DATA = Path(__file__).resolve().parents[2] / "data" / "needle-llama"
WINDOW = kvtier.RetrievalConfig().recent_tokens
QUESTION = 8  # tokens: <q> x1 x2 x3 <a> y1 y2 y3
KEY = slice(1, 4)
ANSWER = 5  # place of y1
ESTIMATORS = [name.lower() for name in kvtier.Estimator.__members__]


def refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)


class Task:
    """One sequence of a case: the context, then questions with their answers."""

    def __init__(self, path: Path, case: str, sequence: int) -> None:
        file = SafeTensors(path)
        if f"{case}.tokens" not in file.names():
            cases = [name.removesuffix(".tokens") for name in file.names() if ".tokens" in name]
            refuse(f"--case: expected one of {', '.join(cases)}, found {case}")
        sequences = file[f"{case}.tokens"]
        if not 0 <= sequence < len(sequences):
            refuse(f"--sequence: expected 0 to {len(sequences) - 1}, found {sequence}")
        self.case = case
        self.sequence = sequence
        self.tokens: NDArray[np.int32] = sequences[sequence]
        entries = dict(entry.split("=") for entry in file.metadata[case].split())
        self.context = int(entries["context"])

    def question(self, index: int) -> NDArray[np.int32]:
        first = self.context + index * QUESTION
        return self.tokens[first : first + QUESTION]


def attend_options(
    retrieval: kvtier.RetrievalConfig, sparsity: float, context: int
) -> kvtier.AttendOptions:
    """Returns the options of queries after the context: k = context / sparsity tokens by score,
    beside the sink, the window and all that follows the context."""
    if not sparsity:
        return kvtier.AttendOptions(mode=kvtier.LayerMode.DENSE)
    chosen = dataclasses.replace(retrieval, top_k=max(1, int(context / sparsity)))
    return kvtier.AttendOptions(dense_from=max(0, context - WINDOW), retrieval=chosen)


def selection_text(retrieval: kvtier.RetrievalConfig) -> str:
    """Says how many tokens a head selects, and how."""
    if retrieval.rule == kvtier.SelectionRule.PRIORITY:
        return f"{retrieval.top_k} tokens sampled by priority"
    return f"the {retrieval.top_k} tokens with the highest scores"


def answer(
    decoder: Decoder,
    session: kvtier.RemoteSession,
    question: NDArray[np.int32],
    options: kvtier.AttendOptions,
) -> list[int]:
    """Reads a question, and writes the answer token by token."""
    logits = decoder.decode(session, question[:ANSWER], options)
    words = [int(logits[-1].argmax())]
    while len(words) < QUESTION - ANSWER:
        logits = decoder.decode(session, np.array(words[-1:], np.int32), options)
        words.append(int(logits[-1].argmax()))
    return words


def ask(
    decoder: Decoder,
    session: kvtier.RemoteSession,
    task: Task,
    options: kvtier.AttendOptions,
    questions: int,
) -> None:
    right = 0
    for index in range(questions):
        question = task.question(index)
        found = answer(decoder, session, question, options)
        expected = question[ANSWER:].tolist()
        right += found == expected
        key = " ".join(str(word) for word in question[KEY])
        words = " ".join(str(word) for word in found)
        verdict = "right" if found == expected else f"wrong, expected {expected}"
        print(f"  which words follow {key}?  {words}  ({verdict})")
    print(f"{right} of {questions} right")


def write_logits(
    path: Path,
    decoder: Decoder,
    session: kvtier.RemoteSession,
    task: Task,
    rows: list[kvtier.AttendOptions],
) -> None:
    """Writes the logits of every token after the context, each given: those of `kvtier-llama eval
    --logits`."""
    logits: dict[str, Floats] = {}
    for row, options in enumerate(rows):
        session.truncate(task.context)
        name = f"{task.case}.{task.sequence}.{row}"
        logits[name] = decoder.decode(session, task.tokens[task.context :], options)
    write_safetensors(path, logits)


def sparsities(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if any(value and not value >= 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected 0 or at least 1, found {text}")
    return values


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="needle-llama in numpy, its KV in kvtier serve")
    parser.add_argument("--kv", default=kvtier.default_server(), help="server (%(default)s)")
    parser.add_argument("--model", type=Path, default=DATA / "model")
    parser.add_argument("--tasks", type=Path, default=DATA / "tasks" / "dev.safetensors")
    parser.add_argument("--case", default="n4096.d100", help="length and density (%(default)s)")
    parser.add_argument("--sequence", type=int, default=0)
    parser.add_argument("--estimator", choices=ESTIMATORS, default="norm_aware")
    parser.add_argument(
        "--sparsity", type=sparsities, default=[33.0], help="context over k, or a list; 0: dense"
    )
    parser.add_argument("--questions", type=int, choices=range(1, 33), default=6, metavar="1..32")
    parser.add_argument("--logits", type=Path, help="write logits to a file instead of answers")
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> tuple[Task, Decoder]:
    if arguments.logits is not None and not arguments.logits.parent.is_dir():
        refuse(f"--logits: expected a file in a folder that exists, found {arguments.logits}")
    try:
        task = Task(arguments.tasks, arguments.case, arguments.sequence)
        return task, Decoder(arguments.model)
    except OSError as error:
        refuse(f"expected a readable file, found {error.filename}: {error.strerror}")
    except KeyError as error:
        refuse(f"{arguments.model}, {arguments.tasks}: expected {error}, found none")
    except (ValueError, struct.error) as error:
        refuse(f"{arguments.model}, {arguments.tasks}: {error}")


def main() -> None:
    arguments = parse()
    task, decoder = load(arguments)
    estimator = kvtier.Estimator[arguments.estimator.upper()]
    retrieval = kvtier.RetrievalConfig.of(estimator)
    rows = [attend_options(retrieval, value, task.context) for value in arguments.sparsity]
    with (
        kvtier.Client(arguments.kv) as client,
        client.open(decoder.model(), retrieval, capacity_tokens=len(task.tokens)) as session,
    ):
        start = time.monotonic()
        decoder.prefill(session, task.tokens[: task.context])
        seconds = time.monotonic() - start
        print(f"{task.case}: {task.context} tokens read in {seconds:.1f} s, KV in {arguments.kv}")
        if arguments.logits is not None:
            write_logits(arguments.logits, decoder, session, task, rows)
            return
        for options in rows:
            chosen = options.retrieval
            print("every token is attended" if chosen is None else selection_text(chosen))
            session.truncate(task.context)
            ask(decoder, session, task, options, arguments.questions)


if __name__ == "__main__":
    try:
        main()
    except kvtier.ClientError as error:
        raise SystemExit(f"error: {error}")
