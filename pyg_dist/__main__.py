"""``python -m pyg_dist``: see :mod:`pyg_dist.cli`."""

from pyg_dist.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
