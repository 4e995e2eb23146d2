# SPDX-License-Identifier: Apache-2.0
"""The embedded default: a small real model, its drafter, and prompts to try them on."""
