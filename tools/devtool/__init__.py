# SPDX-License-Identifier: Apache-2.0
"""Behind tools/dev: setup.py installs, commands.py does what was asked, checks.py looks at documents and sources."""
