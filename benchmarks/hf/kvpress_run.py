#!/usr/bin/env python3
"""NVIDIA kvpress's text-generation pipeline with kvtier as attention and cache, on needles in the
format of its evaluation of RULER (context, questions, answers; a string match is right).

    kvpress_run.py --model DIR --tasks TASKS --out FILE [--contexts N] [--questions N] [--tokens N]

Needs kvpress 0.5, which wants transformers before 5.3, and what scripts/real_model.sh makes. The
package has neither kvpress's evaluation program nor its data: those lie in its repository and on
the Hub.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvtier
import kvtier.hf
from kvtier.model_options import whole_file

CASE, CONTEXT = "needles.3584", 3584
NEEDLE = re.compile(r"(Please remember this one special number: \w+) (\d+)")


class Pipeline(KVPressTextGenerationPipeline):
    """Questions are sentences to continue, which a small model does better than to answer: nothing
    follows them. Answers leave a `KvtierCache` by `crop`; it has no tensors to cut."""

    def preprocess(self, context: str, questions: list[str], *args: Any, **kwargs: Any) -> Any:
        inputs = super().preprocess(context, questions, *args, **kwargs)
        encoded = [
            self.tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids
            for question in questions
        ]
        return {**inputs, "questions_ids": encoded}

    def _remove_answer_from_cache(self, cache: Any, cache_seq_lengths: list[int]) -> None:
        if not isinstance(cache, kvtier.hf.KvtierCache):
            return super()._remove_answer_from_cache(cache, cache_seq_lengths)
        cache.crop(cache_seq_lengths[0] - cache.get_seq_length())


def rows(tasks: Path, tokenizer: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """As RULER's rows, several questions of a context together: those of its last tokens."""
    found = []
    for ids in load_file(tasks)[f"{CASE}.tokens"][: options.contexts].tolist():
        context = tokenizer.decode(ids[CONTEXT - options.tokens : CONTEXT])
        needles = NEEDLE.findall(context)[: options.questions]
        found.append(
            {
                "context": context,
                "questions": [question for question, _ in needles],
                "answers": [answer for _, answer in needles],
            }
        )
    return found


def cache_of(name: str, config: Any) -> Any:
    if name == "sdpa":
        return DynamicCache()
    retrieval = kvtier.hf.default_retrieval(64)
    if name.startswith("k="):
        retrieval = kvtier.RetrievalConfig(
            estimator=retrieval.estimator,
            code=retrieval.code,
            rule=retrieval.rule,
            num_planes=retrieval.num_planes,
            top_k=int(name[2:]),
            sink_tokens=64,
            recent_tokens=64,
        )
    return kvtier.hf.KvtierCache(config, retrieval, dense=name == "dense", max_tokens=4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--contexts", type=int, default=2)
    parser.add_argument("--questions", type=int, default=8, help="of a context, at most")
    parser.add_argument("--tokens", type=int, default=CONTEXT, help="of a context")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    pipeline = Pipeline(model=model, tokenizer=tokenizer)
    tokenizer.chat_template = None
    data = rows(options.tasks, tokenizer, options)
    asked = sum(len(row["answers"]) for row in data)
    results: list[dict[str, Any]] = []
    for name in ("sdpa", "dense", "k=256", "k=64"):
        model.set_attn_implementation("sdpa" if name == "sdpa" else "kvtier")
        start, right, texts = time.perf_counter(), 0, []
        for row in data:
            cache = cache_of(name, model.config)
            answers = pipeline(
                row["context"],
                questions=row["questions"],
                max_new_tokens=8,
                cache=cache,
            )["answers"]
            right += sum(number in text for number, text in zip(row["answers"], answers))
            texts += answers
        results.append(
            {
                "attention": name,
                "right": right,
                "questions": asked,
                "seconds": round(time.perf_counter() - start, 1),
                "answers": texts,
            }
        )
        print(json.dumps(results[-1]), flush=True)
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["benchmarks/hf/kvpress_run.py", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        **{name: version(name) for name in ("kvpress", "torch", "transformers", "kvtier")},
        "rows": results,
    }
    with whole_file(options.out) as part:
        part.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
