"""`python -m andrea_pl` is `andrea`."""

import sys

from andrea_pl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
