"""Published measurements of devices that are not at hand, each under the device on which it was measured.

Sources: "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture" (IPDPS 2024, arXiv 2402.13499) for all but the
entries on "near" and "far" parts of a cache, which are from its extended version (arXiv 2501.12084).
"""

from __future__ import annotations

from thinwire.errors import ConfigError, nearest

H800, A100, RTX = "H800 PCIe", "A100 PCIe", "RTX 4090"
# Names end with their unit. Dense products unless they say sparse; wgmma with zeros as inputs.
TABLES: dict[str, dict[str, float]] = {
    H800: {
        "peak fp16 TFLOP/s": 756.5, "l1 latency cycles": 40.7, "shared latency cycles": 29.0,
        "l2 latency cycles": 263.0, "global latency cycles": 478.8, "l1 bytes/clock/SM": 124.1, "l2 bytes/clock": 3942,
        "l2 over global bandwidth": 4.23, "mma fp16 TFLOP/s": 494.4, "mma sparse fp16 TFLOP/s": 722.8,
        "mma int8 TOP/s": 977.9, "wgmma fp16 SS TFLOP/s": 729.3, "wgmma fp16 RS TFLOP/s": 729.2,
        "wgmma fp8 TFLOP/s": 1448.4, "wgmma int8 TOP/s": 1449.0, "wgmma fp16 m64n256k16 cycles": 128.0,
        "dsm latency cycles": 180.0, "dsm ring of 2 TB/s": 3.27, "dsm ring of 4 TB/s": 2.65,
        "near l2 latency cycles": 258.0, "far l2 latency cycles": 414.1, "tma more latency cycles": 170.0,
    },
    A100: {
        "peak fp16 TFLOP/s": 312.0, "l1 latency cycles": 37.9, "shared latency cycles": 29.0,
        "l2 latency cycles": 261.5, "global latency cycles": 466.3, "l1 bytes/clock/SM": 106.8, "l2 bytes/clock": 2008,
        "l2 over global bandwidth": 2.01, "mma fp16 TFLOP/s": 310.6, "mma sparse fp16 TFLOP/s": 622.8,
        "mma int8 TOP/s": 607.6, "near l2 latency cycles": 208.0, "far l2 latency cycles": 356.6,
    },
    RTX: {
        "l1 latency cycles": 43.4, "shared latency cycles": 30.1, "l2 latency cycles": 273.0,
        "global latency cycles": 541.5, "l1 bytes/clock/SM": 121.2, "l2 bytes/clock": 1708,
        "l2 over global bandwidth": 4.67, "mma fp16 TFLOP/s": 357.6, "mma sparse fp16 TFLOP/s": 711.8,
        "mma int8 TOP/s": 711.7,
    },
}  # fmt: skip


def published(device: str, name: str) -> float:
    """A published value. Raises ConfigError for a device or a name without one: no other device stands in for it."""
    if device not in TABLES:
        known = ", ".join(TABLES)
        raise ConfigError(
            f"device {device!r}: nothing published is held for it, and no other device's figures stand in; known: "
            f"{known}{nearest(device, TABLES)}"
        )
    if name not in TABLES[device]:
        raise ConfigError(f"{name!r} is not published for {device}{nearest(name, TABLES[device])}")
    return TABLES[device][name]
