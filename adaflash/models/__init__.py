# SPDX-License-Identifier: Apache-2.0
"""Target models: dense Llama and Qwen3 from Hugging Face directories."""
