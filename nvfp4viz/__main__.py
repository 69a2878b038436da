"""``python -m nvfp4viz``."""

import sys

from nvfp4viz.cli import main

sys.exit(main())
