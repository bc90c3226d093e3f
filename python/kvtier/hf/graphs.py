"""Single-token passes of a model as CUDA graphs."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch

from kvtier.engine_config import Backend
from kvtier.errors import (
    ErrorCode,
    FailedPreconditionError,
    ResourceExhaustedError,
    invalid,
)
from kvtier.hf.cache import KvtierCache

_RESERVED_TOKENS = 1024  # for which a graph is captured

# Arguments of a pass that are tensors of a graph, which each replay is given anew.
_GIVEN = ("input_ids", "position_ids", "cache_position")
_CACHES = ("past_key_values", "cache")  # the argument's names: that of transformers 5.40 on last


class graphed:
    """Replays the single-token passes of a model with this cache as a CUDA graph:

        with kvtier.hf.graphed(model, cache):
            model.generate(ids, past_key_values=cache, max_new_tokens=1000)

    The host then launches one graph for a token instead of all of its kernels. Within the block
    `model.forward` is replaced. The first pass of one token behind a past runs eagerly, the second
    is captured; a replay returns copies of the outputs. Captured again: after 1,024 tokens, after
    passes with other arguments, and when rows of the cache have changed (`crop`, beams, `reset`,
    copies). All other passes run eagerly: prompts, drafts, other caches, hidden states, labels.

    `model`: on one GPU, not changed within the block; `cache`: its engine is there. A pass that
    cannot be captured, since it waits for the GPU or depends on values of tensors, raises
    `FailedPreconditionError` and changes nothing. Replays go to torch's current stream. A NaN or
    infinity in keys, values or queries of replays raises in a later pass that runs eagerly.

    A graph has room for the tokens that it was captured for: with a page tier, pages of the
    sessions stay in host memory."""

    def __init__(self, model: torch.nn.Module, cache: KvtierCache) -> None:
        if not isinstance(cache, KvtierCache):
            raise invalid(f"cache: expected a KvtierCache, found {type(cache).__name__}")
        if cache.engine.backend != Backend.CUDA:
            raise invalid("cache: expected an engine on a GPU, found one on the CPU")
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise invalid(f"model: expected parameters on one GPU, found them on {found}")
        self._model = model
        self._cache = cache
        self._device = next(iter(devices))
        self._key: Any = None
        self._graph: Optional[torch.cuda.CUDAGraph] = None
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: Any = None
        self._limit = 0  # length of the cache up to which the graph has room
        self._changes = -1  # of the cache, when the graph was captured
        self._stream: Any = None

    def __enter__(self) -> graphed:
        if getattr(self._model.forward, "__kvtier_graphed__", False):
            raise FailedPreconditionError(
                ErrorCode.FAILED_PRECONDITION,
                "model: expected one whose passes are not graphed, found one that is",
            )
        self._forward = self._model.forward
        self._replaced = self._model.__dict__.get("forward")

        @functools.wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(args, kwargs)

        forward.__kvtier_graphed__ = True  # type: ignore[attr-defined]
        self._model.forward = forward
        return self

    def __exit__(self, *unused: Any) -> None:
        del self._model.forward
        if self._replaced is not None:
            self._model.forward = self._replaced
        self._cache.wait_for_replays()
        self._forget()

    def _forget(self) -> None:
        self._key = None
        self._graph = self._outputs = None
        self._inputs = {}

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = self._step(args, kwargs)
        if given is None:
            return self._forward(*args, **kwargs)
        key = self._key_of(given, kwargs)
        length = self._cache.get_seq_length()
        if key != self._key or self._changes != self._cache.changes:
            # Eagerly: what is made when a kernel first runs is not made in a capture.
            result = self._forward(*args, **kwargs)
            self._forget()
            self._key, self._changes = key, self._cache.changes
            return result
        if self._graph is None or length >= self._limit:
            if not self._reserve(length):
                return self._forward(*args, **kwargs)
            self._capture(given, kwargs, length)
        return self._replay(given)

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[dict[str, torch.Tensor]]:
        """Returns the tensors that a replay is given; None for a pass that is not captured."""
        if len(args) > 1 or not any(kwargs.get(name) is self._cache for name in _CACHES):
            return None
        ids = args[0] if args else kwargs.get("input_ids")
        length = self._cache.get_seq_length()
        if not isinstance(ids, torch.Tensor) or ids.shape != (len(self._cache.sessions), 1):
            return None
        mask = kwargs.get("attention_mask")
        if length == 0 or not ids.is_cuda or (mask is not None and mask.ndim != 2):
            return None
        # Hidden states and attentions may be asked for by hooks, which a replay would not call.
        if kwargs.get("output_hidden_states") or kwargs.get("output_attentions"):
            return None
        given = {"input_ids": ids}
        for name, value in kwargs.items():
            if not isinstance(value, torch.Tensor) or name == "attention_mask":
                continue
            if name not in _GIVEN or value.device != self._device:
                return None
            given[name] = value
        if given.get("position_ids") is None:
            given["position_ids"] = torch.full((1, 1), length, device=ids.device)
        return given

    @staticmethod
    def _key_of(given: dict[str, torch.Tensor], kwargs: dict[str, Any]) -> Any:
        tensors = [(name, tuple(each.shape), each.dtype) for name, each in sorted(given.items())]
        others = [
            (name, repr(value))
            for name, value in sorted(kwargs.items())
            if not isinstance(value, torch.Tensor) and name not in _CACHES
        ]
        return tensors, others

    def _reserve(self, length: int) -> bool:
        """Makes room for the tokens of a graph; False where there is none."""
        cache = self._cache
        room = min(_RESERVED_TOKENS, *(cache.max_tokens - each.length() for each in cache.sessions))
        if room < 1:
            return False
        try:
            for session in cache.sessions:
                session.reserve(room, stream=cache.stream())
        except ResourceExhaustedError:
            return False  # there may be room for one token
        self._limit = length + room
        return True

    def _capture(
        self, given: dict[str, torch.Tensor], kwargs: dict[str, Any], length: int
    ) -> None:
        self._graph = self._outputs = None
        self._cache.wait_for_replays()
        with torch.inference_mode(False):  # written outside of such a mode, too
            self._inputs = {name: each.clone() for name, each in given.items()}
        # The padding is known from the passes before.
        fixed = {**kwargs, **self._inputs, "attention_mask": None}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = self._forward(**fixed)
        except Exception as error:
            raise FailedPreconditionError(
                ErrorCode.FAILED_PRECONDITION,
                "model: expected a pass that a CUDA graph can be captured of, found one that "
                f"raises: {error}",
            ) from error
        finally:
            for layer in self._cache.layers:
                layer.cut(length)
        self._graph, self._outputs = graph, outputs

    def _replay(self, given: dict[str, torch.Tensor]) -> Any:
        assert self._graph is not None
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        for name, to in self._inputs.items():
            to.copy_(given[name])
        self._graph.replay()
        self._cache.replayed()
        return _copied(self._outputs)


def _copied(outputs: Any) -> Any:
    """Returns outputs of a pass whose tensors the next replay does not write."""
    if isinstance(outputs, torch.Tensor):
        return outputs.clone()
    if isinstance(outputs, tuple):
        return tuple(_copied(each) for each in outputs)
    if isinstance(outputs, dict):  # as outputs of transformers are
        return type(outputs)(**{name: _copied(each) for name, each in outputs.items()})
    return outputs
