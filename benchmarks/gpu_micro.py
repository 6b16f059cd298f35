"""Latencies and rates of a GPU's memories and units, each by a small kernel that NVRTC compiles on the spot.

    python benchmarks/gpu_micro.py [--only NAME ...] [--json FILE]     measure: on a GPU, or the CPU half where none is
    python benchmarks/gpu_micro.py --compile sm_90a                    only compile the kernels; needs no GPU
    python benchmarks/gpu_micro.py --list

The kernels have been compiled for sm_80 and sm_90a by NVRTC 13.5, and are launched as cuda-core 1.x asks for. They have
not run on a GPU yet: until one has confirmed them, their figures are to be checked against those in
`thinwire.calibration.published`, which the table shows beside them, each under the name of the device on which it was
measured. Latencies are cycles of one dependent chain of
one warp; rates are operations per second, because the clock falls under load, of several independent chains in each
warp and two blocks on each multiprocessor. Products are measured with random values and with zeros, which draw less
power. Median of 20 launches after a warm-up. Needs the extra `gpu`: cuda-core with NVRTC.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Steps of a chain that is timed in cycles, and of one that is timed in seconds, which a launch must not weigh on.
STEPS, RATE_STEPS, REPEATS, WARPS = 1024, 8192, 20, 8
# Independent chains of a warp, products before a wait, and blocks of a multiprocessor.
CHAINS, BEHIND, OCCUPANCY = 4, 4, 2
# Bytes that fit into a level; the last does not fit into any cache.
LEVELS = {"l1": (1 << 14, "ca"), "l2": (1 << 22, "cg"), "global": (1 << 29, "cg")}
WIDTHS = (8, 16, 32, 64, 128, 256)
RING_BYTES, BINS = 16384, 1024
# Architectures that have more than sm_80: products of fp8; and clusters, wgmma, DPX and TMA, which only this one has.
ADA, HOPPER = "sm_89", "sm_90a"
HEAD = """
typedef unsigned int u32; typedef unsigned long long u64;
__device__ __forceinline__ u32 rank_in_cluster() {
  u32 x; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
__device__ __forceinline__ u32 cluster_size() {
  u32 x; asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(x));
  return x;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 at_rank(const void* mine, u32 rank) {
  u32 x, own = (u32)__cvta_generic_to_shared(mine);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(own), "r"(rank));
  return x;
}
"""
PLAIN_HEAD = "typedef unsigned int u32; typedef unsigned long long u64;\n"
SIGNATURE = 'extern "C" __global__ void run(const u64* given, u64* out, int steps)'


@dataclass(frozen=True)
class Kernel:
    """A kernel `run(given, out, steps)`, which writes its cycles to out[0].

    Args:
        unit: "cycles" of one step, or what a block does in one step: operations or bytes.
        amount: of a block in one step; 0: the result is cycles.
        given: what `given` points to: "chase", "random", "zeros"; bytes: of it.
        published: name in the published tables, where it is another than the kernel's own; scale: of their unit.
        arch: the least that has what it needs; see `fits`. cluster: blocks of a cluster.
    """

    name: str
    source: str
    unit: str = "cycles"
    amount: float = 0.0
    given: str = "random"
    given_bytes: int = 1 << 16
    threads: int = 32
    arch: str = "sm_80"
    cluster: int = 1
    published: str = ""
    scale: float = 1.0

    @property
    def steps(self) -> int:
        """Rounds of the timed loop."""
        return RATE_STEPS if self.amount else STEPS

    @property
    def code(self) -> str:
        """The source with its head."""
        return (HEAD if self.arch == HOPPER else PLAIN_HEAD) + f"{SIGNATURE} {{\n{self.source}\n}}\n"


@dataclass(frozen=True)
class Figure:
    """A result. published: by device, where something of that name is."""

    name: str
    value: float
    unit: str
    device: str
    published: dict[str, float]


def timed(body: str, before: str = "", after: str = "") -> str:
    """Cycles of `steps` rounds of a body, after one round to warm up."""
    return f"""{before}
  for (int i = 0; i < 1; ++i) {{ {body} }}
  u64 begin = clock64();
  for (int i = 0; i < steps; ++i) {{ {body} }}
  u64 end = clock64();
  if (threadIdx.x == 0 && blockIdx.x == 0) out[0] = end - begin;
  {after}"""


def chases() -> Iterator[Kernel]:
    """A walk along pointers, in each level of memory."""
    for level, (size, modifier) in LEVELS.items():
        load = f'asm volatile("ld.global.{modifier}.u64 %0, [%0];" : "+l"(at) :: "memory");'
        warm = f"u64 at = given[0]; for (int i = 0; i < {min(size // 64, 1 << 17)}; ++i) {{ {load} }}"
        yield Kernel(f"{level} latency cycles", timed(load, warm, "out[1] = at;"), given="chase", given_bytes=size)
    fill = "__shared__ u32 next[1024]; for (int i = threadIdx.x; i < 1024; i += 32) next[i] = (i + 33) & 1023; __syncthreads();"  # noqa: E501
    yield Kernel("shared latency cycles", timed("at = next[at];", f"{fill} u32 at = 0;", "out[1] = at;"))


# By type: the depth of a product, its types, and the accumulators' type in C and as a constraint of PTX.
TYPES = {
    "fp16": (16, "f32.f16.f16", "float", "f"),
    "fp8": (32, "f32.e4m3.e4m3", "float", "f"),
    "int8": (32, "s32.s8.s8", "int", "r"),
}
RATES = {"fp16": "TFLOP/s", "fp8": "TFLOP/s", "int8": "TOP/s"}


def mma(kind: str, fill: str, *, is_chain: bool = False) -> Kernel:
    """mma.sync m16n8 of a type: one dependent chain of one warp, or CHAINS of them in each of a block's WARPS warps."""
    depth, types, c_type, letter = TYPES[kind]
    num, warps = (1, 1) if is_chain else (CHAINS, WARPS)
    load = f"const u32* g = (const u32*)given + threadIdx.x; u32 a0 = g[0], a1 = g[32], a2 = g[64], a3 = g[96], b0 = g[128], b1 = g[160]; {c_type} c[{4 * num}]; for (int i = 0; i < {4 * num}; ++i) c[i] = 0;"  # noqa: E501
    name = f"mma.sync.aligned.m16n8k{depth}.row.col.{types}.{types.split('.')[0]}"
    body = "".join(
        f'asm volatile("{name} {{%0,%1,%2,%3}},{{%4,%5,%6,%7}},{{%8,%9}},{{%0,%1,%2,%3}};" : '
        + ", ".join(f'"+{letter}"(c[{4 * chain + i}])' for i in range(4))
        + ' : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));'
        for chain in range(num)
    )
    done = (
        f"{c_type} sum = 0; for (int i = 0; i < {4 * num}; ++i) sum += c[i]; (({c_type}*)out)[64 + threadIdx.x] = sum;"
    )
    # No published table has fp8.
    is_new = kind == "fp8"
    arch = ADA if is_new else "sm_80"
    if is_chain:
        return Kernel(f"mma {kind} latency cycles", timed(body, load, done), given=fill, arch=arch)
    flops = warps * num * 2.0 * 16 * 8 * depth
    return Kernel(
        f"mma {kind} {fill}", timed(body, load, done), f"{RATES[kind][1:]}", flops, fill, threads=32 * warps,
        arch=arch, published="" if is_new else f"mma {kind} {RATES[kind]}", scale=1e12,
    )  # fmt: skip


