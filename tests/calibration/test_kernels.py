"""Rooflines, published figures under their devices, and the chase through caches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from thinwire.calibration import kernels
from thinwire.calibration.kernels import LINE_BYTES, Product, cycle, follow, latencies_ns, products, rooflines
from thinwire.calibration.published import A100, H800, RTX, TABLES, published
from thinwire.calibration.work import probes
from thinwire.cost.roofline import CastLinear, Roofline
from thinwire.device import Device
from thinwire.errors import ConfigError, Problems
from thinwire.launch.calibrate import CalibrateConfig, check
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


def test_a_roofline_of_measured_products_is_rough() -> None:
    """Caches, which it does not know, make small products faster: it is off by a third, not by a multiple."""
    samples = [Product("float32", shape, "random", seconds).sample for shape, seconds in MEASURED]
    for known, held in ((samples[::2], samples[1::2]), (samples[1::2], samples[::2])):
        found = Roofline.fitted(known)
        errors = sorted(abs(found.seconds(*given) / seconds - 1) for *given, seconds in held)
        assert errors[len(errors) // 2] < 0.35 and errors[-1] < 0.85
        # Whatever bounds a product, no rate of the fit is far from the best that was reached.
        assert 0.7 < found.flops / max(operations / seconds for operations, _, seconds in samples) < 1.1


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
    assert follow(following, 37) == 0 and follow(following, 36) == places[-1]
    walked: list[int] = []

    def seconds(run: Callable[[], object], longest_s: float) -> float:
        walked.append(int(run()))  # type: ignore[call-overload]
        return 8e-6

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "seconds_of", seconds)
        assert [(size, round(ns, 9)) for size, ns in latencies_ns((4096, 1 << 16), 2000)] == [(4096, 4.0), (65536, 4.0)]
    # 64 lines go round 31 times and a quarter; 1,024 lines once, and almost again.
    assert walked == [follow(cycle(64), 2000 % 64), follow(cycle(1024), 2000 % 1024)]
    found = list(products(["float32"], Device(), ((4, 8, 16), (32, 32, 32))))
    assert [(each.shape[0], each.fill) for each in found] == [
        (4, "random"),
        (4, "zeros"),
        (32, "random"),
        (32, "zeros"),
    ]
    assert found[0].operations == 1024 and found[0].num_bytes == 4 * (64 + 128 + 32)
    assert rooflines(found)["float32"].seconds(*found[0].sample[:2]) > 0


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
