"""The Hugging Face Trainer: a callback that compresses the communication of its model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from thinwire.adapters.attach import attach
from thinwire.errors import ConfigError
from thinwire.hosts.ddp.attach import CompressedDDP
from thinwire.hosts.fsdp.compress import CompressedFSDP

log = logging.getLogger("thinwire")

TrainerCallback: Any = object
missing: ImportError | None = None
try:
    import transformers

    TrainerCallback = transformers.TrainerCallback
except ImportError as error:
    missing = error


class CompressionCallback(TrainerCallback):
    """`Trainer(..., callbacks=[CompressionCallback(METHOD)])`: compresses the communication of the sharded model.

    The Trainer makes its callbacks before it shards the model. This one attaches when training begins and detaches when
    it ends, so `handle` is None before. Logs get `sent_mb`, the payload of the first rank since training began. Every
    checkpoint of the Trainer also holds the method's state, one file per rank.

    method, options: as for `attach`. Raises ConfigError if transformers is not installed.
    """

    def __init__(self, method: Any, **options: Any) -> None:
        if missing is not None:
            raise ConfigError(
                f"the callback needs transformers: pip install -e '.[hf]' in thinwire's folder ({missing})"
            )
        self.method = method
        self.options = options
        self.handle: CompressedFSDP | CompressedDDP | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Attach, and load the method's state from a checkpoint. Raises ConfigError as `attach` does."""
        handle = self.handle = attach(held["model"], held["optimizer"], self.method, **self.options)
        saved = self._state_file(args, state)
        if state.global_step and saved.exists():
            handle.load_state_dict(torch.load(saved))
        elif state.global_step:
            log.warning("thinwire: %s does not exist: the method continues without its saved state", saved)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **held: Any) -> None:
        """Add the payload sent to the logs."""
        if self.handle is not None and logs is not None:
            logs["sent_mb"] = round(self.handle.meter.snapshot().sent_bytes / 1e6, 3)

    def on_save(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Save the method's state of this rank beside the Trainer's own files."""
        if self.handle is not None:
            saved = self._state_file(args, state)
            saved.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.handle.state_dict(), saved)

    def on_train_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
        """Give FSDP2 its own collectives back."""
        if self.handle is not None:
            self.handle.close()

    def _state_file(self, args: Any, state: Any) -> Path:
        assert self.handle is not None
        name = f"checkpoint-{state.global_step}"
        resumed = Path(str(getattr(args, "resume_from_checkpoint", None) or ""))
        folder = resumed if resumed.name == name else Path(args.output_dir) / name
        return folder / f"thinwire-rank{self.handle.comm.rank}.pt"
