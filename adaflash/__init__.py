# SPDX-License-Identifier: Apache-2.0
"""AdaFlash: LLM serving that is losslessly faster by speculative decoding, and gets faster while it serves."""

__version__ = "0.1.0"
