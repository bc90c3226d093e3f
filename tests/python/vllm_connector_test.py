"""The connector without tiers against vLLM's own classes and a server, on a CPU."""

from __future__ import annotations

import sys
import unittest
from types import SimpleNamespace
from typing import Any

from engines import IMPATIENT, PATIENT, need, poll

need("vllm", "torch")

import kvtier
import torch
import vllm
from server import Server, ServerTest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvtier.vllm.connector import KvtierConnector, KvtierMetadata, Transfer

BLOCKS, TOKENS, HEADS, DIM = 32, 16, 2, 8
LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


def make_config(
    server: Server, model: str, options: dict[str, Any], served: str = "", **parallel: int
) -> Any:
    """Returns of vLLM's configuration what a connector reads."""
    sizes = {"tensor_parallel_size": 1, "rank": 0, **parallel}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"server": server.address, **PATIENT, **options}
        ),
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(model=model, served_model_name=served or model),
        cache_config=SimpleNamespace(block_size=TOKENS),
    )


def make_cache_config(groups: int = 1, **window: int) -> Any:
    kind = SlidingWindowSpec if window else FullAttentionSpec
    spec = kind(
        block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16, **window
    )
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=list(LAYERS))
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group] * groups)


def make_request(name: str, prompt: list[int]) -> Any:
    """Block i of the prompt has `prompt[i]` for all its tokens; the last may be a part."""
    hashes = [repr(prompt[: i + 1]).encode().rjust(32, b"#")[-32:] for i in range(len(prompt))]
    tokens = len(prompt) * TOKENS
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, num_tokens=tokens, num_prompt_tokens=tokens
    )


def content(layer: int, block: list[int]) -> Any:
    """Returns the KV of a block, which depends on all before it."""
    generator = torch.Generator().manual_seed(hash((layer, tuple(block))) % (1 << 40))
    return torch.rand((2, TOKENS, HEADS, DIM), generator=generator).to(torch.bfloat16)


class Interrupted(BaseException):
    pass


