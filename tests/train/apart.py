"""The command, where process 1 is late to find out where to go on.

python -m train.apart SECONDS -- ARGUMENTS OF THE COMMAND
"""

import sys
import time

import jax

from jpipe.train import setup
from jpipe.train.__main__ import main

if __name__ == "__main__":
    find = setup.find_snapshot

    def late(options):
        if jax.process_index() == 1:
            time.sleep(float(sys.argv[1]))
        return find(options)

    setup.find_snapshot = late
    sys.exit(main(sys.argv[3:]))
