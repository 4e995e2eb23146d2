# SPDX-License-Identifier: Apache-2.0
"""Drafting, verify lengths and packing: everything between two target forwards."""
