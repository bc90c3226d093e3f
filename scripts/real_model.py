#!/usr/bin/env python3
"""Makes what scripts/real_model.sh leaves: a checkpoint in Hugging Face layout, and task files.

    real_model.py convert GGUF MODEL    writes config.json, shards and the tokenizer to MODEL
    real_model.py tasks GGUF TASKS FOLDER...    task file from the HTML pages under the folders

Needs the packages gguf, ml_dtypes, numpy, safetensors and tokenizers. examples/README.md has the
format of the task file.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save

SHARD_BYTES = 60 << 20  # The largest matrix of SmolLM2-135M, 54 MiB, fits one.
SPECIAL_TOKENS = (3, 4)  # Control and user-defined tokens of llama.cpp's vocabularies.

OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Contexts and what is asked after them. SmolLM2 knows 8,192 positions.
CONTEXTS = (7680, 3584)
SEQUENCES = 8
CONTINUED = 320  # Tokens that follow the context of a continuation.
PASSAGE = 352  # Tokens of a passage to copy, and of those the ones that the context repeats.
REPEATED = 32
NEEDLES = 16
# The number follows its key: with words between them a small model finds half of the numbers.
NEEDLE = "Please remember this one special number: {key} "
DIGITS = 3
KEYS = """
apple anchor arrow autumn basket beach bridge butter button camera candle canyon carpet castle
cherry circle cloud coffee copper corner cotton desert dragon eagle engine forest garden guitar
hammer harbor honey island jacket jungle kitchen ladder lemon lion marble meadow mirror monkey
mountain museum needle ocean olive orange palace paper pepper pilot planet pocket rabbit ribbon
river rocket saddle salmon school shadow silver spider spring stone summer sunset table temple
tiger tower train turtle valley velvet village violin wagon walnut winter wolf
""".split()


class Refused(Exception):
    """The input is not what this program reads."""


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor of a GGUF."""
    if name in OUTER:
        return OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if not match or match[2] not in INNER:
        raise Refused(f"tensor: expected one of a Llama without biases, found {name}")
    return f"model.layers.{match[1]}.{INNER[match[2]]}.weight"


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection in the half-rotation order of Hugging Face.

    A GGUF of a Llama has the two elements that rotate together side by side in their head.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


class Source:
    """A GGUF: its fields by name, and its tensors as fp32."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        if self.field("general.architecture") != "llama":
            raise Refused(
                f"general.architecture: expected llama, found {self.field('general.architecture')}"
            )

    def field(self, name: str, default: Any = None) -> Any:
        field = self.reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is None:
            raise Refused(f"field: expected {name}, found none")
        return default

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        names = {tensor.name for tensor in self.reader.tensors}
        heads = self.field("llama.attention.head_count")
        hidden = self.field("llama.embedding_length")
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": self.field("llama.feed_forward_length"),
            "num_hidden_layers": self.field("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.field("llama.attention.head_count_kv", heads),
            "head_dim": self.field("llama.attention.key_length", hidden // heads),
            "max_position_embeddings": self.field("llama.context_length"),
            # fp32 in the file: 1e-5 is 9.999999747378752e-06 there.
            "rms_norm_eps": float(
                f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"
            ),
            "rope_theta": self.field("llama.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id"),
        }
        rotated = self.field("llama.rope.dimension_count", config["head_dim"])
        if rotated != config["head_dim"]:
            raise Refused(f"rope.dimension_count: expected {config['head_dim']}, found {rotated}")
        if self.reader.get_field("llama.rope.scaling.type") is not None:
            raise Refused("rope.scaling: expected none, found one")
        return config

    def tensors(self, config: dict[str, Any]) -> dict[str, np.ndarray]:
        """Every tensor under its Hugging Face name, checked against the configuration."""
        expected = shapes(config)
        found = {}
        for tensor in self.reader.tensors:
            name = hf_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type)
            if expected.pop(name, None) != values.shape:
                raise Refused(f"{tensor.name}: expected a shape of the model, found {values.shape}")
            if not np.isfinite(values).all():
                raise Refused(f"{tensor.name}: expected finite values, found others")
            if ".q_proj." in name:
                values = unpermuted(values, config["num_attention_heads"])
            if ".k_proj." in name:
                values = unpermuted(values, config["num_key_value_heads"])
            found[name] = values
        if expected:
            raise Refused(f"tensors: expected {min(expected)} too, found none")
        return found


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights that a configuration calls for."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            result[f"model.layers.{layer}.{name}.weight"] = shape
    return result


def write_tensors(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes a safetensors file. The same tensors and metadata give the same bytes."""
    data = save(tensors, metadata)
    size = int.from_bytes(data[:8], "little")
    # The metadata come in an order of their own each time.
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(metadata.items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    path.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])


