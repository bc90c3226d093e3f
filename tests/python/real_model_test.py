"""scripts/real_model.py on a made-up GGUF and made-up pages."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import real_model  # noqa: E402

HIDDEN, INNER, VOCABULARY, LAYERS, HEADS, KV_HEADS = 64, 32, 40, 2, 4, 2
HEAD_DIM = HIDDEN // HEADS
Q8 = GGMLQuantizationType.Q8_0


def side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as a GGUF has them: element i of a head's first half, then of its second."""
    result = np.empty_like(rows)
    half = rows.shape[0] // heads // 2
    for head in range(heads):
        for i in range(half):
            for part in range(2):
                result[(head * half + i) * 2 + part] = rows[(head * 2 + part) * half + i]
    return result


class GgufTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = self.folder / "model"
        rng = np.random.default_rng(3)
        names = {hf: gguf for gguf, hf in real_model.OUTER.items()}
        names |= {
            f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{gguf}.weight"
            for layer in range(LAYERS)
            for gguf, hf in real_model.INNER.items()
        }
        config = {
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "num_hidden_layers": LAYERS,
            "tie_word_embeddings": True,
        }
        self.weights = {
            name: rng.standard_normal(shape).astype(np.float32)
            for name, shape in real_model.shapes(config).items()
        }
        self.stored = {names[name]: values for name, values in self.weights.items()}
        for layer in range(LAYERS):
            for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                key = f"blk.{layer}.{name}.weight"
                self.stored[key] = side_by_side(self.stored[key], heads)
        self.architecture = "llama"

    def write(self) -> Path:
        path = self.folder / "model.gguf"
        writer = GGUFWriter(path, self.architecture)
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(100000.0)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_token_list([f"word{i}" for i in range(VOCABULARY)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{{ messages }}")
        for name, values in self.stored.items():
            if name == "token_embd.weight":
                writer.add_tensor(name, quantize(values, Q8), raw_dtype=Q8)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def test_weights_are_those_that_the_gguf_was_made_of(self) -> None:
        with mock.patch.object(real_model, "SHARD_BYTES", 20000):
            real_model.convert(self.write(), self.model)

        index = json.loads((self.model / "model.safetensors.index.json").read_text())
        files = sorted(set(index["weight_map"].values()))
        self.assertGreater(len(files), 1)
        self.assertEqual(set(index["weight_map"]), set(self.weights))
        for file in files:
            self.assertLess((self.model / file).stat().st_size, 20000 + 2000)
            for name, found in load_file(self.model / file).items():
                expected = self.weights[name]
                if name == "model.embed_tokens.weight":
                    expected = dequantize(quantize(expected, Q8), Q8)
                self.assertEqual(index["weight_map"][name], file)
                np.testing.assert_array_equal(found, expected.astype(ml_dtypes.bfloat16), name)

    def test_configuration_says_what_the_gguf_says(self) -> None:
        real_model.convert(self.write(), self.model)

        config = json.loads((self.model / "config.json").read_text())
        self.assertEqual(config["model_type"], "llama")
        self.assertEqual(config["rms_norm_eps"], 1e-5)
        self.assertEqual(config["rope_theta"], 100000.0)
        self.assertEqual(config["vocab_size"], VOCABULARY)
        self.assertEqual(config["num_key_value_heads"], KV_HEADS)
        self.assertEqual(config["head_dim"], HEAD_DIM)
        self.assertIs(config["tie_word_embeddings"], True)

    def test_tokenizer_config_has_the_format_of_a_conversation(self) -> None:
        config = real_model.tokenizer_config(real_model.Source(self.write()))

        self.assertEqual(config["chat_template"], "{{ messages }}")
        self.assertEqual((config["bos_token"], config["eos_token"]), ("word1", "word2"))
        self.assertEqual(config["model_max_length"], 128)

    def test_rotation_gives_the_same_products(self) -> None:
        # llama.cpp rotates neighbours, Hugging Face the halves; angles grow alike along both.
        rng = np.random.default_rng(5)
        q, k = rng.standard_normal((2, HEADS * HEAD_DIM, 1))
        angles = 0.3 * np.arange(1, HEAD_DIM // 2 + 1)

        def neighbours(rows: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
            pairs = rows.reshape(HEADS, -1, 2)
            return pairs[..., 0] + 1j * pairs[..., 1], np.exp(1j * position * angles)

        def halves(rows: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
            parts = real_model.unpermuted(rows, HEADS).reshape(HEADS, 2, -1)
            return parts[:, 0] + 1j * parts[:, 1], np.exp(1j * position * angles)

        products = []
        for layout in (neighbours, halves):
            (a, turn_a), (b, turn_b) = layout(q, 7), layout(k, 2)
            products.append(((a * turn_a) * np.conj(b * turn_b)).real.sum(axis=1))
        np.testing.assert_allclose(products[0], products[1], rtol=1e-12)

    def refusal(self) -> str:
        with self.assertRaises(real_model.Refused) as caught:
            real_model.convert(self.write(), self.model)
        self.assertFalse(self.model.exists())
        return str(caught.exception)

    def test_refuses_another_architecture(self) -> None:
        self.architecture = "gemma"
        self.assertIn("expected llama, found gemma", self.refusal())

    def test_refuses_a_missing_tensor(self) -> None:
        del self.stored["blk.1.ffn_up.weight"]
        self.assertIn("expected model.layers.1.mlp.up_proj.weight too", self.refusal())

    def test_refuses_an_unknown_tensor(self) -> None:
        self.stored["blk.0.attn_sinks.weight"] = np.ones(4, np.float32)
        self.assertIn("found blk.0.attn_sinks.weight", self.refusal())

    def test_refuses_a_wrong_shape(self) -> None:
        self.stored["blk.0.attn_v.weight"] = np.ones((HIDDEN, HIDDEN), np.float32)
        self.assertIn("blk.0.attn_v.weight: expected a shape of the model", self.refusal())

    def test_refuses_what_is_not_finite(self) -> None:
        self.stored["output_norm.weight"][3] = np.nan
        self.assertIn("output_norm.weight: expected finite values", self.refusal())


class Words:
    """A tokenizer of words, digits and gaps."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def encode(self, text: str) -> SimpleNamespace:
        words = re.findall(r"\n\n| ?[^\W\d]+| ?\d| |[^\w\s]", text)
        return SimpleNamespace(ids=[self.known.setdefault(w, len(self.known)) for w in words])


class TasksTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="kvtier-python-")
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "tasks.safetensors"
        rng = np.random.default_rng(1)
        words = ["".join(rng.choice(list("abcdefgh"), 5)) for _ in range(500)]
        self.pages = [
            [" ".join(rng.choice(words, 60)) + "." for _ in range(30)] for _ in range(60)
        ]
        self.tokenizer = Words()

    def make(self, seed: int = 1) -> dict[str, np.ndarray]:
        with mock.patch.multiple(real_model, CONTEXTS=(1500,), SEQUENCES=3):
            real_model.make_tasks(self.tokenizer, self.pages, self.path, seed)
        return load_file(self.path)

    def test_the_same_seed_gives_the_same_file(self) -> None:
        self.make()
        first = self.path.read_bytes()
        self.make()
        self.assertEqual(self.path.read_bytes(), first)
        self.make(seed=2)
        self.assertNotEqual(self.path.read_bytes(), first)

    def test_copies_follow_the_passage_in_the_context(self) -> None:
        tasks = self.make()
        marks = tasks["copying.1500.answers"]
        np.testing.assert_array_equal(marks, np.arange(len(marks)))
        for row in tasks["copying.1500.tokens"]:
            passage = row[1500 - real_model.REPEATED :].tolist()
            self.assertEqual(len(passage), real_model.PASSAGE)
            starts = [i for i in range(1500) if row[i : i + len(passage)].tolist() == passage]
            self.assertEqual(len(starts), 2)
            self.assertLess(starts[0] + len(passage), 1500 - real_model.REPEATED)

    def test_needles_are_in_the_context_and_no_two_alike(self) -> None:
        tasks = self.make()
        marks = tasks["needles.1500.answers"]
        before = np.flatnonzero(marks)[0]
        self.assertEqual(set(marks), set(range(real_model.NEEDLES + 1)))
        for row in tasks["needles.1500.tokens"]:
            context, asked = row[:1500].tolist(), row[1500:]
            found = set()
            for number in range(1, real_model.NEEDLES + 1):
                at = np.flatnonzero(marks == number)
                self.assertEqual(len(at), real_model.DIGITS)
                needle = asked[at[0] - before : at[-1] + 1].tolist()
                starts = [i for i in range(1500) if context[i : i + len(needle)] == needle]
                self.assertEqual(len(starts), 1)
                found.add(starts[0])
            self.assertEqual(len(found), real_model.NEEDLES)

    def test_continuations_do_not_overlap(self) -> None:
        tasks = self.make()
        rows = tasks["continuation.1500.tokens"]
        self.assertEqual(rows.shape, (3, 1500 + real_model.CONTINUED))
        for i in range(3):
            for j in range(i):
                self.assertFalse((rows[i, :50] == rows[j, :50]).all())

    def test_refuses_too_little_text(self) -> None:
        self.pages = self.pages[:1]
        with self.assertRaisesRegex(real_model.Refused, "expected more of it, found its end"):
            self.make()
        self.assertFalse(self.path.exists())

    def test_pages_give_prose_once(self) -> None:
        folder = self.path.parent
        prose = "A sentence that is long enough to count as prose, of a paragraph on this small page."
        page = f"<title>T</title><p>{prose[:30]}<em>{prose[30:]}</em></p><pre>{prose}</pre>No."
        (folder / "a.html").write_text(page)
        again = f'<div class="para">{prose}<ul><li>{prose}</ul></div>'
        (folder / "b.html").write_text(page + again)
        (folder / "c.html").write_text(f'<div class="para">{prose} Indeed.')

        pages = real_model.read_pages([folder])

        self.assertEqual(pages, [[prose], [prose + " Indeed."]])


if __name__ == "__main__":
    unittest.main()
