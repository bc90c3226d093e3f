"""A conversation with a model of Hugging Face transformers whose keys and values kvtier keeps.

    python -m kvtier.chat --model DIR [--preset NAME] [--k N] [--prompt TEXT]

Reads turns from standard input, a line each, and writes the answers as they come; an empty line, the
end of the input or Ctrl-C ends it. Needs the extra `hf`."""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ContextManager, Iterator, Optional, Sequence

import kvtier
from kvtier.config import RetrievalConfig, SelectionRule
from kvtier.engine_config import Backend, KvPlacement
from kvtier.errors import invalid, without_package
from kvtier.model_options import add_model_options, interruptible, load_model

# torch, transformers and kvtier.hf are imported where they are used: --help and the errors of
# options need none of them.
if TYPE_CHECKING:
    import torch

    from kvtier.hf import KvtierCache

#: How a step selects, beside `kvtier.hf.default_retrieval`.
PRESETS = ("priority", "top_k", "socket", "dense")


def retrieval_of(preset: str, k: int, head_dim: int) -> RetrievalConfig:
    """Returns the settings of a preset; `k` 0: its own number of tokens."""
    from kvtier.hf import default_retrieval

    retrieval = default_retrieval(head_dim)
    if preset == "top_k":
        retrieval = replace(retrieval, rule=SelectionRule.TOP_K)
    if preset == "socket":
        retrieval = RetrievalConfig.socket()
    return replace(retrieval, top_k=k) if k else retrieval


class Chat:
    """A conversation. `ask` answers a turn; `tokens` counts those of the last answer, `seconds` the
    time of its steps, behind the first token."""

    def __init__(self, model: Any, tokenizer: Any, cache: KvtierCache) -> None:
        import torch

        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.messages: list[dict[str, str]] = []
        self.ids = torch.empty(1, 0, dtype=torch.long)
        self.tokens = 0
        self.prefill_seconds = 0.0
        self.seconds = 0.0

    def ask(self, text: str, most_tokens: int, streamer: Optional[Any] = None) -> str:
        """Returns the answer. `InvalidArgumentError`, nothing changed, where the cache has no room
        for the turn and an answer."""
        import torch

        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._ids(messages)
        room = self.cache.max_tokens - ids.shape[1]
        if room < 1:
            raise invalid(
                f"prompt: expected fewer than {self.cache.max_tokens} tokens with the turns "
                f"before, found {ids.shape[1]} (--max-tokens)"
            )
        # Templates may write turns anew: what differs is dropped from the cache.
        common = min(self.ids.shape[1], ids.shape[1] - 1, self.cache.get_seq_length())
        differs = (self.ids[0, :common] != ids[0, :common]).nonzero()
        kept = int(differs[0]) if len(differs) else common
        if kept < self.cache.get_seq_length():
            self.cache.crop(kept - self.cache.get_seq_length())
        clock = _Clock(streamer)
        # Newer releases of transformers rename the argument, which `generate` passes on.
        steps = inspect.signature(self.model.prepare_inputs_for_generation).parameters
        start = time.perf_counter()
        found = self.model.generate(
            ids.to(self.model.device),
            attention_mask=torch.ones_like(ids, device=self.model.device),
            max_new_tokens=min(most_tokens, room),
            do_sample=False,
            streamer=clock,
            **{"cache" if "cache" in steps else "past_key_values": self.cache},
        ).cpu()
        self.ids = found
        new = found[0, ids.shape[1] :]
        self.tokens = len(new)
        self.prefill_seconds = clock.times[0] - start
        self.seconds = clock.times[-1] - clock.times[0]
        answer = str(self.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def _ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        import torch

        if self.tokenizer.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
        else:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        ids = self.tokenizer(text, add_special_tokens=self.tokenizer.chat_template is None)
        return torch.tensor([ids.input_ids])

    def where(self) -> str:
        """Says where keys and values are and what they take."""
        from kvtier.hf.shape import BLOCK_TOKENS

        engine = self.cache.engine
        stats = engine.stats().snapshot
        on_gpu = engine.backend == Backend.CUDA
        place = "GPU memory" if engine.memory.placement == KvPlacement.DEVICE else "host memory"
        if engine.memory.placement == KvPlacement.HOST and on_gpu:
            place = "pinned host memory"
        tokens = self.cache.get_seq_length()
        room = -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        return (
            f"{tokens} tokens: keys and values "
            f"{_mib(stats['host_page_bytes_used'])} in {place}, sketches "
            f"{_mib(stats['sketch_bytes_used'])} on the {'GPU' if on_gpu else 'CPU'} "
            f"(room for {room:,} tokens)"
        )


class _Clock:
    """A streamer that notes when tokens come, and passes them on."""

    def __init__(self, streamer: Optional[Any]) -> None:
        self.times: list[float] = []
        self._streamer = streamer
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def _turns(prompt: Optional[str]) -> Iterator[str]:
    """Yields the turns up to an empty one; asks for them in a terminal."""
    if prompt is not None:
        yield prompt
        return
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        turn = sys.stdin.readline().strip()
        if not turn:
            return
        yield turn


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m kvtier.chat", description="Talk to a model whose KV kvtier keeps"
    )
    add_model_options(result)
    result.add_argument(
        "--preset",
        choices=PRESETS,
        default="priority",
        help="how a step selects tokens: a priority sample or the best ones by norm-aware scores, "
        "the method of the SOCKET paper, or all (default priority)",
    )
    result.add_argument(
        "--k",
        type=int,
        default=0,
        help="tokens that a step selects (default: by the error, 2048 with top_k and socket)",
    )
    result.add_argument("--prompt", help="one turn, instead of turns from standard input")
    result.add_argument(
        "--max-tokens", type=int, help="of the whole conversation (default: as many as the model takes)"
    )
    result.add_argument("--new-tokens", type=int, default=256, help="most of an answer (default 256)")
    result.add_argument(
        "--no-graphs", action="store_true", help="on a GPU: run tokens from Python, not as CUDA graphs"
    )
    return result


