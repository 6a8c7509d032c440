"""`python -m rockmate` is the command `rockmate`."""

import sys

from rockmate.cli.main import main

sys.exit(main())
