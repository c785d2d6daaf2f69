"""Every process of the tests finds what the first one has compiled: else ranks compile each module anew."""

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
