"""The commands export, import and generate, which convert checkpoints and try them out."""

from thinwire.convert.options import ExportConfig, GenerateConfig, ImportConfig

__all__ = ["ExportConfig", "GenerateConfig", "ImportConfig"]