def wgmma(kind: str, width: int, is_rs: bool, fill: str, *, is_chain: bool = False) -> Kernel:
    """wgmma m64nN of a type: A in shared memory (SS) or in registers (RS), B in shared memory.

    A warp group waits for BEHIND products at a time; is_chain: for each of them.
    """
    depth, types, c_type, letter = TYPES[kind]
    num, sums = width // 2, ", ".join(f"%{i}" for i in range(width // 2))
    factors = f"{{%{num + 1}, %{num + 2}, %{num + 3}, %{num + 4}}}, %{num}" if is_rs else f"%{num + 1}, %{num}"
    # Signs of both factors; in fp16 also which of those in shared memory stand on their side.
    flags = {"fp16": ", 1, 1, 0" if is_rs else ", 1, 1, 0, 0", "fp8": ", 1, 1", "int8": ""}[kind]
    outputs = ", ".join(f'"+{letter}"(c[{i}])' for i in range(num))
    inputs = '"l"(b), "r"(a0), "r"(a1), "r"(a2), "r"(a3)' if is_rs else '"l"(b), "l"(a)'
    product = (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{width}k{depth}.{types} '
        f'{{{sums}}}, {factors}, p{flags}; }}" : {outputs} : {inputs});'
    )
    behind = 1 if is_chain else BEHIND
    body = (
        'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
        + product * behind
        + 'asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");'
    )
    before = f"""
  extern __shared__ __align__(128) u32 tile[];
  for (int i = threadIdx.x; i < 4096; i += 128) tile[i] = ((const u32*)given)[i];
  __syncthreads();
  {c_type} c[{num}];
  for (int i = 0; i < {num}; ++i) c[i] = 0;
  // Without swizzle: 8 x 8 blocks of 128 bytes, the next one 128 bytes on, the next row of them 256.
  u64 fixed = ((u64)(128 >> 4) << 16) | ((u64)(256 >> 4) << 32);
  u64 a = fixed | ((u64)(__cvta_generic_to_shared(tile) & 0x3FFFF) >> 4);
  u64 b = fixed | ((u64)(__cvta_generic_to_shared(tile + 1024) & 0x3FFFF) >> 4);
  u32 a0 = tile[threadIdx.x], a1 = tile[threadIdx.x + 1], a2 = tile[threadIdx.x + 2], a3 = tile[threadIdx.x + 3];
  if (steps < 0) {{ out[2] = a + a0 + a1 + a2 + a3; }}"""
    done = f"{c_type} sum = 0; for (int i = 0; i < {num}; ++i) sum += c[i]; (({c_type}*)out)[64 + threadIdx.x] = sum;"
    place = "RS" if is_rs else "SS"
    if is_chain:
        name = f"wgmma {kind} m64n{width}k{depth} cycles"
        return Kernel(name, timed(body, before, done), given=fill, threads=128, arch=HOPPER)
    # What is published was measured with zeros, in the widest products.
    has_published = fill == "zeros" and width == WIDTHS[-1]
    told = f"wgmma {kind} {place} {RATES[kind]}" if kind == "fp16" else f"wgmma {kind} {RATES[kind]}"
    return Kernel(
        f"wgmma {kind} n{width} {place} {fill}", timed(body, before, done), RATES[kind][1:],
        behind * 2.0 * 64 * width * depth, fill, threads=128, arch=HOPPER, published=told if has_published else "",
        scale=1e12,
    )  # fmt: skip


