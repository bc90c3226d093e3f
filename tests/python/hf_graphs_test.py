"""kvtier.hf.graphed: replays of single-token passes against eager passes. Most of it needs a GPU.

Skipped without torch, transformers and kvtier-engine; KVTIER_TORCH_PYTHON names a Python that has
them.
"""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

from torch_python import rerun_or_skip

try:
    import torch
    from hf_test import GREEDY, HfTest, model_of, tokens

    import kvtier
    import kvtier.hf
    from kvtier.hf import graphs
except ImportError as error:
    rerun_or_skip(error)


class RefusalTest(HfTest):
    def test_refuses_what_has_no_graphs(self) -> None:
        model = model_of("llama")
        for cache, message in (
            (self.cache(model, backend=kvtier.Backend.CPU), "cache: expected an engine on a GPU"),
            (None, "cache: expected a KvtierCache, found NoneType"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                kvtier.hf.graphed(model, cache)


@unittest.skipUnless(torch.cuda.is_available(), "no GPU")
class CudaTest(HfTest):
    def pair(self, model: Any, **settings: Any) -> tuple[Any, Any]:
        return tuple(
            self.cache(model, backend=kvtier.Backend.CUDA, **settings) for _ in range(2)
        )

    def assert_same_steps(self, model: Any, caches: Any, ids: Any, **more: Any) -> None:
        """Passes of one column each of `ids`, within the block of the first cache: those of the
        second run eagerly."""
        cache, other = caches
        for column in ids.split(1, dim=1):
            expected = model(column, past_key_values=other, **more).logits
            found = model(column, past_key_values=cache, **more).logits
            self.assert_close(found, expected)
            self.assertEqual(cache.get_seq_length(), other.get_seq_length())
            for own, its in zip(cache.sessions, other.sessions):
                self.assertEqual(own.length(0), its.length(0))

    def test_replays_are_eager_passes(self) -> None:
        # With other graphs at every 8 tokens, or one for all, prompts and cuts in between.
        for name in ("llama", "mistral", "gemma2"):
            for dense, reserved in ((True, 8), (False, 8), (False, 1024)):
                with self.subTest(name, dense=dense, reserved=reserved), mock.patch.object(
                    graphs, "_RESERVED_TOKENS", reserved
                ):
                    model = model_of(name).cuda()
                    caches = self.pair(model, dense=dense)
                    block = kvtier.hf.graphed(model, caches[0])
                    replays = counted(block)
                    ids = tokens(50, 1, 300).cuda()
                    with block:
                        for cache in caches:
                            model(ids[:, :200], past_key_values=cache)
                        self.assert_same_steps(model, caches, ids[:, 200:230])
                        for cache in caches:
                            model(ids[:, 230:250], past_key_values=cache)
                        self.assert_same_steps(model, caches, ids[:, 250:260])
                        for cache in caches:
                            cache.crop(-30)
                        self.assert_same_steps(model, caches, ids[:, 260:280])
                    self.assertEqual(replays.call_count, 58)  # all but the first, and after the cut

    def test_generates_what_eager_passes_generate(self) -> None:
        model = model_of("llama", torch.bfloat16).cuda()
        ids, mask = tokens(51, 2, 120).cuda(), torch.ones(2, 120, dtype=torch.long).cuda()
        ids[1, :50], mask[1, :50] = 0, 0
        settings = {**GREEDY, "max_new_tokens": 40, "attention_mask": mask}
        settings |= {"return_dict_in_generate": True, "output_logits": True}
        cache, other = self.pair(model, max_batch_size=2)
        expected = model.generate(ids, past_key_values=other, **settings)
        block = kvtier.hf.graphed(model, cache)
        replays = counted(block)
        with block:
            found = model.generate(ids, past_key_values=cache, **settings)
        self.assertGreaterEqual(replays.call_count, 36)
        # Until a near-tie is decided another way, after which texts differ.
        same = (found.sequences == expected.sequences).all(0).cumprod(0)[ids.shape[1] :]
        self.assertGreater(int(same.sum()), 4)
        for one, two, alike in zip(found.logits, expected.logits, same.tolist()):
            if alike:
                torch.testing.assert_close(one, two, atol=0.2, rtol=0.0)

    def test_results_of_before_stay(self) -> None:
        model = model_of("llama").cuda()
        cache, _ = self.pair(model)
        ids = tokens(52, 1, 110).cuda()
        model(ids[:, :100], past_key_values=cache)
        with kvtier.hf.graphed(model, cache):
            kept = [model(each, past_key_values=cache).logits for each in ids[:, 100:].split(1, 1)]
            copies = [each.clone() for each in kept]
            model(ids[:, :1], past_key_values=cache)
        self.assertTrue(all(map(torch.equal, kept, copies)))
        self.assertEqual(len({float(each.sum()) for each in kept}), len(kept))

    def test_runs_other_passes_as_ever(self) -> None:
        model = model_of("llama").cuda()
        caches = self.pair(model)
        ids = tokens(53, 1, 60).cuda()
        block = kvtier.hf.graphed(model, caches[0])
        replays = counted(block)
        with block:
            for cache in caches:
                model(ids[:, :40], past_key_values=cache)
            self.assert_same_steps(model, caches, ids[:, 40:45], output_hidden_states=True)
            model(ids, use_cache=False)
        self.assertEqual(replays.call_count, 0)

    def test_a_pass_that_cannot_be_captured_changes_nothing(self) -> None:
        model = model_of("llama").cuda()
        caches = self.pair(model)
        ids = tokens(54, 1, 60).cuda()
        for cache in caches:
            model(ids[:, :40], past_key_values=cache)
        waits = model.model.norm.register_forward_hook(lambda *unused: torch.cuda.synchronize())
        with kvtier.hf.graphed(model, caches[0]):
            model(ids[:, 40:41], past_key_values=caches[0])
            with self.assertRaisesRegex(kvtier.FailedPreconditionError, "model: expected a pass that"):
                model(ids[:, 41:42], past_key_values=caches[0])
            self.assertEqual(caches[0].get_seq_length(), 41)
        waits.remove()
        model(ids[:, 40:41], past_key_values=caches[1])
        block = kvtier.hf.graphed(model, caches[0])
        replays = counted(block)
        with block:
            self.assert_same_steps(model, caches, ids[:, 41:50])
        self.assertEqual(replays.call_count, 8)

    def test_a_pass_beyond_the_capacity_changes_nothing(self) -> None:
        model = model_of("llama").cuda()
        cache, _ = self.pair(model, max_tokens=64)
        ids = tokens(55, 1, 66).cuda()
        model(ids[:, :60], past_key_values=cache)
        with kvtier.hf.graphed(model, cache):
            for column in ids[:, 60:64].split(1, dim=1):
                model(column, past_key_values=cache)
            with self.assertRaises(kvtier.ResourceExhaustedError):
                model(ids[:, 64:65], past_key_values=cache)
        self.assertEqual(cache.get_seq_length(), 64)

    def test_refuses_two_blocks_and_models_elsewhere(self) -> None:
        model = model_of("llama").cuda()
        cache, other = self.pair(model)
        with kvtier.hf.graphed(model, cache):
            with self.assertRaises(kvtier.FailedPreconditionError):
                kvtier.hf.graphed(model, other).__enter__()
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "model: expected parameters on one GPU"):
            kvtier.hf.graphed(model_of("llama"), cache)


def counted(graphed: Any) -> Any:
    """Returns the mock that counts replays of a block."""
    graphed._replay = mock.Mock(wraps=graphed._replay)
    return graphed._replay


if __name__ == "__main__":
    unittest.main()
