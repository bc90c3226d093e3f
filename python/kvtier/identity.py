"""Names under which engines exchange pages: alike where the bytes mean the same, and only there."""

from __future__ import annotations

import hashlib
import json
from typing import Mapping, Sequence, Union

#: What a field of an identity may be.
Field = Union[None, bool, int, str, Sequence["Field"], Mapping[str, "Field"]]

# Part of every name: changed when the meaning of the fields changes.
_SCHEME = "1"


def make_identity(engine: str, fields: Mapping[str, Field]) -> str:
    """Returns "ENGINE-1-DIGEST", of at most 96 bytes. The digest is the SHA-256, in hexadecimal, of
    the fields as JSON in UTF-8: keys sorted, no spaces, other characters than ASCII escaped. It is
    the same in every process and on every machine. The fields are all on which the bytes of a chunk
    depend beside its tokens: model, dtype, layout, block size, and ranks and sizes of tensor,
    pipeline and context parallelism.

    Raises TypeError for a field that JSON does not have, such as bytes, or a float, whose text may
    differ."""
    _check(fields, "fields")
    if not engine.isascii() or not 0 < len(engine) <= 24:
        raise ValueError(f"engine: expected 1 to 24 characters of ASCII, found {engine!r}")
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{engine}-{_SCHEME}-{hashlib.sha256(text.encode()).hexdigest()}"


def _check(value: object, path: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path}: expected keys of str, found {key!r}")
            _check(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, str)):
        raise TypeError(
            f"{path}: expected None, bool, int, str, a list or a mapping, found {value!r}"
        )