def clusters() -> Iterator[Kernel]:
    """Copies from the shared memory of the next block of a cluster, and a histogram whose bins lie on all of them."""
    start = f"__shared__ __align__(16) u32 own[{RING_BYTES // 4}]; for (int i = threadIdx.x; i < {RING_BYTES // 4}; i += blockDim.x) own[i] = i; cluster_sync(); u32 from = at_rank(own, (rank_in_cluster() + 1) % cluster_size()), sum = 0;"  # noqa: E501
    copy = f'for (int j = threadIdx.x * 16; j < {RING_BYTES}; j += blockDim.x * 16) {{ u32 x, y, z, w; asm volatile("ld.shared::cluster.v4.u32 {{%0,%1,%2,%3}}, [%4];" : "=r"(x), "=r"(y), "=r"(z), "=r"(w) : "r"(from + j)); sum += x + y + z + w; }}'  # noqa: E501
    done = "cluster_sync(); ((u32*)out)[64 + threadIdx.x] = sum;"
    for size in (2, 4):
        yield Kernel(
            f"dsm ring of {size}", timed(copy, start, done), "B/s", RING_BYTES, threads=256, arch=HOPPER, cluster=size,
            published=f"dsm ring of {size} TB/s", scale=1e12,
        )  # fmt: skip
    walk = 'asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(at) : "r"(from + 4 * at));'
    chase = "__shared__ u32 own[1024]; for (int i = threadIdx.x; i < 1024; i += 32) own[i] = (i + 33) & 1023; cluster_sync(); u32 from = at_rank(own, (rank_in_cluster() + 1) % cluster_size()), at = 0;"  # noqa: E501
    yield Kernel("dsm latency cycles", timed(walk, chase, "cluster_sync(); out[1] = at;"), arch=HOPPER, cluster=2)
    bins = f"__shared__ u32 own[{BINS}]; for (int i = threadIdx.x; i < {BINS}; i += blockDim.x) own[i] = 0; cluster_sync(); u32 size = cluster_size();"  # noqa: E501
    count = f'u32 bin = (((const u32*)given)[(threadIdx.x + i * 37) & 4095] + i) % ({BINS} * size); asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(at_rank(own, bin / {BINS}) + 4 * (bin % {BINS})) : "memory");'  # noqa: E501
    for size, threads in ((1, 128), (2, 512), (4, 128)):
        yield Kernel(
            f"dsm histogram of {size}, {threads} threads", timed(count, bins, "cluster_sync(); ((u32*)out)[64] = own[0];"),  # noqa: E501
            "elements/s", float(threads), threads=threads, arch=HOPPER, cluster=size,
        )  # fmt: skip


