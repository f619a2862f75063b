"""Numba CUDA kernels: one file an operation, named as its specification.

A kernel file holds constants with their reason, a cached factory `make(...)` whose closure is the
instantiation, the `@cuda.jit` body, a launcher of the operation's name that checks and launches,
and `instances()`, which lists what K2.6 and the embedded model use. `embed.py` is the shortest
example. `launch` takes numpy arrays to the CPU executor (`simt.py`) and CuPy arrays to the GPU.

How a body is written, so that it reads as Python and compiles well:

- Parameters have types: `x: read(bf16)`, `y: write(float32)`, `cache: update(bf16)`, `n: int32`.
- Integers are signed, literals bare: `x[row * width + i]` counts in 64 bits and needs no cast.
  Unsigned words are for bit patterns; a uint64 beside a signed integer becomes a float64.
- `range` over constants unrolls. A loop of unknown length is `while i < n: ... i += THREADS`;
  int32(...) around what it carries keeps registers few.
- Plain float32 arithmetic, / and math.sqrt round after every operation and are never contracted:
  the bits of numpy. One rounding for two operations is `ptx.fma`. A bare 0.5 is float64, which is a
  compile error: write float32(0.5), or close over np.float32(0.5).
- Device functions are `@cuda.jit(device=True, inline="always")`; Numba compiles others for a GPU
  that must be there.
- Sizes of local and shared arrays are plain names of constants. Static shared arrays end at 48 KB;
  beyond that `cuda.shared.array(0, ...)` and `shared_bytes=`. Vector access needs `alignment=16`.
- Lanes that exchange through shared memory need `cuda.syncwarp()` between.
- What is no Python is an instruction of `ptx.py`; a new one is a line there and its meaning in
  `ptx_cpu.py`, `ptx_cpu_copies.py` or `ptx_cpu_arithmetic.py`.

Nothing is imported here: the numpy backend runs without Numba.
"""
