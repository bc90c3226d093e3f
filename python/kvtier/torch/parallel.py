"""One sequence that the ranks of a process group hold together."""

from __future__ import annotations

import weakref
from typing import Optional

import torch
from torch import distributed

from kvtier.errors import invalid
from kvtier.torch.ops import Session, session_of, stream_of

_BLOCK_TOKENS = 64

_shares: weakref.WeakValueDictionary[int, TokenParallel] = weakref.WeakValueDictionary()


class TokenParallel:
    """Each rank holds a share of the tokens, with all KV heads, in an engine of the whole model's
    shape. `append` stores a rank's own share of the prompt. In `decode` every rank is given the
    same query, key and value. One rank stores the token: `block_tokens` steps the first rank, then
    as many the next. Each rank selects among the tokens that it has, `top_k` each or by its own
    error, and attends to them and to its own first and last tokens. One `all_gather` brings the partial results together, and
    they are merged by their log-sum-exp, in float32; the result is the same on every rank.

    `group`: its backend has to take the tensors of the calls, NCCL those on a GPU, gloo those on
    the CPU. A call that raises on one rank leaves the others waiting for it, until the group's
    timeout. In a captured graph the rank that stores is that of the capture."""

    def __init__(
        self,
        session: Session,
        group: Optional[distributed.ProcessGroup] = None,
        *,
        block_tokens: int = _BLOCK_TOKENS,
    ) -> None:
        if block_tokens < 1:
            raise invalid(f"block_tokens: expected at least 1, found {block_tokens}")
        self.session = session
        self.group = group
        self.ranks = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self.block_tokens = block_tokens
        #: Tokens that `decode` has been given, of each layer.
        self.steps = [0] * session.session.engine.model.layers
        _shares[session.handle] = self

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores this rank's share of the next tokens, [tokens, kv_heads, head_dim] each."""
        self.session.append(layer, keys, values)

    def decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Session.decode` for one token, [1, heads, head_dim] each; `out` in the query's
        dtype."""
        self._check(query)
        own = self.session
        return self._merged(_decode_share(own.order, own.handle, layer, query, key, value), query)

    def attend(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Session.attend` for one token. Some rank has to hold a token of the layer."""
        self._check(query)
        own = self.session
        return self._merged(_attend_share(own.order, own.handle, layer, query), query)

    def _merged(
        self, partial: torch.Tensor, query: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = partial.new_empty(self.ranks * partial.numel())
        distributed.all_gather_into_tensor(gathered, partial, group=self.group)
        parts = gathered.view(self.ranks, -1)
        outs = parts[:, : query.numel()].reshape(self.ranks, *query.shape)
        lses = parts[:, query.numel() :].reshape(self.ranks, *query.shape[:2])
        lse = lses.logsumexp(0)
        out = ((lses - lse).exp()[..., None] * outs).sum(0)
        return out.to(query.dtype), lse

    @staticmethod
    def _check(query: torch.Tensor) -> None:
        if query.ndim != 3 or query.shape[0] != 1:
            raise invalid(
                f"query: expected [1, query_heads, head_dim], found shape {list(query.shape)}"
            )


class HeadParallel:
    """Each rank holds all tokens of a share of the KV heads, rank i the i-th share, in an engine
    with 1/ranks of the model's KV heads and query heads. Calls are given all heads, the same on
    every rank, and return those of all. For `group` see `TokenParallel`."""

    def __init__(
        self, session: Session, group: Optional[distributed.ProcessGroup] = None
    ) -> None:
        self.session = session
        self.group = group
        self.ranks = distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)
        self._kv_heads = session.session.engine.model.kv_heads
        self._query_heads = session.session.engine.model.query_heads

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores tokens, [tokens, kv_heads of all ranks, head_dim] each."""
        keys, values = self._kv("keys", keys), self._kv("values", values)
        self.session.append(layer, keys, values)

    def decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Session.decode`, [tokens, heads of all ranks, head_dim] each."""
        own = self._own("query", query, self._query_heads)
        return self._gathered(
            *self.session.decode(layer, own, self._kv("key", key), self._kv("value", value))
        )

    def attend(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Session.attend`, of all heads."""
        own = self._own("query", query, self._query_heads)
        return self._gathered(*self.session.attend(layer, own))

    def _kv(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._own(name, tensor, self._kv_heads)

    def _own(self, name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
        if tensor.ndim != 3 or tensor.shape[1] != self.ranks * heads:
            raise invalid(
                f"{name}: expected [tokens, {self.ranks * heads}, head_dim], found shape "
                f"{list(tensor.shape)}"
            )
        return tensor.narrow(1, self.rank * heads, heads)

    def _gathered(
        self, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, head_dim = out.shape
        partial = torch.cat([out.float(), lse[..., None]], dim=2)
        gathered = partial.new_empty(self.ranks * tokens, heads, head_dim + 1)
        distributed.all_gather_into_tensor(gathered, partial, group=self.group)
        parts = gathered.view(self.ranks, tokens, heads, head_dim + 1).transpose(0, 1)
        parts = parts.reshape(tokens, self.ranks * heads, head_dim + 1)
        return parts[..., :head_dim].to(out.dtype), parts[..., head_dim].contiguous()


def _partial(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns room for `out` and `lse` one behind the other, float32, and views of both."""
    partial = query.new_empty(_partial_elements(query), dtype=torch.float32)
    out, lse = partial[: query.numel()], partial[query.numel() :]
    return partial, out.view(query.shape), lse.view(query.shape[:2])


def _attend_into(
    own: Session, layer: int, query: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Writes the attention over the tokens of this rank, which may have none."""
    if own.session.length(layer) == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    own.session.attend(layer, query, own.options, out=out, lse=lse, stream=stream_of(query))


def _partial_elements(query: torch.Tensor) -> int:
    return query.shape[0] * query.shape[1] * (query.shape[2] + 1)


@torch.library.custom_op("kvtier::decode_share", mutates_args=("order",))
def _decode_share(
    order: torch.Tensor,
    session: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    own, share = session_of(session), _shares[session]
    partial, out, lse = _partial(query)
    if share.steps[layer] // share.block_tokens % share.ranks == share.rank:
        own.session.decode(
            *(layer, query, key, value, own.options), out=out, lse=lse, stream=stream_of(query)
        )
    else:
        _attend_into(own, layer, query, out, lse)
    share.steps[layer] += 1
    return partial


@torch.library.custom_op("kvtier::attend_share", mutates_args=())
def _attend_share(
    order: torch.Tensor, session: int, layer: int, query: torch.Tensor
) -> torch.Tensor:
    partial, out, lse = _partial(query)
    _attend_into(session_of(session), layer, query, out, lse)
    return partial


@_decode_share.register_fake
def _(
    order: torch.Tensor,
    session: int,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    return query.new_empty(_partial_elements(query), dtype=torch.float32)


@_attend_share.register_fake
def _(order: torch.Tensor, session: int, layer: int, query: torch.Tensor) -> torch.Tensor:
    return query.new_empty(_partial_elements(query), dtype=torch.float32)
