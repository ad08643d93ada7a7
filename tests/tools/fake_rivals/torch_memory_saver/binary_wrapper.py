# SPDX-License-Identifier: Apache-2.0
"""The original has a module of this name; torpor's replacement has none."""
