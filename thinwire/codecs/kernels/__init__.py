"""numba kernels for CPU: one pass over memory, the GIL released, results bit-equal to the plain PyTorch versions.

All but `cosines`, which is equal within rounding: there a product and a sum are one instruction, and
sums have another order.

They work group by group in scratch that stays in the first-level cache. Three habits make them vectorise: a
group's maximum is an integer maximum over the floats' bits, adding 1.5 * 2^23 rounds a float to even and
leaves the integer in its low bits, and arrays are indexed by an unsigned offset (a slice would count a
reference, a signed index is checked for wrapping around). No fastmath elsewhere: it would change roundings. numba's
cache on disk watches a kernel's own file only: after a change to what it imports (`common`, constants of other
modules), delete `__pycache__/*.nb*`.
"""
