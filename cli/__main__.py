"""`python -m kvtape.cli` is the console script."""

import sys

from kvtape.cli import main

sys.exit(main())
