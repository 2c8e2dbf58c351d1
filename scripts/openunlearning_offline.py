#!/usr/bin/env python3
"""Make a folder in which OpenUnlearning's TOFU commands run on a CPU without a network, in minutes.

python scripts/openunlearning_offline.py TOFU_FOLDER OUT [--rows 8]
"""

from rosu_llm.openunlearning.offline import main, make_classifier

__all__ = ["make_classifier"]

if __name__ == "__main__":
    main()
