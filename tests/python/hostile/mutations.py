"""Hostile values for the fields of a message, and changes of the bytes of one."""

from __future__ import annotations

from random import Random
from typing import Any, Sequence

from google.protobuf.descriptor import FieldDescriptor

UNSIGNED = (0, 1, 2, 63, 64, 65, 255, 1 << 12, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31)
WIDE = (*UNSIGNED, (1 << 32) - 1, 1 << 32, (1 << 62), (1 << 63) - 1)
EXTENTS = (*WIDE, 1 << 63, (1 << 64) - 64, (1 << 64) - 1)  # of places in memory
_SIGNED_32 = (0, 1, -1, 2, 7, 63, 1024, 131_073, (1 << 31) - 1, -(1 << 31))
_SIGNED_64 = (*_SIGNED_32, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3.4e38, -3.4e38, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "x", "..", "sessions/", "/etc/passwd", "a" * 300, "\x00", "\x1b[31m", "é\u202e", "%n%s")
_MOST_ITEMS = 1100  # a batch may have 1,024

_F = FieldDescriptor
_VALUES: dict[int, Sequence[Any]] = {
    _F.CPPTYPE_INT32: _SIGNED_32,
    _F.CPPTYPE_INT64: _SIGNED_64,
    _F.CPPTYPE_UINT32: (*UNSIGNED, (1 << 32) - 1),
    _F.CPPTYPE_UINT64: EXTENTS,
    _F.CPPTYPE_FLOAT: _FLOATS,
    _F.CPPTYPE_DOUBLE: (*_FLOATS, 1.8e308, 1e-300),
    _F.CPPTYPE_BOOL: (False, True),
}


def _value(random: Random, field: Any, names: Sequence[str]) -> Any:
    if field.cpp_type == _F.CPPTYPE_ENUM:
        return random.choice((*(v.number for v in field.enum_type.values), 99, -1, (1 << 31) - 1))
    if field.type == _F.TYPE_BYTES:
        return random.randbytes(random.choice((0, 1, 2, 31, 32, 33, 64, 65, 128, 1000)))
    if field.cpp_type == _F.CPPTYPE_STRING:
        return random.choice(names if names and random.random() < 0.7 else _TEXTS)
    return random.choice(_VALUES[field.cpp_type])


def mutate_message(random: Random, message: Any, names: Sequence[str]) -> None:
    """Gives a field of the message, or of a message within it, a hostile value. Texts are of
    `names`, or such as should be none."""
    field = random.choice(message.DESCRIPTOR.fields)
    if field.is_repeated:
        _mutate_list(random, message, field, names)
    elif field.cpp_type == _F.CPPTYPE_MESSAGE:
        if random.random() < 0.15:
            message.ClearField(field.name)
        else:
            mutate_message(random, getattr(message, field.name), names)
    elif random.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(random, field, names))


def _mutate_list(random: Random, message: Any, field: Any, names: Sequence[str]) -> None:
    values = getattr(message, field.name)
    kind = random.randrange(4)
    if kind == 0 and values:
        del values[random.randrange(len(values)) :]
    elif field.cpp_type == _F.CPPTYPE_MESSAGE:
        if kind == 1 and values:  # many of one
            item = values[0]
            copies = _MOST_ITEMS if random.random() < 0.01 else random.randrange(8)
            values.extend([item] * copies)
        elif values and random.random() < 0.8:
            mutate_message(random, random.choice(values), names)
        else:
            mutate_message(random, values.add(), names)
    elif values and kind == 1:
        values[random.randrange(len(values))] = _value(random, field, names)
    else:
        values.append(_value(random, field, names))


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Turns bits, cuts, repeats or replaces a part."""
    kind = random.randrange(5)
    if kind == 0 or not data:
        return random.randbytes(random.randrange(64))
    at = random.randrange(len(data))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + data[at : at + random.randrange(1, 32)] * 2 + data[at:]
    changed = bytearray(data)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(changed))
        changed[at] = changed[at] ^ 1 << random.randrange(8) if kind == 3 else random.randrange(256)
    return bytes(changed)


def forged(random: Random, name: str) -> str:
    """A name as another, but for a character."""
    at = random.randrange(len(name))
    return name[:at] + random.choice("abcdefgh01234567-_/") + name[at + 1 :]
