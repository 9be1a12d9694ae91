"""Two test processes share two cores: one thread each, set before torch is imported."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