class Engine:
    """The connectors of a scheduler and a worker, and what vLLM does with them in a step."""

    def __init__(self, server: Server, model: str, second: bool = False, **options: Any) -> None:
        config = make_config(server, model, options)
        self.scheduler = KvtierConnector(config, KVConnectorRole.SCHEDULER, make_cache_config())
        self.worker = KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config())
        shape = (2, BLOCKS) if second else (BLOCKS, 2)  # as backends have it
        self.second = second
        self.caches = {
            name: torch.zeros((*shape, TOKENS, HEADS, DIM), dtype=torch.bfloat16) for name in LAYERS
        }
        self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self.next = 1
        self.interrupted_at = ""  # a layer
        self.microbatches = 1
        self.stores: list[list[bytes]] = []  # of each step

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def block(self, layer: str, number: int) -> Any:
        cache = self.caches[layer]
        return cache[:, number] if self.second else cache[number]

    def matched(self, request: Any, computed: int = 0) -> int:
        def answered() -> Any:
            tokens, later = self.scheduler.get_num_new_matched_tokens(request, computed)
            assert later is False
            return None if tokens is None else (tokens,)

        return int(poll(answered)[0])

    def run(self, request: Any, prompt: list[int], steps: int = 1) -> tuple[int, set[int]]:
        """Schedules and runs a request's prompt in `steps`. Returns how many tokens were to be loaded,
        and the places in the prompt of blocks that failed; compares what was loaded."""
        tokens = self.matched(request)
        blocks = [(self.next + i) % BLOCKS for i in range(len(prompt))]
        self.next += len(prompt)
        for layer in LAYERS:
            for block in blocks:
                self.block(layer, block).zero_()
        allocated = SimpleNamespace(get_block_ids=lambda: (blocks,))
        self.scheduler.update_state_after_alloc(request, allocated, tokens)
        failed: set[int] = set()
        computed = tokens
        left = len(prompt) * TOKENS - tokens
        for step in range(steps):
            now = left // (steps - step)
            left -= now
            cached: Any = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
            new = []
            if step == 0:
                new.append(SimpleNamespace(
                    req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=computed
                ))
            else:
                cached.req_ids.append(request.request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(computed)
            output = SimpleNamespace(
                scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                num_scheduled_tokens={request.request_id: now},
            )
            metadata = self.scheduler.build_connector_meta(output)
            self.stores.append(list(metadata.store.hashes))
            now_failed = self.forward(metadata, prompt, blocks, computed, computed + now)
            self.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids=now_failed))
            failed |= now_failed
            computed += now
        self.scheduler.request_finished(request, blocks)
        for i in range(tokens // TOKENS):
            if blocks[i] in failed:
                continue
            for number, layer in enumerate(LAYERS):
                torch.testing.assert_close(
                    self.block(layer, blocks[i]), content(number, prompt[: i + 1]), rtol=0, atol=0
                )
        return tokens, {blocks.index(block) for block in failed}

    def forward(
        self, metadata: Any, prompt: list[int], blocks: list[int], begin: int, end: int
    ) -> set[int]:
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        try:
            for number, layer in enumerate(LAYERS):
                if layer == self.interrupted_at:
                    raise Interrupted
                now = range(begin // TOKENS, -(-end // TOKENS))
                for batch in range(self.microbatches):
                    self.worker.wait_for_layer_load(layer)
                    for i in now[batch :: self.microbatches]:  # as the model computes
                        self.block(layer, blocks[i]).copy_(content(number, prompt[: i + 1]))
                    self.worker.save_kv_layer(layer, self.caches[layer], None)
        finally:  # as vLLM does
            self.worker.wait_for_save()
            self.worker.clear_connector_metadata()
        return set(self.worker.get_block_ids_with_load_errors())


class VllmConnectorTest(ServerTest):
    def engine(self, model: str = "", second: bool = False, **options: Any) -> Engine:
        engine = Engine(self.server, model or self.id(), second, **options)
        self.addCleanup(engine.close)
        return engine

    def stored(self, engine: Engine, prompt: list[int]) -> None:
        """Waits until the blocks of a prompt are there."""
        request = make_request("probe", [*prompt, -1])

        def there() -> bool:
            engine.scheduler.request_finished(request, [])
            return engine.matched(request) == len(prompt) * TOKENS

        poll(there)
        engine.scheduler.request_finished(request, [])

    def test_prompts_come_back_in_another_engine_layer_by_layer(self) -> None:
        for second in (False, True):
            for steps in (1, 3):
                with self.subTest(second=second, steps=steps):
                    model = f"{self.id()} {second} {steps}"
                    writer, reader = self.engine(model, second), self.engine(model, second)
                    prompt = [5, 6, 7, 8, 9]
                    self.assertEqual(writer.run(make_request("a", prompt), prompt, steps), (0, set()))
                    self.stored(reader, prompt)
                    # All but the last block, of which one token must be computed.
                    self.assertEqual(
                        reader.run(make_request("b", prompt), prompt), (4 * TOKENS, set())
                    )
                    longer = [*prompt, 10, 11]
                    self.assertEqual(
                        reader.run(make_request("c", longer), longer), (5 * TOKENS, set())
                    )
                    other = [5, 6, 1, 2]
                    self.assertEqual(
                        reader.run(make_request("d", other), other), (2 * TOKENS, set())
                    )

    def test_what_the_engine_has_computed_is_not_loaded_again(self) -> None:
        engine = self.engine()
        prompt = [1, 2, 3, 4]
        engine.run(make_request("a", prompt), prompt)
        self.stored(engine, prompt)
        request = make_request("b", prompt)
        self.assertEqual(engine.matched(request, 2 * TOKENS), TOKENS)
        self.assertEqual(engine.matched(request, 3 * TOKENS), 0)
        self.assertEqual(engine.matched(request, TOKENS + 1), 0)  # not at a block

    def test_models_ranks_and_shapes_do_not_meet(self) -> None:
        prompt = [1, 2, 3]
        writer = self.engine("org/one")
        writer.run(make_request("a", prompt), prompt)
        self.stored(writer, prompt)
        identity = writer.worker.get_handshake_metadata().identity
        self.assertEqual(self.engine("org/two").matched(make_request("b", prompt)), 0)
        for changes in ({"rank": 1, "tensor_parallel_size": 2}, {"tensor_parallel_size": 2}):
            config = make_config(self.server, "org/one", {}, **changes)
            worker = KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config())
            self.addCleanup(worker.shutdown)
            worker.register_kv_caches(writer.caches)
            self.assertNotEqual(worker.get_handshake_metadata().identity, identity)
        worker = KvtierConnector(
            make_config(self.server, "org/one", {}, "two"), KVConnectorRole.WORKER, make_cache_config()
        )
        self.addCleanup(worker.shutdown)
        worker.register_kv_caches(writer.caches)
        self.assertNotEqual(worker.get_handshake_metadata().identity, identity)
        halves = {name: torch.zeros((BLOCKS, 2, TOKENS, HEADS, DIM // 2)) for name in LAYERS}
        worker = KvtierConnector(
            make_config(self.server, "org/one", {}), KVConnectorRole.WORKER, make_cache_config()
        )
        self.addCleanup(worker.shutdown)
        worker.register_kv_caches(halves)
        self.assertNotEqual(worker.get_handshake_metadata().identity, identity)

    def test_blocks_that_go_before_they_are_loaded_are_reported(self) -> None:
        engine = self.engine()
        prompt = [1, 2, 3, 4]
        engine.run(make_request("a", prompt), prompt)
        self.stored(engine, prompt)
        request = make_request("b", prompt)
        self.assertEqual(engine.matched(request), 3 * TOKENS)
        self.remove(engine, request.block_hashes[1])
        self.assertEqual(engine.run(request, prompt), (3 * TOKENS, {1}))

    def stored_prefix(self) -> tuple[Engine, list[int], Any]:
        """Returns an engine that has stored three blocks, a prompt that begins with them, and its request."""
        engine = self.engine()
        prompt = [1, 2, 3, 4, 5, 6, 7]
        engine.run(make_request("a", prompt[:3]), prompt[:3])
        self.stored(engine, prompt[:3])
        return engine, prompt, make_request("b", prompt)

    def test_what_is_computed_from_blocks_that_did_not_come_is_not_stored(self) -> None:
        engine, prompt, request = self.stored_prefix()
        self.assertEqual(engine.matched(request), 3 * TOKENS)
        self.remove(engine, request.block_hashes[1])
        engine.stores.clear()
        self.assertEqual(engine.run(request, prompt, steps=4), (3 * TOKENS, {1}))
        self.assertEqual(engine.stores, [[]] * 4)

    def test_what_is_computed_behind_loaded_blocks_is_stored_once_they_have_come(self) -> None:
        engine, prompt, request = self.stored_prefix()
        engine.stores.clear()
        self.assertEqual(engine.run(request, prompt, steps=4), (3 * TOKENS, set()))
        hashes = request.block_hashes
        self.assertEqual(engine.stores, [[], [], hashes[3:6], hashes[6:]])
        self.stored(engine, prompt)

    def test_a_load_that_fails_is_that_of_every_request_which_has_its_blocks(self) -> None:
        engine = self.engine()
        prompt = [1, 2, 3]
        engine.run(make_request("a", prompt), prompt)
        self.stored(engine, prompt)
        first, second, other = (
            make_request(name, tokens)
            for name, tokens in (("b", [1, 2, 8]), ("c", [1, 2, 9]), ("d", [5, 6, 7]))
        )
        self.assertEqual(engine.matched(first), 2 * TOKENS)
        tables = {"b": [1, 2, 3], "c": [1, 2, 4], "d": [5, 6, 7]}
        loaded = {"b": 2 * TOKENS, "c": 0, "d": 0}  # the second finds the blocks of the first
        for request in (first, second, other):
            allocated = SimpleNamespace(get_block_ids=lambda: (tables[request.request_id],))
            engine.scheduler.update_state_after_alloc(
                request, allocated, loaded[request.request_id]
            )

        def step(new: bool) -> list[bytes]:
            computed = {"b": 2 * TOKENS, "c": 2 * TOKENS, "d": 0}
            tokens = {name: 3 * TOKENS - done if new else 1 for name, done in computed.items()}
            requests = [
                SimpleNamespace(
                    req_id=name, block_ids=(tables[name],), num_computed_tokens=computed[name]
                )
                for name in tables
            ]
            cached = SimpleNamespace(
                req_ids=[] if new else list(tables), new_block_ids=[None] * 3,
                num_computed_tokens=[3 * TOKENS] * 3,
            )
            output = SimpleNamespace(
                scheduled_new_reqs=requests if new else [], scheduled_cached_reqs=cached,
                num_scheduled_tokens=tokens,
            )
            return list(engine.scheduler.build_connector_meta(output).store.hashes)

        self.assertEqual(step(True), other.block_hashes)
        engine.scheduler.update_connector_output(SimpleNamespace(invalid_block_ids={2}))
        self.assertEqual([step(False), step(False)], [[], []])

    def test_blocks_of_microbatches_are_stored_whole(self) -> None:
        engine, reader = self.engine(), self.engine()
        engine.microbatches = 2
        prompt = [1, 2, 3, 4, 5]
        engine.run(make_request("a", prompt), prompt)
        self.stored(reader, prompt)
        longer = [*prompt, 6]
        self.assertEqual(reader.run(make_request("b", longer), longer), (5 * TOKENS, set()))

    def test_a_pass_that_is_interrupted_stores_nothing(self) -> None:
        engine, reader = self.engine(), self.engine()
        first, second = [1, 2, 3, 4], [1, 2, 5]
        engine.interrupted_at = LAYERS[1]
        with self.assertRaises(Interrupted):
            engine.run(make_request("a", first), first)
        engine.interrupted_at = ""
        engine.run(make_request("b", second), second)
        self.stored(reader, second)
        self.assertEqual(reader.run(make_request("c", second), second), (2 * TOKENS, set()))
        engine.worker._worker._store._threads.shutdown(wait=True)
        self.assertEqual(reader.matched(make_request("d", [*first, -1])), 2 * TOKENS)

    def test_a_pass_that_never_ends_leaves_nothing_to_the_next(self) -> None:
        engine, reader = self.engine(), self.engine()
        prompt = [1, 2, 3, 4]
        store = Transfer([b"#" * 32], [BLOCKS - 1])
        engine.worker.bind_connector_metadata(KvtierMetadata(store=store))
        engine.worker.save_kv_layer(LAYERS[0], engine.caches[LAYERS[0]], None)
        engine.worker.clear_connector_metadata()
        engine.run(make_request("a", prompt), prompt)
        self.stored(reader, prompt)
        self.assertEqual(reader.run(make_request("b", prompt), prompt), (3 * TOKENS, set()))

    def test_requests_that_must_compute_their_prompt_load_nothing(self) -> None:
        engine = self.engine()
        prompt = [1, 2, 3]
        engine.run(make_request("a", prompt), prompt)
        self.stored(engine, prompt)
        request = make_request("b", prompt)
        request.skip_reading_prefix_cache = True
        self.assertEqual(engine.scheduler.get_num_new_matched_tokens(request, 0), (0, False))

    def test_no_request_has_to_deliver_its_blocks(self) -> None:
        self.assertIs(self.engine().scheduler.requires_kv_delivery, False)

    def test_says_that_it_forgets_nothing(self) -> None:
        engine = self.engine()
        prompt = [1, 2, 3]
        engine.run(make_request("a", prompt), prompt)
        self.stored(engine, prompt)
        self.assertIs(engine.scheduler.reset_cache(), False)
        self.assertEqual(engine.matched(make_request("b", prompt)), 2 * TOKENS)

    def remove(self, engine: Engine, hash: bytes) -> None:
        """Removes a block of one layer from the server."""
        handshake = engine.worker.get_handshake_metadata()
        size = handshake.block_bytes
        model = f"{handshake.identity}/{size * len(LAYERS)}/{len(LAYERS)}"
        with kvtier.Client(self.server.address) as client, client.open_pages(model, size) as pages:
            (found,) = pages.lookup([hash], [0])
            self.assertEqual(pages.remove([found.handle]), [None])

    def test_what_was_not_tested_is_refused_at_the_start(self) -> None:
        for changes, message in (
            ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1, .*found 2"),
            ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: expected 1"),
        ):
            with self.assertRaisesRegex(kvtier.InvalidArgumentError, message):
                config = make_config(self.server, "m", {}, **changes)
                KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config())
        config = make_config(self.server, "m", {})
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "one group of layers, found 2"):
            KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config(2))
        with self.assertRaisesRegex(
            kvtier.InvalidArgumentError, "expected FullAttentionSpec, .*found SlidingWindowSpec"
        ):
            KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config(sliding_window=32))
        config = make_config(self.server, "m", {"tiemout": 1.0})
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, 'did you mean "timeout"'):
            KvtierConnector(config, KVConnectorRole.WORKER, make_cache_config())
        worker = KvtierConnector(
            make_config(self.server, "m", {}), KVConnectorRole.WORKER, make_cache_config()
        )
        self.addCleanup(worker.shutdown)
        with self.assertRaisesRegex(kvtier.InvalidArgumentError, "expected a KV cache of 32 blocks"):
            worker.register_kv_caches({name: torch.zeros((3, 3)) for name in LAYERS})


