"""An elementwise kernel with the protocol of the real ones, for tests of compiling and caching.

It cross-compiles in a second, most of it the DSL's start. ``kernel_for`` takes the place of
selection's: ``compile.fetch(ToyKey(scale=2), toy_kernel.kernel_for)``.
"""

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class ToyKey:
    """What shapes the toy: a constant, and the architecture. `sleep_s` makes a compile slow."""

    scale: int
    arch: str = "sm_90a"
    sleep_s: float = 0.0


def kernel_for(key):
    """Build the kernel object of a key; the DSL is imported here, as in selection.

    Where TOY_LOG names a file, a line is added to it: how a test counts compiles over processes.
    """
    if "TOY_LOG" in os.environ:
        with open(os.environ["TOY_LOG"], "a") as log:
            log.write(f"{os.getpid()} {key}\n")
    time.sleep(key.sleep_s)
    from tests import toy_kernel_dsl

    return toy_kernel_dsl.ToyScale(key.scale)
