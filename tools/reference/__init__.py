# SPDX-License-Identifier: Apache-2.0
"""Makes docs/reference from the code."""
