"""Arguments that stand for the real ones while a kernel is compiled: no tensors, no driver."""

import typing

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


def placeholders(arguments: type, dtypes: dict[str, typing.Any]) -> tuple:
    """One for each field of a NamedTuple of ``flash_cute.arguments``.

    Args:
        dtypes: what addresses point to, by field; Int32 where it does not say.
    """

    def address(name):
        dtype = dtypes.get(name, Int32)
        return cute.runtime.nullptr(dtype, cute.AddressSpace.gmem, dtype.width // 8)

    kinds = {
        "address": address,
        "int32": lambda name: Int32(1),
        "int64": lambda name: Int64(8),
        "float32": lambda name: Float32(1.0),
        "stream": lambda name: cute.runtime.make_fake_stream(),
    }
    hints = typing.get_type_hints(arguments, include_extras=True)
    return tuple(kinds[hint.__metadata__[0]](name) for name, hint in hints.items())