def others() -> Iterator[Kernel]:
    """DPX, and copies by the tensor memory accelerator."""
    start = "u32 x = ((const u32*)given)[threadIdx.x], y = threadIdx.x, z = 0x00010002;"
    body = "x = __viaddmax_s16x2_relu(x, y, z);"
    loads = f"u32 x[{CHAINS}], y = threadIdx.x, z = 0x00010002; for (int i = 0; i < {CHAINS}; ++i) x[i] = ((const u32*)given)[threadIdx.x + i];"  # noqa: E501
    bodies = "".join(f"x[{i}] = __viaddmax_s16x2_relu(x[{i}], y, z);" for i in range(CHAINS))
    sums = " + ".join(f"x[{i}]" for i in range(CHAINS))
    yield Kernel("dpx viaddmax s16x2 latency cycles", timed(body, start, "((u32*)out)[64] = x;"), arch=HOPPER)
    yield Kernel("dpx viaddmax s16x2", timed(bodies, loads, f"((u32*)out)[64 + threadIdx.x] = {sums};"), "operations/s",
                 512.0 * CHAINS, threads=256, arch=HOPPER)  # fmt: skip
    size = 4096
    prepare = f"""__shared__ __align__(128) char tile[{size}]; __shared__ __align__(8) u64 gate;
  u32 to = (u32)__cvta_generic_to_shared(tile), at = (u32)__cvta_generic_to_shared(&gate), phase = 0;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); __syncthreads();"""
    bulk = f"""if (threadIdx.x == 0) {{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], {size};" :: "r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], {size}, [%2];"
      :: "r"(to), "l"(given), "r"(at) : "memory"); }}
    asm volatile("{{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
      " @!done bra again; }}"
      :: "r"(at), "r"(phase) : "memory"); phase ^= 1;"""
    # A label may stand once: the body stands twice.
    twice = timed(bulk, prepare, "out[1] = tile[0];").replace("again", "again_%=")
    yield Kernel("tma 4 KiB latency cycles", twice, arch=HOPPER)


