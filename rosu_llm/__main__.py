"""``python -m rosu_llm`` is ``rosu``."""

import sys

from .cli.main import main

sys.exit(main())