class VllmConnectorFaultTest(unittest.TestCase):
    def setUp(self) -> None:
        self.server = Server("--page-arena-mib", "8")
        self.addCleanup(self.server.close)

    def test_a_killed_server_is_a_miss_and_a_new_one_is_used(self) -> None:
        engine = Engine(self.server, "m", retry_after=0.01)
        self.addCleanup(engine.close)
        prompt = [1, 2, 3, 4]
        engine.run(make_request("a", prompt), prompt)
        poll(lambda: self.try_again(engine, prompt) == 3 * TOKENS)
        request = make_request("b", prompt)
        self.assertEqual(engine.matched(request), 3 * TOKENS)
        self.server.kill()
        self.assertEqual(engine.run(request, prompt), (3 * TOKENS, {0, 1, 2}))
        self.assertEqual(engine.run(make_request("c", prompt), prompt), (0, set()))
        self.server.start()
        poll(lambda: self.try_again(engine, prompt) == 3 * TOKENS)

    def test_a_server_that_stands_still_is_a_miss_within_the_deadline(self) -> None:
        engine = Engine(self.server, "m", retry_after=0.01, **IMPATIENT)
        self.addCleanup(engine.close)
        prompt = [1, 2, 3, 4]
        poll(lambda: self.try_again(engine, prompt) == 3 * TOKENS)
        request = make_request("b", prompt)
        self.assertEqual(engine.matched(request), 3 * TOKENS)
        self.server.pause()
        try:
            tokens, failed = engine.run(request, prompt)
            self.assertEqual((tokens, failed), (3 * TOKENS, {0, 1, 2}))
            self.assertEqual(engine.run(make_request("c", prompt), prompt)[0], 0)
        finally:
            self.server.resume()
        poll(lambda: self.try_again(engine, prompt) == 3 * TOKENS)

    def try_again(self, engine: Engine, prompt: list[int]) -> int:
        return engine.run(make_request("again", prompt), prompt)[0]


if __name__ == "__main__":
    print(f"vLLM {vllm.__version__}", file=sys.stderr)
    unittest.main()
