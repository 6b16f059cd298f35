"""The share of codecs in the processor time of a step, for every method of the frontier.

    python benchmarks/codec_share.py [--model demo] [--dtype fp32] [--methods zero demo ...]

Four ranks in one process (benchmarks/one_process.py), each a node or an island of its own; packing and unpacking are
counted as the meter counts them in training, in processor time. Figures are those of --steps steps, of islands those
from one exchange to the next: a run that is longer by as many, less a short one. What can't train in one process is
left out, and so are islands that exchange more rarely than every 30 steps.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace

import torch
from frontier import METHODS
from loss import MODELS, contestants
from one_process import train

from thinwire.errors import ConfigError
from thinwire.methods.outer.base import IslandsMethod
from thinwire.run.config import TrainConfig
from thinwire.run.run import Run

# As few exact steps as may be, all of them in the short run.
BEGUN = {"onebit-adam": "onebit-adam[freeze=2]"}
SHORT, MOST_STEPS = 3, 30


def steps_between(config: TrainConfig) -> int | None:
    """Steps from one exchange of islands to the next; None: there are no islands."""
    strategy = Run.of(config).strategy
    return int(getattr(strategy, "sync_every", 1)) if isinstance(strategy, IslandsMethod) else None


def seconds(config: TrainConfig, steps: int) -> tuple[float, float]:
    """Processor seconds of a rank in a run of so many steps: all, and those of codecs."""
    found = train(replace(config, steps=steps))
    # Models and their optimizers refer to each other.
    gc.collect()
    return found.compute_s * steps, found.codec_s * steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", choices=("demo", "tiny"))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.model}, {args.dtype}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    print(f"{'method':36} {'a step':>10} {'codecs':>10} {'share':>7}")
    for name in args.methods:
        text = BEGUN.get(name, METHODS[name])
        base = replace(MODELS[args.model], dtype=args.dtype, eval_sequences=4, steps=args.steps, warmup_steps=0)
        try:
            config = next(iter(contestants(text, base).values()))
            steps = steps_between(config) or args.steps
            if steps > MOST_STEPS:
                print(f"{name:36} not measured: exchanges every {steps} steps only", flush=True)
                continue
            seconds(config, 1)
            short, whole = seconds(config, SHORT), seconds(config, SHORT + steps)
        except ConfigError as error:
            print(f"{name:36} {str(error).split(': ')[0]}", flush=True)
            continue
        step_ms, codec_ms = (1e3 * (more - less) / steps for more, less in zip(whole, short, strict=True))
        print(f"{name:36} {step_ms:7.0f} ms {codec_ms:7.1f} ms {codec_ms / step_ms:7.1%}", flush=True)


if __name__ == "__main__":
    main()
