# SPDX-License-Identifier: Apache-2.0
"""`python -m gpu_path WORDS`: as `python WORDS`, on the GPU path."""

import os
import sys

from gpu_path import environment

if __name__ == "__main__":
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], os.environ | environment())
