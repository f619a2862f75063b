"""Plugin for memcheck, `-p bench.unpooled`: every CuPy array becomes an allocation of its own.

In CuPy's pool arrays lie side by side, and a kernel that steps past one lands in the next unseen.
"""

import cupy

cupy.cuda.set_allocator(None)
