"""The Hugging Face Trainer on a model sharded by FSDP2; one callback compresses what it exchanges.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import os
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import thinwire
from thinwire.adapters.trainer import CompressionCallback

VOCABULARY, LENGTH = 64, 32


def save_new_model(folder: str) -> None:
    """A small Llama with random weights, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def counting(first: int) -> dict[str, list[int]]:
    """A sequence that counts upwards: easy to learn."""
    tokens = [(first + i) % VOCABULARY for i in range(LENGTH)]
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_new_model(folder)
        sharded = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=sharded)
        args = TrainingArguments(
            output_dir=folder, use_cpu=not torch.cuda.is_available(), max_steps=20, per_device_train_batch_size=8,
            learning_rate=1e-2, logging_steps=10, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        data = [counting(7 * first) for first in range(400)]
        trainer = Trainer(model, args, train_dataset=data, callbacks=[CompressionCallback(thinwire.ZeroPP())])
        trainer.train()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
