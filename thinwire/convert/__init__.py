"""Commands that turn checkpoints into others and look at them: export, import, generate."""

from thinwire.convert.options import ExportConfig, GenerateConfig, ImportConfig

__all__ = ["ExportConfig", "GenerateConfig", "ImportConfig"]
