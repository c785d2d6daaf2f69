"""``PYG_DIST_GPU_TESTS=cpu`` tries the tests for GPUs where there is none: small, and on the CPU."""

import os

IS_TRIAL = os.environ.get("PYG_DIST_GPU_TESTS") == "cpu"
