"""DeMo's own code as a contestant of `thinwire compare`: the same model, data and learning rates, its own optimizer.

    thinwire compare --strategies 'demo,cmd:original=python3 benchmarks/original_demo.py --config {config}
        --run-dir {run_dir} --steps {steps}' --lab nodes=4,rate=20mbit -- --model tiny --steps 1000 --lr 0.003

It is the DeMo of pytorch_optimizer (4.1.0 was tried), which needs einops; thinwire installs neither. Every rank has the
whole model, and the optimizer exchanges the coefficients itself: 32 of each block, as fp32 beside 64-bit indices. It
scales gradients by the learning rate before they enter the momentum, and divides colliding coefficients by their
count. benchmarks/rival_time.py measures the processor time of both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch.distributed as dist
from pytorch_optimizer import DeMo
from rival import Rival, parser_of


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--top-k", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=64)
    arguments = parser.parse_args()
    rival = Rival.of(arguments, strategy="demo")
    dist.init_process_group("gloo")
    model = rival.model()
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() >= 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, rival.config.weight_decay), (False, 0.0))
    ]
    optimizer = DeMo(
        groups, lr=rival.config.lr, compression_top_k=arguments.top_k, compression_chunk=arguments.chunk
    )  # fmt: skip

    def update(lr: float) -> Mapping[str, float]:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return {"sent_bytes": (rival.world_size - 1) * optimizer.data_transmit}

    rival.train(model, update)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
