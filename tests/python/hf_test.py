"""kvtier.hf in models of transformers with random weights, against the attention of transformers over
keys and values that are rounded as kvtier stores them.

Skipped without torch, transformers and kvtier-engine; KVTIER_TORCH_PYTHON names a Python that has
them.
"""

from __future__ import annotations

import copy
import tempfile
import unittest
from pathlib import Path
from typing import Any

from torch_python import rerun_or_skip

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, DynamicCache

    import kvtier
    import kvtier.hf
    from kvtier.hf import KvtierCache
except ImportError as error:
    rerun_or_skip(error)

ROOT = Path(__file__).resolve().parents[2]
WINDOW = 48
VOCABULARY = 128
MAJOR = int(transformers.__version__.partition(".")[0])
# Of logits of about 10 in float32: sums in another order, and elements between two values of float16
# that are rounded the other way for it.
TOLERANCE = 5e-3

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": VOCABULARY,  # which no model returns
}

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "qwen2": transformers.Qwen2Config(
        **{**SHAPE, "hidden_size": 256}, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": transformers.Gemma2Config(
        **SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=64, attn_logit_softcapping=20.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE,
        sliding_window=WINDOW,
        query_pre_attn_scalar=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}


def model_of(name: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(7)
    config = copy.deepcopy(CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    model.set_attn_implementation("kvtier")
    return model


def reference_of(model: Any) -> Any:
    """The same weights with the attention of transformers; that with a softcap is eager alone."""
    reference = copy.deepcopy(model)
    softcap = getattr(model.config, "attn_logit_softcapping", None)
    reference.set_attn_implementation("eager" if softcap else "sdpa")
    return reference


def rounded_cache(config: Any) -> Any:
    """A DynamicCache of keys and values in float16. As in kvtier, first and long passes attend to
    their own before these are rounded."""
    cache = DynamicCache(config=config)
    softcap = getattr(config, "attn_logit_softcapping", None)

    def wrap(layer: Any) -> None:
        update = layer.update

        def rounded(keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            count = keys.shape[2]
            plain = softcap is None and (layer.get_seq_length() == 0 or count > 16)
            result = update(
                keys.half().to(keys.dtype), values.half().to(values.dtype), *args, **kwargs
            )
            if not plain:
                return result
            return tuple(
                torch.cat([stored[:, :, :-count], own], dim=2)
                for stored, own in zip(result, (keys, values))
            )

        layer.update = rounded

    for layer in cache.layers:
        wrap(layer)
    return cache


def tokens(seed: int, *shape: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, shape, generator=generator)


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


class HfTest(unittest.TestCase):
    def setUp(self) -> None:
        without = torch.no_grad()
        without.__enter__()
        self.addCleanup(without.__exit__, None, None, None)

    def cache(self, model: Any, **settings: Any) -> Any:
        defaults = {"dense": True, "max_tokens": 512, "kv_dtype": kvtier.DType.FLOAT16}
        if model.dtype == torch.bfloat16:
            defaults.pop("kv_dtype")
        cache = KvtierCache(model.config, **{**defaults, **settings})
        self.addCleanup(cache.close)
        return cache

    def assert_close(self, found: Any, expected: Any) -> None:
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0.0)


class DenseTest(HfTest):
    def test_logits_are_those_of_transformers(self) -> None:
        for name in CONFIGS:
            for first in (30, 100):  # within a window, and beyond
                with self.subTest(name, first=first):
                    model = model_of(name)
                    reference = reference_of(model)
                    cache, other = self.cache(model), rounded_cache(model.config)
                    ids = tokens(1, 1, first + 70 + 3)
                    start = 0
                    for count in (first, 70, 1, 1, 1):  # a prompt, a second turn, steps
                        chunk = ids[:, start : start + count]
                        found = model(chunk, past_key_values=cache).logits
                        expected = reference(chunk, past_key_values=other).logits
                        self.assertGreater(expected.std(), 0.5)
                        self.assert_close(found, expected)
                        start += count
                        self.assertEqual(cache.get_seq_length(), start)

    def test_logits_of_16_bit_models_are_as_near_to_sdpa_as_eager_ones(self) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            with self.subTest(dtype):
                model = model_of("llama", dtype)
                reference, eager = reference_of(model), reference_of(model)
                eager.set_attn_implementation("eager")
                cache = self.cache(model)
                others = [DynamicCache(config=model.config) for _ in range(2)]
                for chunk in tokens(1, 1, 120).split([100, 19, 1], dim=1):
                    found = model(chunk, past_key_values=cache).logits.float()
                    expected, other = (
                        each(chunk, past_key_values=its).logits.float()
                        for each, its in zip((reference, eager), others)
                    )
                    self.assertLess(
                        (found - expected).square().mean(), 2 * (other - expected).square().mean() + 1e-6
                    )

    def test_generates_the_same_tokens(self) -> None:
        for name in CONFIGS:
            model = model_of(name)
            reference = reference_of(model)
            for chunk in (None, 37):
                with self.subTest(name, chunk=chunk):
                    ids = tokens(2, 1, 90)
                    settings = {**GREEDY, "attention_mask": torch.ones_like(ids)}
                    expected = reference.generate(
                        ids, past_key_values=rounded_cache(model.config), **settings
                    )
                    if chunk is not None:
                        settings["prefill_chunk_size"] = chunk
                    found = model.generate(ids, past_key_values=self.cache(model), **settings)
                    self.assertEqual(found.tolist(), expected.tolist())

    def test_turns_go_on_where_the_cache_is(self) -> None:
        model = model_of("qwen3")
        reference = reference_of(model)
        cache, other = self.cache(model), rounded_cache(model.config)
        found, expected = tokens(3, 1, 40), tokens(3, 1, 40)
        for turn in range(3):
            more = tokens(10 + turn, 1, 15)
            found, expected = torch.cat([found, more], 1), torch.cat([expected, more], 1)
            mask = torch.ones_like(found)
            found = model.generate(found, attention_mask=mask, past_key_values=cache, **GREEDY)
            expected = reference.generate(
                expected, attention_mask=mask, past_key_values=other, **GREEDY
            )
            self.assertEqual(found.tolist(), expected.tolist())

    def test_rows_of_a_batch_are_each_their_own(self) -> None:
        lengths = (90, 33, 1)
        for name in ("llama", "mistral", "gemma2"):
            model = model_of(name)
            rows = [tokens(20 + i, length) for i, length in enumerate(lengths)]
            ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, own in enumerate(rows):
                ids[row, -len(own) :] = own
                mask[row, -len(own) :] = 1
            # Of chunks of 40 the first is padding alone in some rows. transformers 4 gives chunks of
            # such rows wrong positions, with its own caches too.
            for chunk in (None, 40) if MAJOR >= 5 else (None,):
                with self.subTest(name, chunk=chunk):
                    more = {} if chunk is None else {"prefill_chunk_size": chunk}
                    cache = self.cache(model, max_batch_size=len(rows))
                    found = model.generate(
                        ids, attention_mask=mask, past_key_values=cache, **GREEDY, **more
                    )
                    for row, own in enumerate(rows):
                        alone = model.generate(
                            own[None],
                            attention_mask=torch.ones(1, len(own)),
                            past_key_values=self.cache(model),
                            **GREEDY,
                        )
                        self.assertEqual(
                            found[row, max(lengths) :].tolist(), alone[0, len(own) :].tolist()
                        )
                        # Padding takes no room.
                        stored = cache.sessions[row].length()
                        self.assertEqual(stored, len(own) + GREEDY["max_new_tokens"] - 1)

    def test_takes_keys_and_values_of_another_prefill(self) -> None:
        model = model_of("llama")
        reference = reference_of(model)
        ids = tokens(40, 2, 101)
        other = rounded_cache(model.config)
        reference(ids[:, :100], past_key_values=other)
        cache = self.cache(model, max_batch_size=2, max_tokens=128)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, r"key_states: expected \[batch, 2"):
            cache.append(0, torch.zeros(2, 3, 5, 64), torch.zeros(2, 2, 5, 64))
        for index, layer in enumerate(other.layers):
            cache.append(index, layer.keys[:, :, :60], layer.values[:, :, :60])
            cache.append(index, layer.keys[:, :, 60:100], layer.values[:, :, 60:100])
        self.assertEqual(cache.get_seq_length(), 100)
        # What does not fit, or is refused in the second row, leaves the first as before, too.
        states = torch.zeros(2, 2, 40, 64)
        with self.assertRaises(kvtier.ClientError):
            cache.append(0, states, states)  # more than max_tokens
        states[1, 0, 0, 0] = torch.nan
        with self.assertRaises(kvtier.InvalidArgumentError):
            cache.append(0, states[:, :, :5], states[:, :, :5])
        self.assertEqual([session.length(0) for session in cache.sessions], [100, 100])
        found = model(ids[:, 100:], past_key_values=cache).logits
        self.assert_close(found, reference(ids[:, 100:], past_key_values=other).logits)

    def test_without_a_cache_it_is_sdpa(self) -> None:
        model = model_of("mistral")
        reference = reference_of(model)
        ids = tokens(4, 2, 80)
        mask = torch.ones_like(ids)
        mask[1, :30] = 0
        for settings in ({}, {"attention_mask": mask}):
            found = model(ids, use_cache=False, **settings).logits
            expected = reference(ids, use_cache=False, **settings).logits
            self.assert_close(found[:, 30:], expected[:, 30:])


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class CudaTest(HfTest):
    def test_logits_are_those_of_the_cpu(self) -> None:
        for name in ("llama", "mistral", "gemma2"):
            with self.subTest(name):
                model = model_of(name)
                on_gpu = copy.deepcopy(model).cuda()
                cache = self.cache(model, backend=kvtier.Backend.CPU)
                other = self.cache(on_gpu, backend=kvtier.Backend.CUDA)
                for chunk in tokens(41, 1, 183).split([100, 70, 10, 1, 1, 1], dim=1):
                    expected = model(chunk, past_key_values=cache).logits
                    found = on_gpu(chunk.cuda(), past_key_values=other).logits.cpu()
                    self.assert_close(found, expected)

    def test_rows_of_a_batch_are_those_of_the_cpu(self) -> None:
        model = model_of("llama", torch.bfloat16)
        ids, mask = tokens(42, 2, 300), torch.ones(2, 300, dtype=torch.long)
        ids[1, :50], mask[1, :50] = 0, 0
        logits = []
        for device, backend in (("cpu", kvtier.Backend.CPU), ("cuda", kvtier.Backend.CUDA)):
            cache = self.cache(model, max_batch_size=2, backend=backend)
            own = copy.deepcopy(model).to(device)
            own(ids.to(device), attention_mask=mask.to(device), past_key_values=cache)
            step, seen = ids[:, :1].to(device), torch.cat([mask, mask[:, -1:]], 1).to(device)
            logits.append(own(step, attention_mask=seen, past_key_values=cache).logits.cpu())
        torch.testing.assert_close(logits[1], logits[0], atol=0.2, rtol=0.0)


class SparseTest(HfTest):
    def test_is_dense_where_k_covers_the_length(self) -> None:
        model = model_of("llama")
        ids = tokens(5, 1, 300)
        retrieval = kvtier.RetrievalConfig(estimator=kvtier.Estimator.NORM_AWARE, top_k=512)
        sparse, dense = self.cache(model, retrieval=retrieval, dense=False), self.cache(model)
        for chunk in ids.split([297, 1, 1, 1], dim=1):
            found = model(chunk, past_key_values=sparse).logits
            self.assert_close(found, model(chunk, past_key_values=dense).logits)

    def test_attends_to_few_tokens_and_stays_near(self) -> None:
        model = model_of("gemma3")
        ids = tokens(6, 1, 400)
        retrieval = kvtier.RetrievalConfig(
            estimator=kvtier.Estimator.NORM_AWARE, top_k=64, sink_tokens=16, recent_tokens=16
        )
        cache, dense = self.cache(model, retrieval=retrieval, dense=False), self.cache(model)
        for each in (cache, dense):
            model(ids[:, :-1], past_key_values=each)
        before = cache.engine.stats().cumulative
        found = model(ids[:, -1:], past_key_values=cache).logits[0, 0]
        after = cache.engine.stats().cumulative
        # Per KV head: the window in two layers, 64 + 16 + 16 in one.
        kv_heads = SHAPE["num_key_value_heads"]
        attended = after["rows_attended"] - before["rows_attended"]
        self.assertEqual(attended, kv_heads * (2 * WINDOW + 96))
        self.assertEqual(after["rows_selected"] - before["rows_selected"], kv_heads * 64)
        expected = model(ids[:, -1:], past_key_values=dense).logits[0, 0]
        divergence = torch.nn.functional.kl_div(
            found.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="sum"
        )
        self.assertLess(divergence, 0.5)
        self.assertGreater(divergence, 0.0)

    def test_generates_by_default_settings(self) -> None:
        model = model_of("llama", torch.bfloat16)
        ids = tokens(7, 2, 500)
        cache = KvtierCache(model.config, max_tokens=600, max_batch_size=2)
        self.addCleanup(cache.close)
        self.assertEqual(cache.engine.retrieval, kvtier.hf.default_retrieval(64))
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY
        )
        self.assertEqual(found.shape, (2, 512))
        self.assertEqual([session.length() for session in cache.sessions], [511, 511])


