"""Rooflines, published figures under their devices, and the chase through caches."""

from __future__ import annotations

import itertools
import random

import pytest

from thinwire.calibration import kernels
from thinwire.calibration.kernels import (
    LINE_BYTES,
    Product,
    Walk,
    cached_bytes,
    cycle,
    fall_of,
    follow,
    latencies_ns,
    products,
    rooflines,
)
from thinwire.calibration.published import A100, H800, RTX, TABLES, published
from thinwire.calibration.work import probes
from thinwire.cost import Cores, Machine, Network
from thinwire.cost.roofline import CastLinear, Roofline
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems
from thinwire.launch.calibrate import CalibrateConfig, check, with_kernels
from thinwire.models.llama import LlamaConfig


def test_published_figures_keep_their_device() -> None:
    peak = published(H800, "peak fp16 TFLOP/s")
    assert published(H800, "mma fp16 TFLOP/s") / peak == pytest.approx(0.653, abs=1e-3)
    assert published(H800, "wgmma fp16 SS TFLOP/s") / peak == pytest.approx(0.964, abs=1e-3)
    ratio = published(H800, "wgmma fp8 TFLOP/s") / published(H800, "wgmma fp16 SS TFLOP/s")
    assert ratio == pytest.approx(1.986, abs=1e-3)
    assert published(H800, "dsm latency cycles") / published(H800, "l2 latency cycles") == pytest.approx(
        0.684, abs=1e-3
    )
    assert published(A100, "mma fp16 TFLOP/s") / published(A100, "peak fp16 TFLOP/s") > 0.99
    assert set(TABLES) == {H800, A100, RTX}
    with pytest.raises(
        ConfigError, match="'H100 SXM': nothing published is held for it, and no other device's figures"
    ):
        published("H100 SXM", "l2 latency cycles")
    with pytest.raises(ConfigError, match="'dsm latency cycles' is not published for A100 PCIe"):
        published(A100, "dsm latency cycles")


def test_a_roofline_predicts_shapes_that_it_has_not_seen() -> None:
    truth, rng = Roofline(3e12, 2e11, 5e-6), random.Random(0)
    shapes = [(2.0 * m * n * k, 4.0 * (m * k + k * n + m * n)) for m, n, k in itertools.product((1, 64, 512), repeat=3)]
    samples = [(*shape, truth.seconds(*shape) * rng.uniform(0.9, 1.1)) for shape in shapes]
    found = Roofline.fitted(samples[::2])
    assert found.flops == pytest.approx(truth.flops, rel=0.1) and found.launch_s == pytest.approx(5e-6, rel=0.1)
    close = [abs(found.seconds(*shape) / truth.seconds(*shape) - 1) < 0.25 for shape in shapes[1::2]]
    assert sum(close) >= 0.8 * len(close)
    with pytest.raises(ConfigError, match="a roofline of 0 samples"):
        Roofline.fitted([])


# Products of [m, k] and [k, n] in fp32, random values, and their seconds on one core of a server's processor.
MEASURED = [
    ((1, 512, 512), 1.244e-05), ((1, 1024, 1024), 5.582e-05), ((1, 2048, 2048), 2.504e-04),
    ((1, 4096, 2048), 1.053e-03), ((8, 2048, 2048), 1.129e-03), ((8, 512, 2048), 2.545e-04),
    ((64, 512, 512), 3.146e-04), ((128, 128, 128), 3.873e-05), ((256, 256, 256), 2.971e-04),
    ((256, 2048, 512), 4.730e-03), ((512, 512, 512), 2.354e-03), ((1024, 512, 512), 4.687e-03),
    ((64, 64, 64), 6.244e-06), ((32, 32, 32), 1.803e-06), ((768, 768, 768), 7.892e-03), ((2, 2048, 1024), 1.726e-04),
]  # fmt: skip


def test_rooflines_of_classes_predict_held_out_products() -> None:
    """Within 25% for 80% of them: few rows read a matrix from caches or from memory, and many rows compute."""
    every = [Product("float32", shape, "random", seconds) for shape, seconds in MEASURED]
    for known, held in ((every[::2], every[1::2]), (every[1::2], every[::2])):
        fits = rooflines(known)
        near = [fits.get(f"float32 {each.kind()}", fits["float32 few rows"]) for each in held]
        errors = [
            abs(fit.seconds(*each.sample[:2]) / each.seconds - 1) for fit, each in zip(near, held, strict=True)
        ]  # fmt: skip
        assert sum(error < 0.25 for error in errors) >= 0.8 * len(errors)
        # Many rows reach what the best product reaches, and few read at the rate of memory.
        best = max(each.operations / each.seconds for each in every)
        assert 0.95 < fits["float32 many rows"].flops / best < 1.05
        # One for all of them is off by up to 81%.
        whole = Roofline.fitted([each.sample for each in known])
        rough = [abs(whole.seconds(*each.sample[:2]) / each.seconds - 1) for each in held]
        assert sum(error < 0.25 for error in rough) < sum(error < 0.25 for error in errors)


