"""`python -m gguftools`: the command line."""

import sys

from gguftools.cli import main

sys.exit(main())