def write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes bf16 shards of at most `SHARD_BYTES`, where each tensor fits one, and their index."""
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, values in tensors.items():
        if shards[-1] and size + 2 * values.size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = values
        size += 2 * values.size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        rounded = {name: values.astype(ml_dtypes.bfloat16) for name, values in shard.items()}
        write_tensors(folder / file, rounded, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(2 * values.size for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def make_tokenizer(source: Source) -> Any:
    """The byte-level tokenizer of a GGUF of SmolLM2."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = source.field("tokenizer.ggml.pre")
    if kind != "smollm":
        raise Refused(f"tokenizer.ggml.pre: expected smollm, found {kind}")
    words = source.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in source.field("tokenizer.ggml.merges")]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = source.field("tokenizer.ggml.token_type")
    special = [word for word, kind in zip(words, kinds) if kind in SPECIAL_TOKENS]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    return tokenizer


def tokenizer_config(source: Source) -> dict[str, Any]:
    """What tokenizer_config.json says: special tokens and the format of a conversation."""
    words = source.field("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": words[source.field("tokenizer.ggml.bos_token_id")],
        "eos_token": words[source.field("tokenizer.ggml.eos_token_id")],
        "model_max_length": source.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.field("tokenizer.chat_template"),
    }


def convert(gguf: Path, folder: Path) -> dict[str, Any]:
    """Writes the checkpoint and returns its configuration."""
    source = Source(gguf)
    config = source.config()
    tensors = source.tensors(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_shards(folder, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return config


class Paragraphs(HTMLParser):
    """The prose of a page: the text of `p` and of `div class="para"`, without what is laid out."""

    BLOCKS = frozenset(
        "p div pre table tr td th ul ol li dl dt dd h1 h2 h3 h4 h5 section nav "
        "script style title".split()
    )
    SHORTEST = 80  # Characters: leaves out captions and menus.

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.BLOCKS:
            self.close_block()
            if tag == "p" or (tag == "div" and ("class", "para") in attrs):
                self.text = []

    def handle_endtag(self, tag: str) -> None:
        if tag in self.BLOCKS:
            self.close_block()

    def handle_data(self, data: str) -> None:
        if self.text is not None:
            self.text.append(data)

    def close_block(self) -> None:
        paragraph = " ".join("".join(self.text or []).split())
        if len(paragraph) >= self.SHORTEST:
            self.found.append(paragraph)
        self.text = None


def read_pages(folders: list[Path]) -> list[list[str]]:
    """The paragraphs of each page, none twice."""
    seen: set[str] = set()
    pages = []
    for folder in folders:
        for path in sorted(folder.rglob("*.html")):
            parser = Paragraphs()
            parser.feed(path.read_text(encoding="utf-8", errors="replace"))
            parser.close_block()
            new = [text for text in parser.found if text not in seen]
            seen.update(new)
            if new:
                pages.append(new)
    return pages


class Text:
    """The token ids of all paragraphs, handed out in pieces that do not overlap."""

    def __init__(self, tokenizer: Any, pages: list[list[str]], rng: random.Random) -> None:
        pages = list(pages)
        rng.shuffle(pages)
        self.paragraphs = [
            tokenizer.encode(text + "\n\n").ids for page in pages for text in page
        ]
        self.next = 0

    def take(self, count: int) -> list[int]:
        """The next `count` tokens, from the start of a paragraph."""
        ids: list[int] = []
        while len(ids) < count:
            if self.next == len(self.paragraphs):
                raise Refused("text: expected more of it, found its end")
            ids += self.paragraphs[self.next]
            self.next += 1
        return ids[:count]


class Builder:
    """Makes sequences: the ids of context and what follows, and the marks of the latter."""

    def __init__(self, tokenizer: Any, text: Text, rng: random.Random) -> None:
        self.tokenizer = tokenizer
        self.text = text
        self.rng = rng
        self.gap = self.ids("\n\n")

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def paragraph_end(self, ids: list[int], start: int) -> int:
        """The index after the first gap between paragraphs from `start` on."""
        while ids[start - len(self.gap) : start] != self.gap:
            start += 1
        return start

    def continuation(self, context: int) -> tuple[list[int], list[int]]:
        # Each token is an answer; the first follows the context's last, which is not scored.
        return self.text.take(context + CONTINUED), list(range(CONTINUED))

    def copying(self, context: int) -> tuple[list[int], list[int]]:
        passage = self.text.take(PASSAGE)
        size = context - PASSAGE - REPEATED - 2 * len(self.gap)
        around = self.text.take(size)
        at = self.rng.randrange(size // 10, size * 8 // 10)
        at = self.paragraph_end(around, at)
        ids = around[:at] + passage + self.gap + around[at:] + self.gap + passage
        return ids, list(range(PASSAGE - REPEATED))

    def needles(self, context: int) -> tuple[list[int], list[int]]:
        keys = [word for word in KEYS if len(self.ids(" " + word)) == 1]
        questions, answers, needles = [], [], []
        for key in self.rng.sample(keys, NEEDLES):
            questions.append(NEEDLE.format(key=key))
            answers.append(f"{self.rng.randrange(10**DIGITS):0{DIGITS}}")
            needles.append(self.ids(questions[-1] + answers[-1] + ".\n\n"))
        ask = self.gap + self.ids("Here are all the special numbers again.\n\n")
        size = context - sum(map(len, needles)) - len(ask)
        around = self.text.take(size)
        ids: list[int] = []
        done = 0
        for i, needle in enumerate(needles):
            at = int((i + self.rng.random()) * size / (NEEDLES + 1))
            at = self.paragraph_end(around, max(at, 1))
            ids += around[done:at] + needle
            done = at
        ids += around[done:] + ask
        marks: list[int] = []
        for number, i in enumerate(self.rng.sample(range(NEEDLES), NEEDLES), start=1):
            before = len(self.ids(questions[i]))
            after = len(needles[i]) - before - DIGITS
            ids += needles[i]
            marks += [0] * before + [number] * DIGITS + [0] * after
        return ids, marks


def make_tasks(tokenizer: Any, pages: list[list[str]], path: Path, seed: int) -> None:
    """Writes every kind at every length. The same pages and seed give the same file."""
    tensors = {}
    metadata = {}
    for context in CONTEXTS:
        for kind in ("continuation", "copying", "needles"):
            name = f"{kind}.{context}"
            rng = random.Random(f"{seed} {name}")
            builder = Builder(tokenizer, Text(tokenizer, pages, rng), rng)
            rows = [getattr(builder, kind)(context) for _ in range(SEQUENCES)]
            marks = rows[0][1]
            if any(row != marks or len(ids) != context + len(row) for ids, row in rows):
                raise Refused(f"{name}: expected sequences of one layout, found several")
            tensors[f"{name}.tokens"] = np.array([ids for ids, _ in rows], np.int32)
            tensors[f"{name}.answers"] = np.array(marks, np.int32)
            metadata[name] = f"context={context} kind={kind} seed={seed}"
    write_tensors(path, tensors, metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert")
    command.add_argument("gguf", type=Path)
    command.add_argument("model", type=Path)
    command = commands.add_parser("tasks")
    command.add_argument("gguf", type=Path)
    command.add_argument("tasks", type=Path)
    command.add_argument("pages", type=Path, nargs="+")
    command.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    if a.command == "convert":
        config = convert(a.gguf, a.model)
        source = Source(a.gguf)
        make_tokenizer(source).save(str(a.model / "tokenizer.json"))
        text = json.dumps(tokenizer_config(source), indent=1)
        (a.model / "tokenizer_config.json").write_text(text + "\n")
        print(f"{a.model}: {config['num_hidden_layers']} layers of {config['hidden_size']}")
    else:
        make_tasks(make_tokenizer(Source(a.gguf)), read_pages(a.pages), a.tasks, a.seed)
        print(f"{a.tasks}: {a.tasks.stat().st_size} bytes")


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        raise SystemExit(f"real_model.py: {error}") from None
