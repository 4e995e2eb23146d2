# SPDX-License-Identifier: Apache-2.0
"""The paged KV pool: who owns which block, and the tensors behind it."""