class RowsTest(HfTest):
    def test_crop_is_a_shorter_past(self) -> None:
        for name in ("llama", "mistral"):
            model = model_of(name)
            ids, end = tokens(8, 1, 130), tokens(9, 1, 20)
            for crop in (-70, 60):  # tokens to remove; tokens to keep, as in transformers 4
                with self.subTest(name, crop=crop):
                    cache, fresh = self.cache(model), self.cache(model)
                    model(ids, past_key_values=cache)
                    cache.crop(torch.tensor(crop))  # as transformers 5.17 has it
                    cache.crop(0)
                    self.assertIsInstance(cache.get_seq_length(), int)
                    self.assertEqual(cache.get_seq_length(), 60)
                    model(ids[:, :1], past_key_values=fresh)  # then by pages, as behind a crop
                    model(ids[:, 1:60], past_key_values=fresh)
                    found = model(end, past_key_values=cache).logits
                    expected = model(end, past_key_values=fresh).logits
                    torch.testing.assert_close(found, expected, atol=0.2, rtol=0.0)
                    self.assertEqual(found.argmax(-1).tolist(), expected.argmax(-1).tolist())
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, "crop: expected at most 80"):
                cache.crop(-81)

    def test_beams_are_those_of_transformers(self) -> None:
        for name in ("llama", "mistral"):
            with self.subTest(name):
                model = model_of(name)
                reference = reference_of(model)
                ids = tokens(10, 2, 70)
                settings = {
                    **{**GREEDY, "attention_mask": torch.ones_like(ids)},
                    **{"num_beams": 3, "num_return_sequences": 2},
                }
                expected = reference.generate(
                    ids, past_key_values=rounded_cache(model.config), **settings
                )
                cache = self.cache(model, max_batch_size=6)
                found = model.generate(ids, past_key_values=cache, **settings)
                self.assertEqual(found.tolist(), expected.tolist())

    def test_drafts_that_are_refused_leave_no_trace(self) -> None:
        model = model_of("llama")
        ids = tokens(11, 1, 20).repeat(1, 4)
        mask = torch.ones_like(ids)
        plain = model.generate(
            ids, attention_mask=mask, past_key_values=self.cache(model), **GREEDY
        )
        cache = self.cache(model)
        drafted = model.generate(
            ids, attention_mask=mask, past_key_values=cache, prompt_lookup_num_tokens=4, **GREEDY
        )
        self.assertEqual(drafted.tolist(), plain.tolist())

    def test_copies_share_a_past_and_nothing_after(self) -> None:
        model = model_of("llama")
        prompt, ends = tokens(12, 1, 100), [tokens(30 + i, 1, 9) for i in range(2)]
        cache = self.cache(model, max_batch_size=4)
        model(prompt, past_key_values=cache)
        copied = copy.deepcopy(cache)
        self.assertIs(copied.engine, cache.engine)
        for each, end in zip((cache, copied), ends):
            fresh = self.cache(model)
            model(prompt, past_key_values=fresh)
            found = model(end, past_key_values=each).logits
            self.assertTrue(torch.equal(found, model(end, past_key_values=fresh).logits))
        cache.batch_repeat_interleave(3)
        self.assertEqual([each.length() for each in cache.sessions], [109] * 3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        self.assertEqual(len(cache.sessions), 2)
        cache.batch_select_indices(torch.tensor([False, True]))
        self.assertEqual(len(cache.sessions), 1)
        copied.close()
        cache.reset()
        self.assertEqual((cache.get_seq_length(), cache.sessions), (0, []))
        self.assertEqual(cache.engine.stats().snapshot["sessions"], 0)


class DocumentTest(HfTest):
    def test_the_example_runs(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = {f"w{i}": i for i in range(VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        names = ["input_ids", "attention_mask"]
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, model_input_names=names
        )
        example = (ROOT / "docs" / "python.md").read_text().split("```python\n")[2].split("```")[0]
        with tempfile.TemporaryDirectory(prefix="kvtier-python-") as folder:
            AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).save_pretrained(folder)
            fast.save_pretrained(folder)
            found: dict[str, Any] = {"path": folder, "text": "w5 w9 " * 150}
            exec(example, found)
        self.assertEqual(found["ids"].shape, (1, 400))
        self.assertEqual(found["cache"].get_seq_length(), 399)


class BadInputTest(HfTest):
    def test_refuses_masks_that_no_session_has(self) -> None:
        model = model_of("llama")
        ids = tokens(13, 2, 10)
        gap, right, later = (torch.ones_like(ids) for _ in range(3))
        gap[0, 4] = 0
        right[1, -2:] = 0
        later[1, :3] = 0
        cache = self.cache(model, max_batch_size=2)
        for message, mask in (
            ("left padding.*row 0 at position 4", gap),
            ("left padding.*row 1 at position 8", right),
            (r"attention_mask: expected \[batch, 10\]", torch.ones(2, 7)),
            ("found a mask of shape", torch.ones(2, 1, 10, 10, dtype=torch.bool)),
        ):
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                model(ids, attention_mask=mask, past_key_values=cache)
            self.assertEqual(cache.get_seq_length(), 0)
        model(ids[:, :9], past_key_values=cache)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "0 tokens of padding in row 1"):
            model(ids[:, 9:], attention_mask=later, past_key_values=cache)
        self.assertEqual(cache.get_seq_length(), 9)

    def test_a_pass_of_another_batch_changes_nothing(self) -> None:
        model = model_of("llama")
        cache, fresh = self.cache(model, max_batch_size=2), self.cache(model)
        ids = tokens(44, 2, 13)
        for each in (cache, fresh):
            model(ids[:1, :10], past_key_values=each)
        for mask in (None, torch.ones_like(ids)):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected a batch of 1, as before"):
                model(ids[:, 10:], attention_mask=mask, past_key_values=cache)
            self.assertEqual((cache.get_seq_length(), cache.padding), (10, [0]))
        found = model(ids[:1, 10:], past_key_values=cache).logits
        self.assertTrue(torch.equal(found, model(ids[:1, 10:], past_key_values=fresh).logits))

    def test_refuses_what_it_does_not_compute(self) -> None:
        model = model_of("llama")
        ids = tokens(14, 1, 10)
        cache = self.cache(model)
        cases: list[tuple[str, Any]] = [
            ("output_attentions", lambda: model(ids, past_key_values=cache, output_attentions=True)),
            ("position_bias", lambda: model(ids, past_key_values=cache, position_bias=ids)),
            ("key_states: expected a batch of 1", lambda: model(ids.repeat(2, 1), past_key_values=cache)),
        ]
        model(ids, past_key_values=cache)
        for message, call in cases:
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                call()
            self.assertEqual(cache.get_seq_length(), 10)
            self.assertEqual(cache.sessions[0].length(0), 10)
        with torch.enable_grad(), self.assertRaisesRegex(kvtier.InvalidArgumentError, "no_grad"):
            model(ids, past_key_values=cache)

    def test_refuses_tensors_on_other_devices(self) -> None:
        model = model_of("llama")
        cache = self.cache(model, backend=kvtier.Backend.CPU)
        model(tokens(43, 1, 10), past_key_values=cache)
        states = torch.zeros(1, 2, 5, 64)
        for others in ("meta", "cuda") if torch.cuda.is_available() else ("meta",):
            for name, pair in (
                ("key_states", (states.to(others), states)),
                ("value_states", (states, states.to(others))),
            ):
                message = f"{name}: expected a tensor that the engine reads.* found one on {others}"
                with self.subTest(message):
                    with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                        cache.append(0, *pair)
                    with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                        cache.update(*pair, 0)
                    self.assertEqual(cache.get_seq_length(), 10)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "keys: expected a tensor on the"):
            cache.sessions[0].append(0, states[0].transpose(0, 1).to("meta"), states[0].mT)

    def test_refuses_a_model_of_another_implementation(self) -> None:
        model = model_of("llama")
        cache = self.cache(model)
        reference = reference_of(model)
        ids = tokens(15, 1, 10)
        reference(ids, past_key_values=cache)  # right by itself: it has attended to its own keys
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "set_attn_implementation"):
            reference(ids[:, :1], past_key_values=cache)

    def test_refuses_another_model(self) -> None:
        model, other = model_of("llama"), model_of("llama")
        cache = self.cache(model)
        ids = tokens(16, 1, 10)
        model(ids, past_key_values=cache)
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "another"):
            other(ids, past_key_values=cache)
        self.assertEqual(cache.get_seq_length(), 10)
        cache.reset()
        other(ids, past_key_values=cache)

    def test_a_pass_beyond_the_capacity_changes_nothing(self) -> None:
        model = model_of("llama")
        cache, fresh = self.cache(model, max_tokens=100), self.cache(model)
        ids = tokens(17, 1, 101)
        for each in (cache, fresh):
            model(ids[:, :90], past_key_values=each)
        with self.assertRaises(kvtier.ResourceExhaustedError):
            model(ids[:, 90:], past_key_values=cache)
        self.assertEqual((cache.get_seq_length(), cache.sessions[0].length()), (90, 90))
        found = model(ids[:, 90:100], past_key_values=cache).logits
        expected = model(ids[:, 90:100], past_key_values=fresh).logits
        self.assertTrue(torch.equal(found, expected))

    def test_a_pass_that_is_interrupted_between_layers_is_dropped_by_the_next(self) -> None:
        class Interrupted(BaseException):
            pass

        def interrupt(*unused: Any) -> None:
            raise Interrupted

        model = model_of("llama")
        for length in (1, 3, 40):
            with self.subTest(length=length):
                cache, fresh = self.cache(model), self.cache(model)
                past, lost, ids = tokens(18, 1, 30), tokens(19, 1, length), tokens(20, 1, 5)
                for each in (cache, fresh):
                    model(past, past_key_values=each)
                hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
                with self.assertRaises(Interrupted):
                    model(lost, past_key_values=cache)
                hook.remove()
                message = f"found 30 to {30 + length} tokens, .* the cache now has 30,"
                with self.assertRaisesRegex(kvtier.FailedPreconditionError, message):
                    model(ids, past_key_values=cache)
                self.assertEqual((cache.get_seq_length(), cache.sessions[0].length()), (30, 30))
                found = model(ids, past_key_values=cache).logits
                self.assertTrue(torch.equal(found, model(ids, past_key_values=fresh).logits))

    def test_the_next_pass_may_have_a_mask_and_another_batch(self) -> None:
        class OutOfMemory(Exception):
            pass

        def fail(*unused: Any) -> None:
            raise OutOfMemory

        for name in ("llama", "gemma3"):
            model = model_of(name)
            ids = tokens(45, 3, 40)
            mask = torch.ones_like(ids)
            mask[1, :9] = 0
            for past, rows in ((0, 2), (30, 3)):
                with self.subTest(name, past=past):
                    cache, fresh = (self.cache(model, max_batch_size=3) for _ in range(2))
                    for each in (cache, fresh) if past else ():
                        model(ids[:, :past], attention_mask=mask[:, :past], past_key_values=each)
                    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
                    with self.assertRaises(OutOfMemory):
                        model(ids[:, past:], attention_mask=mask, past_key_values=cache)
                    hook.remove()
                    again = ids[:rows, past:], {"attention_mask": mask[:rows]}
                    message = f"of a pass that was interrupted; the cache now has {past},"
                    with self.assertRaisesRegex(kvtier.FailedPreconditionError, message):
                        model(again[0], past_key_values=cache, **again[1])
                    self.assertEqual(cache.get_seq_length(), past)
                    found = model(again[0], past_key_values=cache, **again[1]).logits
                    expected = model(again[0], past_key_values=fresh, **again[1]).logits
                    self.assertTrue(torch.equal(found, expected))

    def test_refuses_configurations(self) -> None:
        chunked = copy.deepcopy(CONFIGS["llama"])
        chunked.layer_types = ["full_attention", "chunked_attention", "full_attention"]
        for message, config, settings in (
            ("encoder-decoder", transformers.T5Config(), {}),
            (r"layer_types\[1\].*chunked_attention", chunked, {}),
            (
                "self-attention alone, found cross_attention_layers",
                transformers.MllamaTextConfig(num_hidden_layers=4, cross_attention_layers=[1]),
                {},
            ),
            ("num_kv_shared_layers", transformers.Gemma3nTextConfig(), {}),
            ("head_dim", transformers.LlamaConfig(**{**SHAPE, "head_dim": 40}), {}),
            ("max_batch_size: expected at least 1", CONFIGS["llama"], {"max_batch_size": 0}),
        ):
            with self.subTest(message), self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                KvtierCache(config, max_tokens=100, **settings)
        with self.assertRaisesRegex(
            kvtier.ResourceExhaustedError, "found .*, for max_tokens 536870912 and max_batch_size 1000"
        ):
            KvtierCache(CONFIGS["llama"], max_tokens=1 << 29, max_batch_size=1000)
        engine = self.cache(model_of("llama")).engine
        with self.assertRaisesRegex(kvtier.FailedPreconditionError, "expected layers 2"):
            KvtierCache(transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 2}), engine=engine)
        with self.assertRaisesRegex(
            kvtier.FailedPreconditionError, "layer 0 with a window of 48 tokens .*, found 0"
        ):
            KvtierCache(CONFIGS["mistral"], engine=engine)
        other = self.cache(model_of("mistral")).engine
        with self.assertRaisesRegex(
            kvtier.FailedPreconditionError, "layer 0 with a window of 0 tokens .*, found 48"
        ):
            KvtierCache(CONFIGS["llama"], engine=other)


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    unittest.main()
