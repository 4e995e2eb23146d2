# SPDX-License-Identifier: Apache-2.0
"""Simulation of serving with block-diffusion speculation on a device that need not be here. Host only, no model."""
