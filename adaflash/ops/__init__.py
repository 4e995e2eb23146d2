# SPDX-License-Identifier: Apache-2.0
"""Device ops: the reference backend, the CPU backend, metadata of a step and the backend registry."""
