"""`python -m tools.gpu`."""

import sys

from tools.gpu.run import main

sys.exit(main())