def test_a_launch_that_no_product_shows_is_no_number() -> None:
    # Each a little faster for its size than the one before: no launch explains them.
    samples = [(1e6 * 4**n, 1e4 * 4**n, 1e-4 * 4.2**n) for n in range(5)]
    assert Roofline.fitted(samples).launch_s == 0.0
    assert Roofline.fitted([(a, b, each_s + 1e-4) for a, b, each_s in samples]).launch_s > 1e-5


def test_eight_bits_pay_from_one_size_on() -> None:
    made = CastLinear(Roofline(7e14, 2e12, 5e-6), Roofline(1.4e15, 2e12, 5e-6), 2e12)
    sizes = [1 << power for power in range(6, 16)]
    faster = [eight < sixteen for sixteen, eight in map(made.seconds, sizes)]
    first = made.crossover(sizes)
    assert first is not None and not faster[0] and faster[-1]
    assert faster == [size >= first for size in sizes]
    assert CastLinear(made.half, made.half, 2e12).crossover(sizes) is None


def test_a_chase_visits_every_line_once_and_all_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    following = cycle(37)
    places = [0]
    while (after := int(following[places[-1]])) != 0:
        places.append(after)
    assert sorted(places) == list(range(0, 37 * LINE_BYTES // 8, LINE_BYTES // 8))
    assert follow(following, 0, 37) == 0 and follow(following, 0, 36) == places[-1]
    walked: list[int] = []

    def seconds(run: Walk, longest_s: float) -> float:
        for _ in range(2):
            run()
        walked.append(run.at)
        return 8e-6

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "seconds_of", seconds)
        assert [(size, round(ns, 9)) for size, ns in latencies_ns((4096, 1 << 16), 2000)] == [(4096, 4.0), (65536, 4.0)]
    # The second walk goes on where the first has ended, or it would come to few of many lines.
    assert walked == [follow(cycle(64), 0, 4000 % 64), follow(cycle(1024), 0, 4000 % 1024)]
    found = list(products(["float32"], Device(), ((4, 8, 16), (32, 32, 32))))
    assert [(each.shape[0], each.fill) for each in found] == [
        (4, "random"),
        (4, "zeros"),
        (32, "random"),
        (32, "zeros"),
    ]
    assert found[0].operations == 1024 and found[0].num_bytes == 4 * (64 + 128 + 32)
    assert rooflines(found)["float32 few rows"].seconds(*found[0].sample[:2]) > 0


def test_a_load_from_memory_takes_longer_than_one_from_a_cache() -> None:
    """Some 50 times as long, so that no other work on the machine can hide it."""
    (near, near_ns), (far, far_ns) = latencies_ns((1 << 14, 1 << 26), 20_000)
    assert far_ns > 2 * near_ns
    assert cached_bytes([(near, near_ns), (far, far_ns)]) == near
    assert cached_bytes([(1, 1.0), (4, 3.0), (16, 9.0), (64, 10.0)]) == 4 and cached_bytes([(1, 1.0), (4, 1.0)]) == 1
    assert fall_of([(1, 2.0), (4, 1.5), (16, 9.0)]) == pytest.approx(0.25) and fall_of([(1, 1.0)]) == 0.0


def test_both_fills_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"random": 2e-3, "zeros": 1e-3}
    found = [
        Product(dtype, shape, fill, seconds) for dtype in ("float32", "bfloat16")
        for shape in ((1, 256, 256), (512, 512, 512)) for fill, seconds in taken.items()
    ]  # fmt: skip
    monkeypatch.setattr(kernels, "products", lambda dtypes, device: found)
    monkeypatch.setattr(kernels, "latencies_ns", lambda: [(1 << 14, 1.0), (1 << 26, 90.0)])
    network = Network.even(1)
    made, lines = with_kernels(Machine(("a",), network, Cores((0,), (1.0,)), {"copy": 1e10}), Device())
    again = Machine.from_json(made.to_json())
    assert again.products["float32 512 x 512 x 512"] == pytest.approx((1.342e11, 2.684e11), rel=1e-3)
    # What fits into caches is what the chase says: 257 KiB of a single row do not.
    assert set(again.kernels) == {
        f"{dtype} {kind}" for dtype in ("float32", "bfloat16") for kind in ("many rows", "few rows beyond caches")
    }  # fmt: skip
    assert "never faster by more than 0%" in lines[-1]
    assert sum("of the best product's operations" in line and "of a copy's bytes" in line for line in lines) == 4


def test_all_work_is_timed_until_the_device_has_done_it() -> None:
    class Counted(Device):
        """A device that counts how often it is waited for."""

        num = 0

        def synchronize(self) -> None:
            self.num += 1

    device = Counted()
    layer = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    found = probes([layer], ["fp32"], ["int4/64"], device)
    kinds = ["layer 16 fp32", "launch 16 fp32", "copy", "encode int4/64", "decode int4/64"]
    assert [probe.kind for probe in found] == kinds
    for number, probe in enumerate(found, 1):
        probe.run()
        assert device.num == number, probe.kind
    problems = Problems()
    check(CalibrateConfig(device="cuda", workers=1000), problems)
    (told,) = problems.messages
    assert told.startswith("--device cuda: ") and "nearest: --" in told
