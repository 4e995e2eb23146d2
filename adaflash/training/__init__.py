# SPDX-License-Identifier: Apache-2.0
"""Online learning: trajectories, losses, the trainer, and versioned delivery of what it learned."""