def kernels() -> list[Kernel]:
    """All of them."""
    fills = ("random", "zeros")
    made = [*chases(), *(mma(kind, "random", is_chain=True) for kind in TYPES)]
    made += [mma(kind, fill) for kind in TYPES for fill in fills]
    made += [wgmma("fp16", width, False, "zeros", is_chain=True) for width in WIDTHS]
    made += [wgmma("fp16", width, is_rs, fill) for width in WIDTHS for is_rs in (False, True) for fill in fills]
    made += [wgmma(kind, WIDTHS[-1], False, fill) for kind in ("fp8", "int8") for fill in fills]
    return [*made, *clusters(), *others()]


def figure(kernel: Kernel, cycles: Sequence[float], seconds: Sequence[float], blocks: int, device: str) -> Figure:
    """The median of launches: cycles of a step, or the amount of all blocks per second of the launch."""
    from thinwire.calibration.published import TABLES

    if kernel.amount:
        value = blocks * kernel.amount * kernel.steps / statistics.median(seconds)
    else:
        value = statistics.median(cycles) / kernel.steps
    key = kernel.published or kernel.name
    beside = {name: kernel.scale * table[key] for name, table in TABLES.items() if key in table}
    return Figure(kernel.name, value, kernel.unit, device, beside)


def measured(kernel: Kernel, compiled: Any, blocks: int, place: str = "cuda") -> Figure:
    """Launch a compiled kernel on the GPU that torch uses. place: of torch's tensors."""
    import torch
    from cuda.core import Device, LaunchConfig, launch  # type: ignore[import-not-found]

    from thinwire.calibration.kernels import cycle

    given = torch.randn(kernel.given_bytes // 2).half()
    if kernel.given == "chase":
        walk = torch.from_numpy(cycle(kernel.given_bytes // 64))
        given = torch.empty_like(walk, device=place)
        # Pointers: the address of the next line stands in each line.
        given.copy_(walk * 8 + given.data_ptr())
    elif kernel.given == "zeros":
        given = torch.zeros_like(given)
    given, out = given.to(place), torch.zeros(4096, dtype=torch.int64, device=place)
    device = Device(torch.cuda.current_device())
    device.set_current()
    stream = device.create_stream()
    # With clusters the grid counts these, and GPUs before Hopper refuse even those of one block.
    clusters = {"cluster": kernel.cluster} if kernel.cluster > 1 else {}
    config = LaunchConfig(grid=blocks // kernel.cluster, block=kernel.threads, shmem_size=32768, **clusters)
    cycles, seconds = [], []
    # The inputs are written on torch's stream, and read on another.
    torch.cuda.synchronize()
    for number in range(REPEATS + 2):
        begin = stream.record(options={"timing_enabled": True})
        launch(stream, config, compiled.get_kernel("run"), given.data_ptr(), out.data_ptr(), kernel.steps)
        end = stream.record(options={"timing_enabled": True})
        stream.sync()
        if number >= 2:
            cycles.append(float(out[0]))
            seconds.append((end - begin) / 1e3)
    return figure(kernel, cycles, seconds, blocks, torch.cuda.get_device_name())


def compiled_by_core(kernel: Kernel, arch: str) -> Any:
    """An object code of cuda.core."""
    from cuda.core import Program, ProgramOptions

    return Program(kernel.code, "c++", ProgramOptions(arch=arch)).compile("cubin")


def fits(kernel: Kernel, arch: str) -> bool:
    """Whether an architecture, such as sm_90a, has what a kernel needs."""
    if kernel.arch == HOPPER:
        return arch == HOPPER
    return number_of(arch) >= number_of(kernel.arch)


def number_of(arch: str) -> int:
    """The number of an architecture, such as 90 of sm_90a."""
    return int(arch.removeprefix("sm_").rstrip("a"))


def crossover(ratios: dict[int, float]) -> int | None:
    """The first of rising sizes from which on 8 bits are faster; None if they are not at the last."""
    slower = [size for size, ratio in ratios.items() if ratio <= 1]
    return next((size for size in ratios if not slower or size > slower[-1]), None)


def library() -> Iterator[Figure]:
    """Products in fp8 with their casts against bf16 ones, and the products of a decode step, by torch on a GPU."""
    import torch

    from thinwire.calibration.work import seconds_of
    from thinwire.device import take

    device, name = take("cuda", 0), torch.cuda.get_device_name()

    def clocked(run: Callable[[], object]) -> float:
        def once() -> None:
            run()
            device.synchronize()

        return seconds_of(once)

    one, ratios = torch.ones((), device="cuda"), dict[int, float]()
    for size in (512, 1024, 2048, 4096, 8192, 16384):
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        half_s = clocked(lambda a=a, b=b: a @ b.t())  # type: ignore[misc]

        def byte(a: Any = a, b: Any = b) -> object:
            small = [each.to(torch.float8_e4m3fn) for each in (a, b)]
            return torch._scaled_mm(small[0], small[1].t(), one, one, out_dtype=torch.bfloat16)

        ratios[size] = half_s / clocked(byte)
        yield Figure(f"fp8 linear with casts over bf16, {size}", ratios[size], "times", name, {})
    if (first := crossover(ratios)) is not None:
        yield Figure("fp8 linear with casts is faster from", float(first), "rows", name, {})
    else:
        print("fp8 linear with casts: slower than bf16 at the largest size, so it has no crossover here")
    for dtype in (torch.float32, torch.bfloat16):
        layers = [torch.randn(4096, 4096, device="cuda", dtype=dtype) for _ in range(16)]
        x = torch.randn(8, 4096, device="cuda", dtype=dtype)
        took_s = clocked(lambda layers=layers, x=x: [x @ layer for layer in layers])  # type: ignore[misc]
        bytes_s = sum(layer.nbytes for layer in layers) / took_s
        yield Figure(f"decode of 8 tokens, weights in {dtype}", bytes_s, "B/s", name, {})


def on_cpu() -> None:
    """The half that needs no GPU: the chase, products, and their rooflines."""
    from thinwire.calibration.kernels import latencies_ns, products, rooflines
    from thinwire.device import Device

    found = list(products(("float32",), Device()))
    for size, ns in latencies_ns():
        print(f"{size >> 10:>8} KiB {ns:>10.2f} ns a load")
    for each in found:
        print(f"{each.dtype} {each.shape} {each.fill:<7} {each.operations / each.seconds / 1e9:>10.2f} GFLOP/s")
    for name, fit in rooflines(found).items():
        print(f"{name}: {fit}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--json")
    parser.add_argument("--compile", metavar="ARCH")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args(words)
    chosen = [each for each in kernels() if not args.only or any(word in each.name for word in args.only)]
    if args.list:
        print(*(each.name for each in chosen), sep="\n")
        return 0
    if args.compile:
        for each in chosen:
            if fits(each, args.compile):
                compiled_by_core(each, args.compile)
                print(f"compiled: {each.name}", flush=True)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no GPU: this is the half that needs none")
        on_cpu()
        return 0
    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    blocks = OCCUPANCY * torch.cuda.get_device_properties(0).multi_processor_count // 4 * 4
    found = []
    for each in chosen:
        if not fits(each, arch):
            print(f"{each.name}: needs {each.arch}, and this is {arch}")
            continue
        found.append(measured(each, compiled_by_core(each, arch), blocks if each.amount else each.cluster))
    found += [] if args.only else list(library())
    for result in found:
        beside = ", ".join(f"{name} {value:g}" for name, value in result.published.items())
        print(f"{result.name:<48} {result.value:>12.4g} {result.unit:<12} {beside}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
