"""Launch records: what each kernel parameter holds, in the order in which kernels declare them.

Kernels here take a frozen dataclass, and each of its leaves that is not fixed at compile time is a
parameter: a number; a tensor, which is its address with its dynamic sizes and strides; for what TMA
reads a tensor map and the sizes of the coordinates. A record says this from our own description of
the launch; `pack` checks it against the sizes that the PTX declares.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from sm100_on_hopper.build import Parameter
from sm100_on_hopper.lowering import RefusalError


@dataclass(frozen=True)
class TmaTile:
    """A tensor in device memory and the box of it that one TMA copies.

    Shapes: sizes, box: innermost first; strides: bytes, of all but the innermost
    Units:  swizzle_bytes: 128, 64, 32, or 0 for none
    """

    address: int
    dtype: str  # "bf16", "fp16"
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int


@dataclass(frozen=True)
class Field:
    """One kernel parameter: bytes, a tensor map, or nothing that the kernel reads."""

    name: str
    value: bytes | TmaTile | None


def int32(name: str, value: int) -> Field:
    """A 32-bit integer."""
    return Field(name, struct.pack("<i", value))


def float32(name: str, value: float) -> Field:
    """A 32-bit number."""
    return Field(name, struct.pack("<f", value))


def address(name: str, value: int) -> Field:
    """A pointer to device memory."""
    return Field(name, struct.pack("<Q", value))


def sizes(name: str, *values: int) -> Field:
    """The sizes of a tensor of coordinates."""
    return Field(name, struct.pack(f"<{len(values)}i", *values))


def tensor(name: str, at: int, shape: Sequence[int], strides: Sequence[int] = ()) -> Field:
    """A tensor: its address, its dynamic sizes (32 bits) and dynamic strides (64 bits)."""
    text = f"<Q{len(shape)}i"
    if struct.calcsize(text) % 8 and strides:
        text += "4x"
    value = struct.pack(text + f"{len(strides)}q", at, *shape, *strides)
    return Field(name, value + bytes(-len(value) % 8))


def tma(name: str, tile: TmaTile) -> tuple[Field, Field]:
    """What TMA reads: the tensor map and the sizes of the tensor of coordinates."""
    return Field(name, tile), sizes(f"{name}.sizes", *tile.sizes)


def unread(name: str) -> Field:
    """A parameter that the kernel must not read."""
    return Field(name, None)


TENSOR_MAP_BYTES = 128


def pack(record: Sequence[Field], parameters: Sequence[Parameter], encode) -> list[bytes]:
    """The bytes of every parameter.

    Args:
        encode: makes the 128 bytes of a tensor map from a TmaTile.
    Raises: RefusalError where the record and the PTX differ in number or size, or the kernel reads
            what the record does not know; the message names the field.
    """
    if len(record) != len(parameters):
        names = ", ".join(field.name for field in record)
        raise RefusalError(f"the kernel has {len(parameters)} parameters, the record {names}")
    packed = []
    for field, parameter in zip(record, parameters, strict=True):
        if field.value is None:
            if parameter.is_read:
                raise RefusalError(f"the kernel reads {field.name}, which the record does not know")
            value = bytes(parameter.size)
        elif isinstance(field.value, TmaTile):
            value = encode(field.value)
        else:
            value = field.value
        if len(value) != parameter.size:
            raise RefusalError(
                f"{field.name} has {len(value)} bytes, the kernel's {parameter.size}"
            )
        packed.append(value)
    return packed


def check_ranks(record: Sequence[Field], ranks: frozenset[int]) -> None:
    """Raise RefusalError where a kernel reads tensor maps of `ranks` that no field has."""
    maps = [field.value for field in record if isinstance(field.value, TmaTile)]
    if missing := ranks - {len(tile.sizes) for tile in maps}:
        raise RefusalError(f"tensor maps of {sorted(missing)} dimensions, which no field has")
