# SPDX-License-Identifier: Apache-2.0
"""`python -m rig WORDS`: as `python WORDS`, on the rig."""

import os
import sys

from rig import environment

if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment())
