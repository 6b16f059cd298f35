"""Disk as one more slow link: files with a limited rate, a meter and checksums, behind memory of a fixed size."""

from thinwire.tiers.chunked import ChunkedFile
from thinwire.tiers.coding import PLAIN, Coding
from thinwire.tiers.disk_rows import DiskRows
from thinwire.tiers.file import DiskFile, Pace, TierMeter, TierReading
from thinwire.tiers.growing_rows import GrowingRows
from thinwire.tiers.mapped_rows import MappedRows
from thinwire.tiers.mount import check_folder
from thinwire.tiers.pool import BLOCK_BYTES, Pool
from thinwire.tiers.rows import RowStore
from thinwire.tiers.shelf import Shelf

__all__ = [
    "BLOCK_BYTES",
    "PLAIN",
    "Coding",
    "DiskFile",
    "DiskRows",
    "GrowingRows",
    "MappedRows",
    "Pace",
    "ChunkedFile",
    "Pool",
    "RowStore",
    "Shelf",
    "TierMeter",
    "TierReading",
    "check_folder",
]
