# SPDX-License-Identifier: Apache-2.0
"""The `adaflash` command and its subcommands."""