@interruptible
def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    for name, least in (("k", 0), ("new_tokens", 1), ("max_tokens", 1)):
        found = getattr(options, name)
        if found is not None and found < least:
            parser().error(f"--{name.replace('_', '-')}: expected at least {least}, found {found}")
    if options.preset == "dense" and options.k:
        parser().error(f"--k: expected none with --preset dense, found {options.k}")
    if not (options.model / "config.json").is_file():
        parser().error(f"--model: expected a folder with config.json, found {options.model}")
    try:
        import torch  # noqa: F401
        from transformers import TextStreamer

        from kvtier.hf import KvtierCache, graphed

        kvtier.Engine  # noqa: B018
    except ImportError as error:
        command = "pip install './python[hf]' ./python/engine"
        print(f"error: {without_package(error, command)}", file=sys.stderr)
        return 1
    try:
        model, tokenizer = load_model(options)
        model.set_attn_implementation("kvtier")
        decoder = model.config.get_text_config(decoder=True)
        head_dim = getattr(decoder, "head_dim", None)
        head_dim = head_dim or decoder.hidden_size // decoder.num_attention_heads
        cache = KvtierCache(
            model.config,
            retrieval_of(options.preset, options.k, head_dim),
            dense=options.preset == "dense",
            max_tokens=options.max_tokens,
            backend=Backend.CPU if options.device == "cpu" else Backend.CUDA,
        )
    except kvtier.ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chat = Chat(model, tokenizer, cache)
    graphs = options.device != "cpu" and not options.no_graphs
    steps: ContextManager[Any] = graphed(model, cache) if graphs else nullcontext()
    try:
        with steps:
            for turn in _turns(options.prompt):
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                chat.ask(turn, options.new_tokens, streamer)
                rate = (chat.tokens - 1) / chat.seconds if chat.tokens > 1 else 0.0
                print(
                    f"[{chat.tokens} tokens, first after {chat.prefill_seconds:.2f} s, then "
                    f"{rate:.1f} tokens/s; {chat.where()}]",
                    file=sys.stderr,
                )
    except kvtier.ClientError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        cache.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
