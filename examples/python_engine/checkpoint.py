"""Safetensors files and Llama checkpoints in numpy."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
}


class SafeTensors:
    """A file of named tensors, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, mode="r")
        (length,) = struct.unpack("<Q", self._bytes[:8].tobytes())
        if length > self._bytes.size - 8:
            raise ValueError(f"{path}: expected a header of {length} bytes, found the end")
        header = json.loads(self._bytes[8 : 8 + length].tobytes())
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, Any] = header
        self._data = self._bytes[8 + length :]

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        tensor: NDArray[Any] = self._data[begin:end].view(_DTYPES[entry["dtype"]])
        return tensor.reshape(entry["shape"])


def write_safetensors(path: Path, tensors: dict[str, Floats]) -> None:
    """Writes float32 tensors."""
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor, np.float32).tobytes())


@dataclass(frozen=True)
class Config:
    layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True)
class Layer:
    attention_norm: Floats
    q: Floats
    k: Floats
    v: Floats
    o: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True)
class Weights:
    """Matrices are [out, in]."""

    embedding: Floats
    layers: list[Layer]
    final_norm: Floats
    head: Floats


def read_config(folder: Path) -> Config:
    fields = json.loads((folder / "config.json").read_text())
    for name, only in (("model_type", "llama"), ("hidden_act", "silu"), ("rope_scaling", None)):
        if fields.get(name) != only:
            raise ValueError(f"config.json: {name}: expected {only}, found {fields.get(name)}")
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        if fields.get(name):
            raise ValueError(f"config.json: {name}: expected false, found {fields[name]}")
    # transformers 5 writes what it knows of the rotation in one place.
    rope = fields.get("rope_parameters") or fields
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"config.json: rope_type: expected default, found {rope['rope_type']}")
    if "rope_theta" not in rope:
        raise ValueError("config.json: rope_theta: expected a number, found none")
    heads = fields["num_attention_heads"]
    return Config(
        layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        query_heads=heads,
        kv_heads=fields.get("num_key_value_heads", heads),
        head_dim=fields.get("head_dim", fields["hidden_size"] // heads),
        vocab_size=fields["vocab_size"],
        rope_theta=rope["rope_theta"],
        rms_norm_eps=fields["rms_norm_eps"],
    )


def read_weights(folder: Path, config: Config) -> Weights:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {name: SafeTensors(folder / name) for name in set(index.values())}

    def get(name: str) -> Floats:
        return shards[index[name]][name].astype(np.float32)

    def layer(i: int) -> Layer:
        def of(name: str) -> Floats:
            return get(f"model.layers.{i}.{name}.weight")

        return Layer(
            attention_norm=of("input_layernorm"),
            q=of("self_attn.q_proj"),
            k=of("self_attn.k_proj"),
            v=of("self_attn.v_proj"),
            o=of("self_attn.o_proj"),
            mlp_norm=of("post_attention_layernorm"),
            gate=of("mlp.gate_proj"),
            up=of("mlp.up_proj"),
            down=of("mlp.down_proj"),
        )

    return Weights(
        embedding=get("model.embed_tokens.weight"),
        layers=[layer(i) for i in range(config.layers)],
        final_norm=get("model.norm.weight"),
        head=get("lm_head.weight"),
    )
