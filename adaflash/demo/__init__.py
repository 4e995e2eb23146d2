# SPDX-License-Identifier: Apache-2.0
"""The embedded default: a small real model, its drafter, prompts, and the measurement that compares them."""
