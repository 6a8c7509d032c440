"""`python -m rockmate` is the command `rockmate`."""

import sys

from rockmate.cli import main

sys.exit(main())
