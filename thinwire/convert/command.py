"""`thinwire export`, `thinwire import` and `thinwire generate` as commands."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.convert.options import ExportConfig, GenerateConfig, ImportConfig, read
from thinwire.report.units import short


def run_export(args: Sequence[str]) -> int:
    """Write the folder and say how well it agrees with the run."""
    config = read(ExportConfig, args)
    from thinwire.convert.export import export

    done = export(config)
    print(
        f"{config.folder}: {done.architecture}, {short(done.num_parameters)} parameters in {config.dtype}, "
        f"from {config.run} after step {done.step}"
    )
    print(
        f"loaded again by transformers, compared on {done.fidelity.num_tokens:,} held-out tokens: {done.fidelity} "
        f"(limits {config.max_kl:g} and {100 * config.min_agreement:g} %)"
    )
    return 0


def run_import(args: Sequence[str]) -> int:
    """Write the folder and say what was found."""
    config = read(ImportConfig, args)
    from thinwire.convert.foreign import import_checkpoint
    from thinwire.convert.origin import training_command

    done = import_checkpoint(config)
    print(
        f"{config.folder}: {done.architecture}, {short(done.num_parameters)} parameters in {done.num_tensors} tensors "
        f"of fp32, from {config.source} ({done.format})"
    )
    print(f"train it: {training_command(config.folder)}")
    return 0


def run_generate(args: Sequence[str]) -> int:
    """Print the prompt, and each word of what the model adds as soon as it is there."""
    config = read(GenerateConfig, args)
    from thinwire.convert.generate import pieces

    for piece in pieces(config):
        print(piece, end="", flush=True)
    print()
    return 0
