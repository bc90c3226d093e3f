"""One layer of a `KvtierCache`: what a pass appends, and the attention of the pass."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvtier.config import AttendOptions, DType, LayerMode
from kvtier.errors import ErrorCode, FailedPreconditionError, invalid

if TYPE_CHECKING:
    from kvtier_engine import Session

    from kvtier.hf.cache import KvtierCache

_STEP_TOKENS = 16  # of a pass that the engine attends with, drafts for one
_MASK_TOKENS = 256  # for which a mask is made at a time

#: Attribute by which the attention function finds the layer of the keys that it is given.
LAYER_OF_KEYS = "_kvtier_layer"


class CacheLength(int):
    """A length that says whose it is: mask functions are given nothing else of the cache."""

    cache: KvtierCache


class KvtierLayer(CacheLayerMixin):
    """Made by `KvtierCache`. `update` takes the keys and values of a pass, `attend` stores them and
    attends, so that rows of a batch are one step."""

    is_compileable = False
    is_croppable = True

    def __init__(self, cache: KvtierCache, index: int, window: int) -> None:
        super().__init__()
        self.is_sliding = window > 0
        self._cache = weakref.ref(cache)
        self._index = index
        self.is_first = index == 0
        self.window = window
        self._length = 0
        self._pending: Optional[tuple[torch.Tensor, torch.Tensor]] = None
        self._module: Optional[weakref.ref[torch.nn.Module]] = None
        self._known_options: dict[tuple[bool, Optional[float], Optional[float]], AttendOptions] = {}

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """As `KvtierCache.append`."""
        cache = self._owner()
        self._take(cache, key_states, value_states)
        if any(cache.padding):
            raise invalid(f"key_states: expected rows without padding, found {cache.padding}")
        stream = cache.stream()
        before = [session.length(self._index) for session in cache.sessions]
        try:
            for session, k, v in zip(cache.sessions, _rows(key_states), _rows(value_states)):
                session.append(self._index, k, v, stream=stream)
        except BaseException:
            for session, length in zip(cache.sessions, before):
                session.truncate(length, layer=self._index, stream=stream)
            raise
        self._length += key_states.shape[-2]

    def lazy_initialization(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes `[batch, kv_heads, tokens, head_dim]` each and returns them as they are, for the
        attention function of kvtier."""
        cache = self._owner()
        if self._pending is not None:
            self.undo()
            raise _failed(
                "model: expected attention implementation 'kvtier' "
                "(model.set_attn_implementation('kvtier')), found one that does not read this cache"
            )
        if self.is_first:
            cache.drop_part_of_pass()
        self._take(cache, key_states, value_states)
        self._length += key_states.shape[-2]
        self._pending = (key_states, value_states)
        setattr(key_states, LAYER_OF_KEYS, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Takes the number of new tokens, or their positions as transformers 4 gives them."""
        new = query_length.shape[0] if isinstance(query_length, torch.Tensor) else query_length
        length = CacheLength(self._length + new)
        length.cache = self._owner()
        return length, 0

    def get_seq_length(self) -> int:
        """Returns the tokens of a row, padding counted."""
        return self._length

    def get_max_length(self) -> int:
        return self._owner().max_tokens

    def get_max_cache_shape(self) -> int:
        """As `get_max_length`, by its name in transformers 4."""
        return self.get_max_length()

    def reset(self) -> None:
        """Forgets length and model; called by `KvtierCache.reset`."""
        self._length = 0
        self._pending = None
        self._module = None
        self.is_initialized = False

    def cut(self, length: int) -> None:
        """Takes note that tokens from `length` on are dropped."""
        self._length = min(self._length, length)
        self._pending = None

    def advance(self, tokens: int) -> None:
        """Takes note of tokens that replays of a graph have appended."""
        self._length += tokens

    def take_state(self, other: KvtierLayer) -> None:
        """Takes note that the sessions are forks of those of another cache."""
        self._length = other._length
        self._module = other._module
        self.is_initialized = other.is_initialized

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        scaling: Optional[float],
        softcap: Optional[float],
    ) -> torch.Tensor:
        """Stores what `update` was given and returns the attention of `query`, [batch, query_heads,
        tokens, head_dim], as [batch, tokens, query_heads, head_dim]."""
        if self._pending is None:
            raise _failed("attention: expected keys that the cache has just been given, found none")
        key, value = self._pending
        self._check_module(module)
        out = self._attend(query, key, value, self._length - key.shape[-2], scaling, softcap)
        self._pending = None
        return out

    def undo(self) -> None:
        """Takes back a pass that has come as far as this layer, in all layers."""
        if self._pending is not None:
            self._owner().truncate(self._length - self._pending[0].shape[-2])

    def _take(
        self, cache: KvtierCache, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        """Checks keys and values against the cache, and opens its sessions for the first."""
        model = cache.engine.model
        for name, states in (("key_states", key_states), ("value_states", value_states)):
            _, heads, _, head_dim = states.shape
            if heads != model.kv_heads or head_dim != model.head_dim:
                raise invalid(
                    f"{name}: expected [batch, {model.kv_heads}, tokens, {model.head_dim}], "
                    f"found {list(states.shape)}"
                )
            if states.requires_grad:
                raise invalid(
                    f"{name}: expected a pass without gradient (torch.no_grad() or "
                    "torch.inference_mode()), found a tensor that requires it"
                )
            if not (states.is_cpu or (states.is_cuda and cache.on_gpu)):
                where = "GPU" if cache.on_gpu else "CPU"
                raise invalid(
                    f"{name}: expected a tensor that the engine reads, which is on the {where}, "
                    f"found one on {states.device}"
                )
        cache.rows(key_states.shape[0])
        cache.device = key_states.device
        self.is_initialized = True

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        start: int,
        scaling: Optional[float],
        softcap: Optional[float],
    ) -> torch.Tensor:
        cache = self._owner()
        batch, heads, tokens, head_dim = query.shape
        sessions = cache.rows(batch)
        stream = cache.stream()
        padding = max(cache.padding)
        # Passes of many tokens attend to keys at hand and those of the past, which they fetch once; an
        # engine's step would read these again for every few queries.
        plain = softcap is None and (tokens > _STEP_TOKENS or start == 0)
        if not plain and start >= padding:
            query, key, value = map(_dense_rows, (query, key, value))
            options = self._options(tokens, scaling, softcap)
            return cache.engine.decode_rows(
                self._index, sessions, query, key, value, options, stream=stream
            )
        if plain and start == 0 and padding == 0:
            for session, k, v in zip(sessions, _rows(key), _rows(value)):
                session.append(self._index, k, v, stream=stream)
            return _dense(query, key, value, self.window, scaling)

        made = query.new_zeros if padding else query.new_empty
        out = made(batch, tokens, heads, head_dim)
        for row, session in enumerate(sessions):
            skipped = min(max(cache.padding[row] - start, 0), tokens)
            if skipped == tokens:
                continue
            own = slice(row, row + 1), slice(None), slice(skipped, None)
            q, k, v = query[own], key[own], value[own]
            if not plain:
                q, k, v = map(_dense_rows, (q, k, v))
                options = self._options(tokens, scaling, softcap)
                out[row, skipped:] = cache.engine.decode_rows(
                    self._index, [session], q, k, v, options, stream=stream
                )[0]
                continue
            past = self._past(session, query)
            session.append(self._index, _rows(k)[0], _rows(v)[0], stream=stream)
            keys, values = (
                torch.cat([stored, states], dim=2) for stored, states in zip(past, (k, v))
            )
            out[row, skipped:] = _dense(q, keys, values, self.window, scaling)[0]
        return out

    def _options(
        self, tokens: int, scaling: Optional[float], softcap: Optional[float]
    ) -> AttendOptions:
        """Returns the options of a call, made for the first of many alike."""
        key = (tokens > 1, scaling, softcap)
        options = self._known_options.get(key)
        if options is None:
            options = self._known_options[key] = AttendOptions(
                softmax_scale=scaling,
                logit_softcap=softcap,
                mode=LayerMode.DENSE if tokens > 1 and not self.is_sliding else None,
            )
        return options

    def _past(self, session: Session, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the stored keys and values that a pass may see, [1, kv_heads, n, head_dim] each,
        of the query's dtype on its device."""
        length = session.length(self._index)
        first = max(length - self.window + 1, 0) if self.window else 0
        model = self._owner().engine.model
        if first == length:
            none = query.new_empty(1, model.kv_heads, 0, model.head_dim)
            return none, none
        ids = np.arange(first, length, dtype=np.int32)
        if query.is_cuda:  # a fetch takes no stream; what it reads has been enqueued on this one
            torch.cuda.current_stream(query.device).synchronize()
        rows = session.fetch(self._index, np.tile(ids, (model.kv_heads, 1)))
        stored = torch.float16 if model.kv_dtype == DType.FLOAT16 else torch.bfloat16
        keys, values = (
            torch.from_numpy(each.view(np.int16)).view(stored).to(query.device, query.dtype)[None]
            for each in rows
        )
        return keys, values

    def _check_module(self, module: torch.nn.Module) -> None:
        known = None if self._module is None else self._module()
        if known is None:
            self._module = weakref.ref(module)
        elif known is not module:
            raise _failed(
                "past_key_values: expected the model that has filled this cache, found another; "
                "reset() empties the cache"
            )

    def _owner(self) -> KvtierCache:
        cache = self._cache()
        if cache is None:
            raise _failed("past_key_values: expected a cache, found one of its layers alone")
        return cache


def _rows(states: torch.Tensor) -> list[torch.Tensor]:
    """Returns [tokens, heads, head_dim] of each row of [batch, heads, tokens, head_dim], without a
    copy where the last dimension is dense."""
    return list(_dense_rows(states).transpose(1, 2).unbind(0))


def _dense_rows(states: torch.Tensor) -> torch.Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int,
    scaling: Optional[float],
) -> torch.Tensor:
    """Causal attention of [batch, query_heads, tokens, head_dim] over the keys and values of a past
    and of these tokens, of which each sees the last `window` (0: all). Returns [batch, tokens,
    query_heads, head_dim]."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    tokens, past = query.shape[2], key.shape[2] - query.shape[2]
    if past == 0 and not 0 < window < tokens:
        out = sdpa(query, key, value, is_causal=tokens > 1, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    parts = []
    for first in range(0, tokens, _MASK_TOKENS):
        last = min(first + _MASK_TOKENS, tokens)
        begin = max(past + first - window + 1, 0) if window else 0
        at = torch.arange(past + first, past + last, device=query.device)[:, None]
        seen = torch.arange(begin, past + last, device=query.device)[None]
        mask = (seen <= at) & (seen > at - window) if window else seen <= at
        k, v = key[:, :, begin : past + last], value[:, :, begin : past + last]
        parts.append(sdpa(query[:, :, first:last], k, v, attn_mask=mask, scale=scaling))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous()


def _failed(message: str) -> FailedPreconditionError:
    return FailedPreconditionError(ErrorCode.FAILED_PRECONDITION, message)
