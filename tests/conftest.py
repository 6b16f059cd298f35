import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import thinwire, and without bytecode on disk each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
